"""The user's own optimizer and scheduler, made to count as AdaScale counts.

The training loop stays as it was: `optimizer.step()`, `optimizer.zero_grad()` and `scheduler.step()` of
the objects that the program made go through here. Only these methods of these objects are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

Step = Callable[..., Any]


def patch_optimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    step: Step,
    at_first_micro_batch: Callable[[], bool],
) -> None:
    """Route the optimizer's `step` through `step`, and keep gradients from being zeroed while they add up.

    Args:
        optimizer: the program's.
        model: the program's; its `zero_grad` is guarded as well.
        step: called in place of the optimizer's.
        at_first_micro_batch: whether the next backward pass is the first of its step.
    """

    # wraps() keeps the mark that a scheduler left on the method it wrapped.
    @functools.wraps(optimizer.step)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    optimizer.step = patched  # type: ignore[method-assign]
    for owner in (optimizer, model):
        _guard_zero_grad(owner, at_first_micro_batch)


def _guard_zero_grad(owner: Any, at_first_micro_batch: Callable[[], bool]) -> None:
    own = owner.zero_grad

    @functools.wraps(own)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        if at_first_micro_batch():
            own(*args, **kwargs)

    owner.zero_grad = zero_grad


def patch_scheduler(
    scheduler: LRScheduler, progress: Callable[[], float], inside_epoch: Callable[[], bool]
) -> None:
    """Make a scheduler that steps once per optimizer step count progress instead.

    Inside the data loop, `step()` advances the schedule to the whole scale-invariant steps made so far;
    outside it, where programs step once per epoch, it advances by one as ever, since an epoch is as long
    in scale-invariant steps at any scale.
    """
    own = scheduler.step

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> None:
        if args or kwargs or not inside_epoch():
            own(*args, **kwargs)
            return
        while scheduler.last_epoch < int(progress()):
            own()

    scheduler.step = step  # type: ignore[method-assign]


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """The scheduler's own state; `state_dict` takes in all its attributes, so the patched method too."""
    return {name: value for name, value in scheduler.state_dict().items() if name != "step"}
