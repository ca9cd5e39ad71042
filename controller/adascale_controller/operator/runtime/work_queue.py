"""Which jobs a cycle looks at: jobs that have changed or whose time has come, and each job now and then."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key")

SWEEP_INTERVAL = 120.0
"""Seconds after which a job is looked at in any case."""


class WorkQueue(Generic[Key]):
    """The jobs to look at.

    A job that has changed is looked at in the next cycle. Background work is what can wait: the reports of
    all jobs come at the same time, and jobs that have changed must not wait until they are all read.
    """

    def __init__(self) -> None:
        self._changed: dict[Key, None] = {}
        self._reported: dict[Key, None] = {}
        self._due: dict[Key, float] = {}
        self._background_due: dict[Key, float] = {}

    def add(self, keys: Iterable[Key]) -> None:
        """Add jobs to the next cycle."""
        self._changed.update(dict.fromkeys(keys))

    def add_reported(self, keys: Iterable[Key]) -> None:
        """Add jobs with new reports to the background work, in this order."""
        self._reported.update(dict.fromkeys(keys))

    def plan(self, key: Key, now: float, due: float, background_due: float) -> None:
        """Set when a job is looked at next if nothing changes."""
        self._due[key] = due
        self._background_due[key] = min(background_due, now + SWEEP_INTERVAL)

    def retry(self, key: Key, due: float) -> None:
        """Add a job to a cycle not later than `due`, in seconds since 1970."""
        self._due[key] = min(due, self._due.get(key, due))

    def discard(self, keys: Collection[Key]) -> None:
        """Drop jobs that no longer exist."""
        for jobs in (self._changed, self._reported, self._due, self._background_due):
            for key in keys:
                jobs.pop(key, None)

    @property
    def has_changed(self) -> bool:
        """Whether there are jobs that have changed since they were looked at."""
        return bool(self._changed)

    @property
    def has_reported(self) -> bool:
        """Whether there are jobs whose new reports were not looked at yet."""
        return bool(self._reported)

    def take(self, now: float, max_background: int) -> list[Key]:
        """Return the jobs of this cycle. Of the background work, the oldest jobs come first.

        Half of `max_background` is left to the jobs without new reports, if so many are due.
        """
        taken = dict.fromkeys((*self._changed, *self._planned(now)))
        reported = [key for key in self._reported if key not in taken]
        due = [key for key in self._planned_background(now) if key not in taken and key not in self._reported]
        number = max(max_background // 2, max_background - len(reported))
        taken.update(dict.fromkeys(due[:number]))
        taken.update(dict.fromkeys(reported[: max_background - min(number, len(due))]))
        self._changed.clear()
        for key in taken:
            self._reported.pop(key, None)
            # Until it is planned again, after it was looked at.
            self._due.pop(key, None)
            self._background_due[key] = now + SWEEP_INTERVAL
        return list(taken)

    def _planned(self, now: float) -> list[Key]:
        return [key for key, due in self._due.items() if due <= now]

    def _planned_background(self, now: float) -> list[Key]:
        """Return the jobs whose background work is due, the oldest first."""
        # A time that is too far away was planned before the clock was set back.
        latest = now + SWEEP_INTERVAL
        due = [(due, key) for key, due in self._background_due.items() if due <= now or due > latest]
        return [key for _, key in sorted(due, key=lambda each: each[0])]
