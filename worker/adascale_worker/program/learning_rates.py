"""Finds learning rates that do not follow progress, because the trainer does not know what sets them.

Schedulers that are passed to `program_reentry` follow progress, and are saved and restored. Another scheduler
of the same optimizer counts its calls, as does a function of the program that gets a count of batches. Both
would make another schedule at another batch size, without an error. They are found by the values that they
set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.optim.lr_scheduler import LRScheduler

from adascale_worker.process.user_code import warn_user
from adascale_worker.scaling.statistics.parameters import lr_versions
from adascale_worker.torch_private.modules import has_scheduler


class LearningRates:
    """Compares the learning rates after code of the program with those that the trainer has seen last."""

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Mapping[str, object],
        registered: Iterable[object],
    ) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        registers_scheduler = any(isinstance(each, LRScheduler) for each in registered)
        self._followed = [] if registers_scheduler else list(schedulers)
        """The optimizers whose learning rates only the schedulers set that were passed for them."""
        self._rates: dict[str, list[object]] = {}
        """The learning rates after the last call of the trainer, except where the next change is accepted."""
        self.reads_progress = False
        """Whether the program has read its progress for the present batch."""
        self._followers: list[Callable[[], None]] = []
        """Let schedulers follow progress that were stepped for the present batch."""
        self._is_reported = False
        if not registers_scheduler and any(
            name not in schedulers and has_scheduler(each) for name, each in optimizers.items()
        ):
            self._is_reported = True
            warn_user(
                "the optimizer has a learning-rate scheduler that was not passed to program_reentry, so it "
                "does not follow progress, and is not saved: call program_reentry(model, "
                "optimizer, scheduler)"
            )

    def program_reads_progress(self) -> None:
        """Record that the program reads its progress, so that what it sets next may follow from it."""
        self.reads_progress = True

    def begin_epoch(self) -> None:
        """Accept a learning rate that is set once per epoch, unless a scheduler that was passed sets it."""
        self._check(self._followed)
        self._rates = {name: rates for name, rates in self._rates.items() if name in self._followed}

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
        now = self._rates_now()
        self._rates = {name: now[name] for name in self._rates}

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
    def scheduler_step(self, *, follows_progress: bool) -> Iterator[None]:
        """Check the learning rates before a scheduler that was passed steps, and accept what it sets."""
        self._check(self._optimizers if follows_progress else self._followed)
        try:
            yield
        finally:
            self.accept()

    def check(self) -> None:
        """Check what the program has changed since the last call of the trainer."""
        self._check(self._optimizers)

    def _check(self, names: Iterable[str]) -> None:
        """Check the learning rates of some optimizers."""
        before = self._rates
        self.accept()
        changed = [name for name in names if before.get(name) != self._rates.get(name)]
        if not changed or self.reads_progress:
            return
        if any(name in self._followed for name in changed):
            passed = " and the ".join(sorted({type(each).__name__ for each in self._schedulers.values()}))
            self._report(
                f"the learning rate was set by the {passed} that was passed to program_reentry, and by "
                "something else, such as another scheduler, which does not follow progress and is not saved. "
                "Pass one scheduler that has both: ChainedScheduler([first, second]) steps both at once, and "
                "SequentialLR(optimizer, [first, second], milestones=[step]) one after the other. They do "
                "not take a ReduceLROnPlateau: give it to program_reentry as "
                'register={"plateau": plateau}, and step it after the data loop of each epoch. Code that '
                "sets a learning rate itself has to compute it from int(trainer.progress)"
            )
        self._report(
            "the learning rate was set between two steps, but not by a scheduler that follows progress. "
            "A step at a larger batch size counts as several steps of a schedule, so one that counts its "
            "calls or batches is late: pass int(trainer.progress) in place of that count, as in "
            "step_update(int(trainer.progress)), or pass an LRScheduler to program_reentry"
        )

    def _rates_now(self) -> dict[str, list[object]]:
        return {name: lr_versions(each.param_groups) for name, each in self._optimizers.items()}

    def _report(self, message: str) -> None:
        """Warn, once."""
        if not self._is_reported:
            self._is_reported = True
            warn_user(message)
