"""Optimizers, schedulers, and the clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

from adascale_worker.torch_private import private_part


def let_clipping_find_no_gradients() -> Callable[[], None]:
    """Let `clip_grad_value_` do nothing without gradients, as `clip_grad_norm_`; torch raises an error."""
    module, name = torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype"
    original: Callable[[Sequence[Sequence[Tensor]]], dict[Any, Any]] | None = getattr(module, name, None)
    if original is None:
        return lambda: None

    def group(tensors: Sequence[Sequence[Tensor]]) -> dict[Any, Any]:
        return original(tensors) if tensors[0] else {}

    setattr(module, name, group)
    return lambda: setattr(module, name, original)


@contextmanager
def skipping_outside_kernel(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a GradScaler decide itself whether a fused optimizer makes a step, instead of its kernel."""
    mark = "_step_supports_amp_scaling"
    fused = vars(optimizer).pop(mark, None)
    try:
        yield
    finally:
        if fused is not None:
            setattr(optimizer, mark, fused)


def is_optimizer_hook_table(attribute: str) -> bool:
    """Whether `attribute` of a `torch.optim.Optimizer` holds hooks of its step or its state.

    `Optimizer.__getstate__` leaves them out too, and `Optimizer.__setstate__` makes new ones.
    """
    return attribute.startswith("_optimizer_")


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an `LRScheduler` was made for an optimizer; torch marks its `step`."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def lr_at_position(scheduler: LRScheduler) -> list[float] | None:
    """Return the learning rates of a schedule at its position, from its arguments alone.

    The public interface gives those that follow from the learning rates of the last step, which may be 0.
    """
    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    return None if closed_form is None else [float(lr) for lr in closed_form()]


LAST_LR = "_last_lr"
"""The name, in the state of a scheduler, of the learning rates that it has set last."""
SCHEDULERS = "_schedulers"
"""The name, in the state of a scheduler that consists of others, of their states."""


def set_last_lr(scheduler: LRScheduler, rates: Sequence[float]) -> None:
    """Let `scheduler.get_last_lr()` return `rates`: one learning rate for each parameter group."""
    private_part(scheduler, LAST_LR, "to continue a changed schedule at its position")
    setattr(scheduler, LAST_LR, list(rates))


def schedulers_in(scheduler: ChainedScheduler | SequentialLR) -> list[LRScheduler]:
    """Return the schedulers that a scheduler consists of."""
    return list(private_part(scheduler, SCHEDULERS, "to find the end of a schedule"))


def last_milestone(scheduler: SequentialLR) -> int:
    """Return the number of the step from which a scheduler uses the last of its schedulers."""
    return int(private_part(scheduler, "_milestones", "to find the end of a schedule")[-1])
