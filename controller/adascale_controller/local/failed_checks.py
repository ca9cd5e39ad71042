"""Checks that replicas have failed before they join: larger counts are given up for a pause.

The others train meanwhile. Without the pause the job could not grow on the replicas that are sound, because a
new count is not decided while one is pending.
"""

from __future__ import annotations

from dataclasses import dataclass

from adascale_controller.formatting import plural
from adascale_core.messages.registration import ReplicaState
from adascale_core.views.jobs import JobView

MAX_FAILURES = 2
"""Failed checks in a row after which the counts that need a replica are given up."""
FIRST_PAUSE = 60.0
"""Seconds until these counts may be tried again."""
MAX_PAUSE = 900.0
"""The longest pause, in seconds. It doubles with each failure after a pause."""
IN_GENERATION = frozenset({ReplicaState.RUNNING, ReplicaState.HOLDING})
"""The states of replicas that have joined a generation."""


@dataclass(frozen=True)
class FailedCheck:
    """Counts that are given up, because a replica has failed its check."""

    replica: int
    failures: int  # in a row
    limit: int  # the largest count that may be used
    pause: float  # seconds until larger counts may be used
    until: float  # the end of the pause, on a monotonic clock

    def __str__(self) -> str:
        return (
            f"replica {self.replica} has failed its check {plural(self.failures, 'time')} in a row; it is "
            f"tried again in {self.pause:.0f} s at the earliest"
        )


class FailedChecks:
    """The failed checks of the replicas of a run: call `update` with each view of its job."""

    def __init__(self) -> None:
        self._failures: dict[int, int] = {}
        self._given_up: FailedCheck | None = None

    def given_up(self, now: float) -> FailedCheck | None:
        """Return what is given up at `now`, in seconds on a monotonic clock; None if nothing is."""
        return self._given_up if self._given_up is not None and now < self._given_up.until else None

    def update(self, view: JobView) -> None:
        """Remove the failures of the replicas that have joined."""
        for joined in (each.replica for each in view.replicas if each.state in IN_GENERATION):
            self._failures.pop(joined, None)
            if self._given_up is not None and self._given_up.replica == joined:
                self._given_up = None

    def fail(self, replica: int, view: JobView, now: float) -> int:
        """Record that a replica has failed its check, and return how often it has in a row."""
        failures = self._failures[replica] = self._failures.get(replica, 0) + 1
        limit = _largest_count_without(replica, view)
        given_up = self.given_up(now)
        if failures < MAX_FAILURES or limit is None or (given_up is not None and given_up.limit <= limit):
            return failures
        pause = FIRST_PAUSE if self._given_up is None else min(2 * self._given_up.pause, MAX_PAUSE)
        self._given_up = FailedCheck(replica, failures, limit, pause, now + pause)
        return failures


def _largest_count_without(replica: int, view: JobView) -> int | None:
    """Return the largest count that does not need a replica; None if it is not needed, or always is."""
    desired, active = view.desired, view.active
    if desired is None or view.is_spare(replica):
        return None
    trains = active is not None and not view.broken
    training = active.replicas if active is not None and trains and replica not in active.indices else 0
    limit = max(replica, training)
    return limit if 0 < limit < desired.replicas else None
