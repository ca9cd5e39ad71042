"""The user's own optimizer and scheduler, made to count as AdaScale counts.

The training loop stays as it was: `optimizer.step()`, `optimizer.zero_grad()` and `scheduler.step()` of
the objects that the program made go through here. Only these methods of these objects are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
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

    # wraps() keeps the mark that a scheduler left on the method it wrapped; one that is made later wraps
    # this one, which has to be a method for that.
    @functools.wraps(optimizer.step)
    def patched(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    optimizer.step = MethodType(patched, optimizer)  # type: ignore[method-assign]
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
    own, own_state = scheduler.step, scheduler.state_dict

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> None:
        if args or kwargs or not inside_epoch():
            own(*args, **kwargs)
            return
        while scheduler.last_epoch < int(progress()):
            own()

    @functools.wraps(own_state)
    def state_dict() -> dict[str, Any]:
        # It takes in all attributes, so the replaced methods too.
        return {name: value for name, value in own_state().items() if name not in ("step", "state_dict")}

    scheduler.step = step  # type: ignore[method-assign]
    scheduler.state_dict = state_dict  # type: ignore[method-assign]
