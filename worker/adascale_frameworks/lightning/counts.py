"""What Lightning counts, in steps at the initial batch size."""

from __future__ import annotations

from dataclasses import dataclass

from adascale_frameworks.milestones import crossed


class StepCount(int):
    """`Trainer.global_step`: steps at the initial batch size, and what the last step was worth.

    Lightning and callbacks act when `global_step % interval` is 0. A step of a larger batch may pass over
    a multiple. So the remainder is 0 once for each multiple that a step reaches or passes over.
    """

    _before: float
    _after: float

    def __new__(cls, after: float, before: float | None = None) -> StepCount:
        """Make the integer."""
        count = super().__new__(cls, int(after))
        count._after, count._before = after, after if before is None else before
        return count

    def __mod__(self, interval: object) -> int:
        remainder: int = super().__mod__(interval)  # type: ignore[operator]
        if not isinstance(interval, int) or interval < 1 or remainder == 0:
            return remainder
        return 0 if crossed(interval, self._before, self._after) else remainder

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


@dataclass
class Counts:
    """The position in training, from which Lightning's counters are set."""

    epoch_length: float  # steps at the initial batch size in an epoch, samples over the batch size
    max_batches: int  # what Lightning takes for the number of batches in an epoch
    epoch: int = 0  # the present epoch, from 0
    before: float = 0.0  # progress before the last optimizer step
    after: float = 0.0

    @property
    def ends_epoch(self) -> bool:
        """Whether the present epoch has all its steps."""
        return self.after >= (self.epoch + 1) * self.epoch_length

    @property
    def batch_index(self) -> int:
        """The number of the next batch in the epoch, from 0."""
        return self._in_epoch(self.after)

    def batches(self, interval: float, *, is_last: bool) -> int:
        """Return the batches of the epoch that are done, as a multiple of `interval` if the
        step crossed one.
        """
        if is_last:
            return self.max_batches
        done = self._in_epoch(self.after)
        return _last_crossed(interval, self._in_epoch(self.before), done) or done

    def total_batches(self, interval: float) -> int:
        """Return the batches of all epochs, as a multiple of `interval` if the step crossed one."""
        return _last_crossed(interval, int(self.before), int(self.after)) or int(self.after)

    def logged_steps(self, interval: int, after: float | None = None) -> int:
        """Return the number of the step that is logged, from 0: that of a multiple of
        `interval` if crossed.
        """
        before, end = (self.before, self.after) if after is None else (self.after, after)
        return (_last_crossed(interval, int(before), int(end)) or int(end)) - 1

    def _in_epoch(self, progress: float) -> int:
        """Return the whole steps of the epoch, less than `max_batches`, which only the last step reaches."""
        return max(0, min(int(progress - self.epoch * self.epoch_length), self.max_batches - 1))


def _last_crossed(interval: float, before: int, after: int) -> int:
    if not 1 <= interval < float("inf") or after <= before:
        return 0
    multiples = crossed(int(interval), before, after)
    return multiples[-1] if multiples else 0
