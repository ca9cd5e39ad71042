"""Which optimizers and parameters AdaScale accepts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adascale_worker.errors import UnsupportedOptimizerError
from adascale_worker.process.user_code import warn_user
from adascale_worker.scaling.rules import AdamRule, ProtocolRule, ScalingRule, SecondMomentOptimizer

_REFUSED = {
    "Muon": "whose step has singular values of 1 whatever the size and the noise of the gradient are",
    "Lion": "whose step is the sign of its momentum whatever the size and the noise of the gradient are",
    "Adafactor": "which keeps no second moment of each parameter to measure gradients with, and whose step is"
    " relative to the size of the weights",
}
"""Why well-known optimizers are not supported, by a part of the names of their classes.

There are several implementations of each, and some are subclasses of SGD or AdamW.
"""


def scaling_rule_of(optimizer: torch.optim.Optimizer, *, observes: bool = False) -> ScalingRule:
    """Return the rule for the hyperparameters of `optimizer`, and the metric of its gradients.

    Without a metric of its own an optimizer is measured in the Euclidean norm, if it is only observed.
    """
    try:
        return _rule_of(optimizer)
    except UnsupportedOptimizerError:
        if not observes or isinstance(optimizer, torch.optim.LBFGS):
            raise
    warn_user(
        f"AdaScale observes {type(optimizer).__name__} in the Euclidean norm, because it has no metric for "
        "it. The critical batch in the optimizer's own metric may be several times smaller or larger"
    )
    return ScalingRule(optimizer)


def _rule_of(optimizer: torch.optim.Optimizer) -> ScalingRule:
    inner = getattr(optimizer, "optim", None)  # of ZeroRedundancyOptimizer
    if not isinstance(optimizer, SecondMomentOptimizer):
        _require_not_refused(inner or optimizer)
    if isinstance(optimizer, torch.optim.SGD) or isinstance(inner, torch.optim.SGD):
        return ScalingRule(optimizer)
    if isinstance(optimizer, SecondMomentOptimizer):
        return ProtocolRule(optimizer)
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return AdamRule(optimizer)
    name = type(optimizer).__name__
    if inner is not None:
        name = f"{name} of {type(inner).__name__}"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            "got LBFGS, which computes the gradients of one step several times, with other weights each "
            "time, so its steps have no batch size to scale: use torch.optim.SGD, Adam or AdamW"
        )
    raise UnsupportedOptimizerError(
        f"got {name}; AdaScale scales torch.optim.SGD, with or without momentum, ZeroRedundancyOptimizer of "
        "it, torch.optim.Adam and torch.optim.AdamW: use one of these. An optimizer of your own that keeps a "
        "second moment needs two methods, `second_moment` and `hyperparameters_at` (docs/adascale.md, "
        '"Optimizers")'
    )


def _require_not_refused(optimizer: torch.optim.Optimizer) -> None:
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    for name, reason in _REFUSED.items():
        if any(name in kind for kind in kinds):
            raise UnsupportedOptimizerError(
                f"got {kinds[0]}, {reason}: the rules of SGD and Adam for a larger batch do not hold for it, "
                "and no other is measured. Use torch.optim.AdamW for all parameters, or this optimizer "
                "without AdaScale, with a fixed number of replicas and batch size"
            )


def require_readable(unreadable: Sequence[Tensor]) -> None:
    """Raise UnsupportedOptimizerError if there are parameters whose gradients AdaScale cannot read."""
    if not unreadable:
        return
    shape = tuple(unreadable[0].shape)
    placements = getattr(unreadable[0], "placements", None)
    if placements is None:
        raise UnsupportedOptimizerError(
            f"got {len(unreadable)} parameters that fully_shard did not shard (the first has shape {shape}) "
            "beside parameters that it did shard; AdaScale reads all gradients of a model in one way: apply "
            "fully_shard to the root module too, without ignored_params"
        )
    raise UnsupportedOptimizerError(
        f"got {len(unreadable)} DTensors as parameters, the first of shape {shape} with placements "
        f"{tuple(placements)}; AdaScale reads a DTensor only if fully_shard alone made it, over all ranks, "
        "and the model is given: AdaScale(..., model=model). Tensor and expert parallelism are not "
        "supported: use replicas, fully_shard, or the optimizer without AdaScale"
    )


def require_count(name: str, value: int) -> None:
    """Raise ValueError unless `value` is an integer, at least 1."""
    if value != int(value) or value < 1:
        raise ValueError(f"got {name}={value}; it must be an integer, at least 1")
