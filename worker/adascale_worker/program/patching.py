"""Overrides of methods of the program's own optimizer, model and scheduler, and checks of learning rates.

The training loop stays unchanged: it calls `optimizer.step()`, `optimizer.zero_grad()` and
`scheduler.step()` of the objects that the program made. Only these methods, and only on these objects, are
replaced.

Schedulers that are passed to `program_reentry` follow progress. Another scheduler of the same optimizer
counts its calls, as does a function of the program that gets a count of batches. Both would make another
schedule at another batch size, without an error. They are found by the values that they set.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from adascale_worker.errors import WorkerError
from adascale_worker.process.user_code import warn_user
from adascale_worker.program.program_loop import ProgramLoop
from adascale_worker.torch_private.autograd import version_of
from adascale_worker.torch_private.modules import (
    COMPILED_CALL,
    has_scheduler,
    last_milestone,
    schedulers_in,
)


class LearningRates:
    """Compares the learning rates after code of the program with those that the trainer has seen last."""

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Mapping[str, object],
        registered: Iterable[object],
    ) -> None:
        self._optimizers = list(optimizers.values())
        self._rates: list[object] | None = None
        """The learning rates after the last call of the trainer; None where the next change is accepted."""
        self.reads_progress = False
        """Whether the program has read its progress for the present batch, by which it may set a rate."""
        self._followers: list[Callable[[], None]] = []
        """Let schedulers follow progress that were stepped for the present batch."""
        self._is_reported = False
        left = [each for name, each in optimizers.items() if name not in schedulers]
        if any(map(has_scheduler, left)) and not any(isinstance(each, LRScheduler) for each in registered):
            self._report(
                "the optimizer has a learning-rate scheduler that was not passed to program_reentry, so it "
                "does not follow progress, and is not saved: call program_reentry(model, "
                "optimizer, scheduler)"
            )

    def begin_epoch(self) -> None:
        """Accept a learning rate that is set once per epoch."""
        self._rates = None

    def begin_batch(self) -> None:
        """Require that the program reads its progress again, if it sets a learning rate by it."""
        self.reads_progress = False
        self._followers.clear()

    def follow(self, follow: Callable[[], None]) -> None:
        """Let a scheduler follow progress, also that of later optimizer steps for the present batch."""
        self._followers.append(follow)
        follow()

    def accept(self) -> None:
        """Accept what the trainer, or a scheduler that follows progress, has changed."""
        if self._rates is not None:
            self._rates = self._rates_now()

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Check the learning rates before the step of an optimizer."""
        self.check()
        try:
            yield
            # With several optimizers, the first one makes progress, perhaps after another's scheduler.
            for follow in self._followers:
                follow()
        finally:
            self._rates = self._rates_now()

    @contextmanager
    def scheduler_step(self) -> Iterator[None]:
        """Check the learning rates before a scheduler that was passed steps, and accept what it sets."""
        self.check()
        try:
            yield
        finally:
            self.accept()

    def check(self) -> None:
        """Check what the program has changed since the last call of the trainer."""
        before = self._rates
        self.accept()
        if before != self._rates and not self.reads_progress:
            self._report(
                "the learning rate was set between two steps by something else than a scheduler that was "
                "passed to program_reentry, which does not follow progress and is not saved. A step at a "
                "larger batch size counts as several steps of a schedule, so one that counts its calls or "
                "batches is late. Pass one scheduler: ChainedScheduler([first, second]) steps both at once, "
                "and SequentialLR(optimizer, [first, second], milestones=[step]) one after the other. They "
                "do not take a ReduceLROnPlateau: give it to program_reentry as "
                'register={"plateau": plateau}, and step it after the data loop of each epoch. Code that '
                "sets a learning rate itself has to compute it from int(trainer.progress), as in "
                "step_update(int(trainer.progress))"
            )

    def _rates_now(self) -> list[object]:
        """Return the learning rates; tensors with the number of their changes, since reading them waits."""
        rates = [group["lr"] for each in self._optimizers for group in each.param_groups]
        return [(lr, version_of(lr)) if isinstance(lr, torch.Tensor) else lr for lr in rates]

    def _report(self, message: str) -> None:
        """Warn, once."""
        if not self._is_reported:
            self._is_reported = True
            warn_user(message)


Step = Callable[..., Any]


class UpdateScheduler(Protocol):
    """A scheduler that is no `LRScheduler`, but a function of a count, as those of timm are."""

    def step_update(self, num_updates: int) -> None:
        """Set the learning rate of step `num_updates`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Restore a saved state."""


Scheduler = LRScheduler | UpdateScheduler
"""What `program_reentry` takes as the scheduler of an optimizer."""


def patch_step(optimizer: torch.optim.Optimizer, step: Step) -> None:
    """Replace the optimizer's `step`, and refuse more parameter groups."""

    # functools.wraps keeps the mark that a scheduler leaves on the method that it wraps. A scheduler made
    # later wraps this function, and requires a bound method for that, whose signature is without its first
    # argument.
    @functools.wraps(getattr(optimizer.step, "__func__", optimizer.step))
    def patched(
        _: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if closure is None:
            return step(*args, **kwargs)
        with torch.enable_grad():
            loss = closure()
        step(*args, **kwargs)
        return loss

    optimizer.step = MethodType(patched, optimizer)  # type: ignore[method-assign]
    optimizer.add_param_group = MethodOverride(  # type: ignore[method-assign]
        optimizer.add_param_group, _refuse_param_group
    )


def _refuse_param_group(*_args: Any, **_kwargs: Any) -> None:
    # A checkpoint would not fit the optimizer that the program makes next time, and the gradients would not
    # be averaged over the replicas.
    raise WorkerError(
        "optimizer.add_param_group was called after program_reentry: add all parameter groups before it, "
        "with requires_grad_(False) or lr=0 for those that are not trained yet"
    )


class MethodOverride:
    """Overrides a bound method on one object, and not on copies of it, such as an averaged model.

    The override has the name, docstring and signature of the method, which frameworks read.
    """

    def __init__(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self._replacement = replacement
        if hasattr(original, "__code__"):
            # torch.export reads it.
            self.__code__ = original.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement."""
        return self._replacement(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self.original.__reduce__()


_REPLACED = (
    *("forward", COMPILED_CALL, "zero_grad"),  # of models
    *("step", "add_param_group", "step_update", "state_dict"),  # of optimizers and schedulers
    *("unscale_", "update"),  # of scalers
)


def restoring_methods(objects: Iterable[object]) -> Callable[[], None]:
    """Return a function that gives objects the methods that they have now, in place of overrides."""
    own = [(vars(each), {name: vars(each).get(name) for name in _REPLACED}) for each in objects]

    def restore() -> None:
        for attributes, methods in own:
            for name, method in methods.items():
                attributes.pop(name, None)
                if method is not None:
                    attributes[name] = method

    return restore


def is_traced() -> bool:
    """Whether a model is called to export it, so that its forward pass trains nothing."""
    return torch.compiler.is_exporting() or bool(
        torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def patch_scheduler(
    scheduler: Scheduler,
    rates: LearningRates,
    loop: ProgramLoop,
    position: Callable[[], int],
    made_step: Callable[[], bool],
) -> None:
    """Make a scheduler that steps once per optimizer step follow the training progress.

    `position` is the number of whole scale-invariant steps, which `step_update(n)` gets as n.
    """
    original_state_dict = scheduler.state_dict

    @functools.wraps(original_state_dict)
    def state_dict() -> dict[str, Any]:
        # The original returns all attributes, which include the replaced methods.
        replaced = ("step", "step_update", "state_dict")
        return {name: value for name, value in original_state_dict().items() if name not in replaced}

    scheduler.state_dict = state_dict  # type: ignore[method-assign]
    if hasattr(scheduler, "step"):
        scheduler.step = _following_step(scheduler, rates, loop, position, made_step)  # type: ignore[method-assign]
    if not isinstance(scheduler, LRScheduler):
        original_update = scheduler.step_update

        @functools.wraps(original_update)
        def step_update(num_updates: int, *args: Any, **kwargs: Any) -> None:
            del num_updates
            with rates.scheduler_step():
                rates.follow(lambda: original_update(position(), *args, **kwargs))

        scheduler.step_update = step_update  # type: ignore[method-assign]


def _following_step(
    scheduler: Any,
    rates: LearningRates,
    loop: ProgramLoop,
    position: Callable[[], int],
    made_step: Callable[[], bool],
) -> Step:
    """Return the method `step` of a scheduler that follows progress inside the data loop."""
    original_step = scheduler.step
    signature = inspect.signature(original_step)

    def follow() -> None:
        before = _steps_of(scheduler)
        while (number := _steps_of(scheduler)) < position():
            if number > before and number == _last_step(scheduler):
                return  # The optimizer step made more progress than the schedule has left.
            original_step()

    @functools.wraps(original_step)
    def step(*args: Any, **kwargs: Any) -> None:
        with rates.scheduler_step():
            move(*args, **kwargs)

    def move(*args: Any, **kwargs: Any) -> None:
        if not loop.has_batch:
            # Programs step once per epoch there, which has as many scale-invariant steps at every scale. The
            # state of another replica, which has ended this epoch, has these steps already.
            if loop.overtaken_states is None:
                original_step(*args, **kwargs)
            return
        values = signature.bind(*args, **kwargs).arguments
        counts = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
        if counts and values.get("epoch") is not None:
            if not rates.reads_progress:
                raise WorkerError(
                    f"step({values['epoch']}) of the {type(scheduler).__name__} got a position from the "
                    "program inside the loop over trainer.dataloader(). A step at a larger batch size counts "
                    "as several steps of a schedule, so a position that counts batches is wrong: call "
                    "scheduler.step(trainer.progress * batch_size / len(dataset)), whose position is in "
                    "epochs, or scheduler.step() with a schedule in steps (T_0=epochs * len(dataset) // "
                    "batch_size)"
                )
            original_step(*args, **kwargs)
        elif counts and not values:
            rates.follow(follow)
        elif made_step():  # A metric counts for an optimizer step.
            original_step(*args, **kwargs)

    return step


def _steps_of(scheduler: LRScheduler) -> int:
    """Return how many steps a scheduler has made."""
    if isinstance(scheduler, ChainedScheduler):  # steps all its schedulers, and counts no steps itself
        return _steps_of(schedulers_in(scheduler)[0])
    return scheduler.last_epoch


def _last_step(scheduler: LRScheduler) -> float:
    """Return the number of the step after which a scheduler refuses to step; infinity if it does not."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, ChainedScheduler):
        return min(map(_last_step, schedulers_in(scheduler)))
    if isinstance(scheduler, SequentialLR):
        return last_milestone(scheduler) + _last_step(schedulers_in(scheduler)[-1])
    return math.inf
