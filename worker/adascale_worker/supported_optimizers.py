"""Which optimizers and parameters AdaScale accepts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adascale_core.errors import AdaScaleError
from adascale_core.exit_codes import EXIT_INVALID_PROGRAM


class UnsupportedOptimizerError(AdaScaleError, TypeError):
    """AdaScale cannot scale the learning rate of the optimizer, or cannot measure its parameters."""

    exit_code = EXIT_INVALID_PROGRAM


def require_sgd(optimizer: object) -> None:
    """Raise UnsupportedOptimizerError unless `optimizer` is a `torch.optim.SGD` or a wrapper of an SGD."""
    inner = getattr(optimizer, "optim", None)  # of ZeroRedundancyOptimizer
    if isinstance(optimizer, torch.optim.SGD) or isinstance(inner, torch.optim.SGD):
        return
    name = type(optimizer).__name__
    if inner is not None:
        name = f"{name} of {type(inner).__name__}"
    raise UnsupportedOptimizerError(
        f"got {name}; AdaScale scales the learning rate of torch.optim.SGD, with or without momentum, or "
        "of a wrapper of it such as ZeroRedundancyOptimizer. The steps of an optimizer that rescales "
        "gradients, such as Adam, do not grow with the learning rate as AdaScale requires: use SGD, "
        "or this optimizer without AdaScale"
    )


def require_readable(unreadable: Sequence[Tensor]) -> None:
    """Raise UnsupportedOptimizerError if there are parameters whose gradients AdaScale cannot read.

    Args:
        unreadable: those parameters.
    """
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
        f"{tuple(placements)}; AdaScale reads a DTensor only if fully_shard alone made it and the model is "
        "given: AdaScale(..., model=model). Tensor parallelism is not supported: use replicas, fully_shard, "
        "or SGD without AdaScale"
    )


def require_count(name: str, value: int) -> None:
    """Raise ValueError unless `value` is an integer, at least 1.

    Args:
        name: of the argument, for the message.
        value: to check.
    """
    if value != int(value) or value < 1:
        raise ValueError(f"got {name}={value}; it must be an integer, at least 1")
