"""What a step that is worth several steps at the initial batch size does with an optimizer's hyperparameters.

SGD: the learning rate is multiplied by the gain r, as in AdaScale SGD.

Adam and AdamW: a step at a larger batch divides by the square root of a second moment that is about r times
smaller, because noise dominates it. So the learning rate is multiplied by sqrt(r): the mean of such a step is
r times that of a step at the initial batch size. The moving averages of Adam keep their length in units of
progress: beta ** r. This is the scaling of Malladi et al. ("On the SDEs and Scaling Rules for Adaptive
Gradient Algorithms", NeurIPS 2022, arXiv 2205.10287, definition 5.2) with the gain in place of the ratio of
batch sizes; beta ** r is their 1 - r (1 - beta) where r (1 - beta) is small. Their eps / sqrt(r) is used
too. The limit of small steps, from which they derive it, needs r (1 - beta) well below 1. So the beta of the
first moment does not fall below `LEAST_BETA1`, with which its average covers 2.5 steps. The decoupled weight
decay of AdamW is per progress: a step multiplies the weights by 1 - r * lr * weight_decay. The weight decay
of Adam is a part of the gradient, and stays as it is.

Muon: the learning rate is multiplied by r, and so is what the decoupled weight decay takes from the weights.
The direction of its step has no size that a larger batch would change.

`docs/adascale.md` shows the comparison with other rules.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from adascale_worker.errors import UnsupportedOptimizerError
from adascale_worker.process.user_code import warn_user
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.torch_private.autograd import multiply_in_place

UNIT: Final = "adascale_unit"
"""The entry of a parameter group of Adam with the unit of its counts of steps: r of the last step.

It is 1 in a state that a plain optimizer has saved, which has no such entry.
"""

LEAST_BETA1: Final = 0.6
"""The least beta of the first moment at any gain; a smaller one stays as it is."""


class SecondMoment(NamedTuple):
    """The second moment that an optimizer divides the gradient of a parameter by, as `value * factor`."""

    value: Tensor  # of the shape of the parameter
    factor: float = 1.0  # above 0


@runtime_checkable
class SecondMomentOptimizer(Protocol):
    """What AdaScale needs of an optimizer that divides gradients by the square root of their second moment.

    For optimizers other than those of torch. Each parameter group has an "eps", which is added to the square
    root, or none.
    """

    param_groups: list[dict[str, Any]]

    def second_moment(self, parameter: Tensor) -> Tensor | None:
        """Return the moving average of the squared gradients of `parameter`, of the same shape and >= 0.

        The same on all ranks. With a correction of its bias, if the optimizer corrects it. None before the
        first step of the parameter.
        """
        ...

    def hyperparameters_at(self, group: Mapping[str, Any], gain: float) -> Mapping[str, Any]:
        """Return the values of a group for a step that is worth `gain` steps at the initial batch size.

        AdaScale sets them for the step, and restores the others after it. `adam_hyperparameters` returns them
        for an optimizer that has the "lr", "betas" and "eps" of Adam.
        """
        ...


class ScalingRule:
    """The rule of SGD, and the interface of the others: the lr is multiplied by the gain."""

    has_second_moments = False
    has_whole_matrices = False
    """Whether gradients are measured as whole matrices, of which a shard is not enough."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer: Any = optimizer

    def hyperparameters_at(self, group: Mapping[str, Any], gain: float) -> Mapping[str, Any]:
        """Return the values of a group for a step that is worth `gain` steps."""
        return {"lr": group["lr"] * gain}

    def lr_factor(self, gain: float) -> float:
        """Return the factor of the lr of the first group for a step that is worth `gain` steps."""
        group = {**self.optimizer.param_groups[0], "lr": 1.0}
        return float(self.hyperparameters_at(group, gain).get("lr", 1.0))

    @contextmanager
    def applied(self, gains: Sequence[float]) -> Iterator[None]:
        """Set the hyperparameters of each group for its gain, and restore the user's afterwards."""
        groups = self.optimizer.param_groups
        changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for number, group in enumerate(groups):
                gain = gains[number] if number < len(gains) else 1.0
                new = self.hyperparameters_at(group, gain)
                changed.append((group, {name: group[name] for name in new}))
                group.update(new)
                self.prepare(number, gain)
            yield
        finally:
            for group, originals in changed:
                group.update(originals)

    def prepare(self, number: int, gain: float) -> None:
        """Prepare the state of group `number` for a step that is worth `gain` steps."""

    def second_moments(self, number: int) -> dict[int, SecondMoment]:
        """Return the second moments of group `number` by the id of the parameter, of those with a step."""
        raise NotImplementedError

    def eps(self, number: int) -> float:
        """Return what group `number` adds to the square root of the second moment."""
        raise NotImplementedError


class AdamRule(ScalingRule):
    """The rule of `torch.optim.Adam` and `AdamW`.

    Adam corrects the bias of its averages by 1 - beta ** step. With beta ** r in the place of beta, `step`
    has to be the progress P in units of r, so that (beta ** r) ** (P / r) = beta ** P, the weight that the
    initial zero has left. So the counts of steps in the optimizer's state are multiplied by (old r) / (new r)
    when r changes. The correction of the second moment is exact then, and that of the first while its beta is
    above `LEAST_BETA1` or r does not change.
    """

    has_second_moments = True

    # Left out of a `torch.compile` of the step, which would be compiled again for the numbers of each step.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hyperparameters_at(self, group: Mapping[str, Any], gain: float) -> Mapping[str, Any]:
        """Return the values of a group for a step that is worth `gain` steps."""
        values = dict(adam_hyperparameters(group, gain))
        if isinstance(self.optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False):
            values["weight_decay"] = group["weight_decay"] * math.sqrt(gain)
        return values

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare(self, number: int, gain: float) -> None:
        """Convert the counts of steps of group `number` to units of `gain`."""
        unit = self._unit(number)
        if gain == unit:
            return
        states = (self.optimizer.state.get(p) for p in self.optimizer.param_groups[number]["params"])
        multiply_in_place([state["step"] for state in states if state], unit / gain)
        # In the group, because it belongs to the state of the optimizer, which others may save and restore.
        self.optimizer.param_groups[number][UNIT] = gain

    def second_moments(self, number: int) -> dict[int, SecondMoment]:
        """Return the second moments of group `number` by the id of the parameter, of those with a step."""
        group = self.optimizer.param_groups[number]
        name = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        beta, unit, states = float(group["betas"][1]), self._unit(number), self.optimizer.state
        present = {id(each): state for each in group["params"] if (state := states.get(each))}
        steps = [state["step"] for state in present.values()]
        if len({step.device for step in steps}) == 1:
            steps = torch.stack(steps).tolist()  # On a GPU (capturable or fused), this waits once.
        # With 0, all steps were skipped, in the kernel of a fused optimizer.
        factors = {step: 1.0 / (1.0 - beta ** (float(step) * unit)) for step in set(steps) if step}
        return {
            parameter_id: SecondMoment(local_shard(state[name]), factors[step])
            for (parameter_id, state), step in zip(present.items(), steps, strict=True)
            if step
        }

    def eps(self, number: int) -> float:
        """Return what group `number` adds to the square root of the second moment."""
        return float(self.optimizer.param_groups[number]["eps"] / math.sqrt(self._unit(number)))

    def _unit(self, number: int) -> float:
        unit: float = self.optimizer.param_groups[number].get(UNIT, 1.0)
        return unit


class MuonRule(ScalingRule):
    """The rule of `torch.optim.Muon`: the lr is multiplied by the gain, as for SGD."""

    has_whole_matrices = True


class ProtocolRule(ScalingRule):
    """The rule of a `SecondMomentOptimizer`, which it defines itself."""

    has_second_moments = True

    def hyperparameters_at(self, group: Mapping[str, Any], gain: float) -> Mapping[str, Any]:
        """Return the values of a group for a step that is worth `gain` steps."""
        values: Mapping[str, Any] = self.optimizer.hyperparameters_at(group, gain)
        return values

    def second_moments(self, number: int) -> dict[int, SecondMoment]:
        """Return the second moments of group `number` by the id of the parameter, of those with a step."""
        found = {}
        for parameter in self.optimizer.param_groups[number]["params"]:
            value = self.optimizer.second_moment(parameter)
            if value is not None:
                found[id(parameter)] = SecondMoment(local_shard(value))
        return found

    def eps(self, number: int) -> float:
        """Return what group `number` adds to the square root of the second moment."""
        return float(self.optimizer.param_groups[number].get("eps", 0.0))


def adam_hyperparameters(group: Mapping[str, Any], gain: float) -> Mapping[str, Any]:
    """Return "lr", "betas" and "eps" of a group for a step that is worth `gain` steps.

    lr * sqrt(gain), beta ** gain and eps / sqrt(gain), as `AdaScale` changes those of an Adam. The first beta
    does not fall below 0.6; one that is smaller already stays as it is.

    Args:
        group: the parameter group, with these three.
        gain: at least 1.
    """
    root = math.sqrt(gain)
    beta1, *others = group["betas"]
    return {
        "lr": group["lr"] * root,
        "betas": (_scaled_beta1(beta1, gain), *(beta**gain for beta in others)),
        "eps": group["eps"] / root,
    }


def _scaled_beta1(beta: float | Tensor, gain: float) -> float | Tensor:
    if isinstance(beta, Tensor):
        return torch.maximum(beta.pow(gain), beta.clamp(max=LEAST_BETA1))
    return float(max(beta**gain, min(beta, LEAST_BETA1)))


# -- which optimizers are supported -------------------------------------------------------------------

_REFUSED = {
    "Muon": "whose step has singular values of 1 whatever the size and the noise of the gradient are",
    "Lion": "whose step is the sign of its momentum whatever the size and the noise of the gradient are",
    "Adafactor": "which keeps no second moment of each parameter to measure gradients with, and whose step is"
    " relative to the size of the weights",
}
"""Why well-known optimizers are not supported, by a part of the names of their classes.

There are several implementations of each, and some are subclasses of SGD or AdamW.
"""


def scaling_rule_of(
    optimizer: torch.optim.Optimizer, *, observes: bool = False, is_sharded: bool = False
) -> ScalingRule:
    """Return the rule for the hyperparameters of `optimizer`, and the metric of its gradients.

    Without a metric of its own an optimizer is measured in the Euclidean norm, if it is only observed.
    """
    try:
        rule = _rule_of(optimizer)
        if rule.has_whole_matrices and is_sharded:
            raise UnsupportedOptimizerError(
                f"got {type(optimizer).__name__} over a sharded model; its gain needs the gradients of whole "
                "matrices, of which a process has a shard: use replicas of one process, or torch.optim.AdamW"
            )
        return rule
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
    name = type(optimizer).__name__
    if inner is not None:
        name = f"{name} of {type(inner).__name__}"
    if isinstance(optimizer, torch.optim.Muon):
        return MuonRule(optimizer)
    if not isinstance(optimizer, SecondMomentOptimizer):
        _require_not_refused(inner or optimizer, name)
    if isinstance(optimizer, torch.optim.SGD) or isinstance(inner, torch.optim.SGD):
        return ScalingRule(optimizer)
    if isinstance(optimizer, SecondMomentOptimizer):
        return ProtocolRule(optimizer)
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return AdamRule(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            "got LBFGS, which computes the gradients of one step several times, with other weights each "
            "time, so its steps have no batch size to scale: use torch.optim.SGD, Adam or AdamW"
        )
    raise UnsupportedOptimizerError(
        f"got {name}; AdaScale scales torch.optim.SGD, with or without momentum, ZeroRedundancyOptimizer of "
        "it, torch.optim.Adam, torch.optim.AdamW and torch.optim.Muon: use one of these. An optimizer of "
        "your own that keeps a second moment needs two methods, `second_moment` and `hyperparameters_at` "
        '(docs/adascale.md, "Optimizers")'
    )


def _require_not_refused(optimizer: torch.optim.Optimizer, name: str) -> None:
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    for part, reason in _REFUSED.items():
        if any(part in kind for kind in kinds):
            raise UnsupportedOptimizerError(
                f"got {name}, {reason}: the rules of SGD and Adam for a larger batch do not hold for it, "
                "and no other is measured. Use torch.optim.AdamW for all parameters, or beside "
                "torch.optim.Muon for hidden matrices, or this optimizer without AdaScale, with a fixed "
                "number of replicas and batch size"
            )
