"""The user's own optimizer and scheduler, made to count as AdaScale counts.

The training loop stays as it was: `optimizer.step()`, `optimizer.zero_grad()` and `scheduler.step()` of
the objects that the program made go through here. Only these methods of these objects are replaced.
"""

from __future__ import annotations

import copy
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
    optimizer.zero_grad = _ZeroGrad(optimizer.zero_grad, at_first_micro_batch)  # type: ignore[method-assign]
    model.zero_grad = _ZeroGrad(model.zero_grad, at_first_micro_batch)  # type: ignore[method-assign]


class StandIn:
    """Stands in for a method of one object.

    A copy of the object, as an average of weights makes one, has the method itself, as its own; so has one
    that is saved whole and loaded.

    Args:
        own: the object's method.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.own, memo)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self.own.__reduce__()


class _ZeroGrad(StandIn):
    """Does nothing while the gradients of a step add up."""

    def __init__(self, own: Callable[..., Any], at_first_micro_batch: Callable[[], bool]) -> None:
        super().__init__(own)
        self._at_first_micro_batch = at_first_micro_batch

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._at_first_micro_batch():
            self.own(*args, **kwargs)


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
