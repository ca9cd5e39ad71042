"""Finds learning rates that do not follow progress, because the trainer does not know what sets them.

Schedulers that are passed to `program_reentry` follow progress, and are saved and restored. Another scheduler
of the same optimizer counts its calls, as does a function of the program that gets a count of batches. Both
would make another schedule at another batch size, without an error.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from adascale_worker.errors import WorkerError
from adascale_worker.process.user_code import OWN_MODULES
from adascale_worker.process.user_warnings import warn_user
from adascale_worker.program.patching import Scheduler
from adascale_worker.scaling.statistics.parameters import lr_versions

Method = Callable[..., Any]


class LearningRates:
    """Compares the learning rates, and the positions of other schedulers, after code of the program."""

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Mapping[str, Scheduler],
        registered: Iterable[object],
    ) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._saved = [part for each in registered for part in _with_parts(each)]
        self._is_reported = False
        self._rates: list[object] | None = None
        """The learning rates after the last call of the trainer. None: the next change is not looked at."""
        self._reads_progress = False
        self._others = list(self._find_others())
        """Schedulers that were not passed, with the names of their optimizers. Some are parts of others."""
        self._positions = self._positions_now()
        unknown = [type(each).__name__ for name, each in self._others if name not in schedulers]
        if unknown and not any(isinstance(each, LRScheduler) for each in self._saved):
            warn_user(
                f"the optimizer has a learning-rate scheduler ({', '.join(unknown)}) that was not passed to "
                "program_reentry, so it does not follow progress, and is not saved: call "
                "program_reentry(model, optimizer, scheduler)"
            )

    def program_reads_progress(self) -> None:
        """Record that the program reads its progress, so that what it sets next may follow from it."""
        self._reads_progress = True

    def begin_epoch(self) -> None:
        """Accept all learning rates until the next step: one that is set once per epoch follows progress."""
        self._rates = None

    def begin_batch(self) -> None:
        """Require that the program reads its progress again, if it sets a learning rate by it."""
        self._reads_progress = False

    def accept(self) -> None:
        """Accept what the trainer, or a scheduler that follows progress, has changed."""
        self._positions = self._positions_now()
        if self._rates is not None:
            self._rates = self._rates_now()

    def observe_optimizer(self, step: Method, inside_epoch: Callable[[], bool]) -> Method:
        """Return the method `step` of an optimizer, with a check before it."""

        @functools.wraps(step)
        def observed(*args: Any, **kwargs: Any) -> Any:
            self.check(inside_epoch=inside_epoch())
            try:
                return step(*args, **kwargs)
            finally:
                self._rates = self._rates_now()
                if not inside_epoch():
                    self.begin_batch()

        return observed

    def observe_scheduler(self, step: Method, follows_progress: Callable[[], bool]) -> Method:
        """Return a method of a scheduler that was passed, with a check before it."""

        @functools.wraps(step)
        def observed(*args: Any, **kwargs: Any) -> Any:
            follows = follows_progress()
            if follows:
                self.check(inside_epoch=True)
            else:
                self.check_schedulers()
            try:
                return step(*args, **kwargs)
            finally:
                self._positions = self._positions_now()
                if follows:
                    self.accept()

        return observed

    def check_schedulers(self) -> bool:
        """Check that the program has stepped no other scheduler beside one that was passed."""
        before, self._positions = self._positions, self._positions_now()
        for (name, other), position in zip(self._others, before, strict=True):
            if _position(other) != position:
                self._refuse(name, other)
        return before != self._positions

    def check(self, *, inside_epoch: bool) -> None:
        """Check what the program has changed since the last call of the trainer."""
        before = self._rates
        is_explained = self.check_schedulers()
        self.accept()
        if before != self._rates and not is_explained and not self._reads_progress and not self._is_reported:
            self._report(inside_epoch=inside_epoch)

    # -- other schedulers -------------------------------------------------------------------------------

    def _find_others(self) -> Iterator[tuple[str, LRScheduler]]:
        """Yield the schedulers of the optimizers that were neither passed nor registered.

        An optimizer does not know its schedulers.
        """
        known = {id(each) for each in (*self._schedulers.values(), *self._saved)}
        schedulers = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
        for name, optimizer in self._optimizers.items():
            for each in schedulers:
                groups = getattr(getattr(each, "optimizer", None), "param_groups", None)
                if groups is optimizer.param_groups and id(each) not in known:
                    yield name, each

    def _positions_now(self) -> list[int]:
        return [_position(other) for _, other in self._others]

    def _refuse(self, name: str, other: LRScheduler) -> None:
        """Refuse another scheduler, if there is one that follows progress."""
        if name not in self._schedulers:
            return
        passed, kind = type(self._schedulers[name]).__name__, type(other).__name__
        remedy = (
            "Pass one scheduler that has both: ChainedScheduler([first, second]) steps both at once, and "
            "SequentialLR(optimizer, [first, second], milestones=[step]) one after the other"
        )
        if isinstance(other, ReduceLROnPlateau) or isinstance(self._schedulers[name], ReduceLROnPlateau):
            remedy += (
                ". They do not take a ReduceLROnPlateau: give it to program_reentry as "
                'register={"plateau": plateau}, and step it after the data loop of each epoch'
            )
        raise WorkerError(
            f"the optimizer has two schedulers that are stepped: the {passed} that was passed to "
            f"program_reentry, and a {kind}, which does not follow progress and is not saved. {remedy}"
        )

    # -- learning rates -----------------------------------------------------------------------------------

    def _rates_now(self) -> list[object]:
        return lr_versions(group for each in self._optimizers.values() for group in each.param_groups)

    def _report(self, *, inside_epoch: bool) -> None:
        """Warn once, or refuse a scheduler that was made beside one that was passed."""
        self._is_reported = True
        others = [other for _, other in self._others]
        for name, made_since in self._find_others():
            if made_since not in others:
                self._refuse(name, made_since)
        passed = (part for each in self._schedulers.values() for part in _with_parts(each))
        known = {id(each) for each in (*others, *(passed if inside_epoch else ()))}
        optimizers = [value for each in self._optimizers.values() for value in (each, each.param_groups)]
        names = {
            type(each).__name__
            for each in _referrers(optimizers)
            if id(each) not in known and _looks_like_scheduler(each)
        }
        by = f" ({' or '.join(sorted(names))} refers to the optimizer)" if names else ""
        warn_user(
            "the learning rate was set between two steps, but not by a scheduler that follows progress"
            f"{by}. A step at a larger batch size counts as several steps of a schedule, so one that counts "
            "its calls or batches is late: pass int(trainer.progress) in place of that count, as in "
            "step_update(int(trainer.progress)), or pass an LRScheduler to program_reentry",
        )


def _position(scheduler: LRScheduler) -> int:
    # A ChainedScheduler has none; its parts are found too.
    return getattr(scheduler, "last_epoch", 0)


def _with_parts(scheduler: object) -> Iterator[object]:
    """Yield an object and, if it is a scheduler, the schedulers that it steps."""
    yield scheduler
    if isinstance(scheduler, LRScheduler):
        for value in vars(scheduler).values():
            for part in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(part, LRScheduler):
                    yield from _with_parts(part)


def _referrers(values: Sequence[object]) -> Iterator[object]:
    """Yield the objects that have one of `values` as an attribute, or as an item."""
    direct = gc.get_referrers(*values)
    yield from direct
    attributes = [each for each in direct if type(each) is dict]
    places = {id(each) for each in attributes}
    for owner in gc.get_referrers(*attributes):
        if id(getattr(owner, "__dict__", None)) in places:
            yield owner


def _looks_like_scheduler(value: object) -> bool:
    if isinstance(value, (torch.optim.Optimizer, torch.nn.Module, type, ModuleType, FrameType, MethodType)):
        return False
    is_own = type(value).__module__.split(".")[0] in OWN_MODULES and not isinstance(value, LRScheduler)
    return not is_own and any(
        callable(getattr(value, method, None)) for method in ("step", "step_update", "state_dict")
    )
