"""Replica counts that could not be placed, or whose replicas fail their check, and when they are tried again.

The free resources of nodes are an estimate: a quota, a spread constraint or an image that only some nodes can
pull may keep a replica from a node that has room. Where nodes may not be read, trying is the only way. A
faulty device shows only when a replica is there. While a larger count is tried, training continues at the old
one. After a timeout the count is given up, and it may be scheduled again after a pause, which doubles with
each failure.

All times are in seconds, on one clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf

from adascale_controller.formatting import duration, plural
from adascale_controller.job.reasons import Reason

TIMEOUT_TRAINING = 60.0
"""Seconds until a count fails while the job trains. A cluster autoscaler may add nodes in the meantime."""
TIMEOUT_WAITING = 10.0
"""Seconds until a count fails while nothing trains and a smaller count could."""
FIRST_PAUSE = 60.0
"""Seconds until a count that failed once may be scheduled again."""
MAX_PAUSE = 900.0
"""The longest pause, in seconds."""


@dataclass(frozen=True)
class FailedPlacement:
    """A replica count that could not be placed."""

    count: int
    limit: int  # the largest count that may be scheduled until `until`
    reason: str
    message: str
    until: float  # when the count may be scheduled again, in seconds
    capacity: int  # how many replicas seemed to fit when the placement failed
    pause: float  # seconds from the failure to `until`

    def __str__(self) -> str:
        replicas, after = plural(self.count, "replica"), f"next attempt after {duration(self.pause)}"
        if self.reason == Reason.REPLICA_CHECK_FAILED:
            return f"{replicas} can not train: {self.message}; {after}"
        return (
            f"{replicas} could not be scheduled: {self.message}; {after} or when more capacity is available"
        )


def startable(ready: Collection[int], spares: int) -> int:
    """Return the largest count whose replicas can all start, if as many as there are spares may fail to."""
    missing = 0
    for index in itertools.count():
        missing += index not in ready
        if missing > spares:
            return max(index - spares, 0)
    raise AssertionError


class PlacementBackoff:
    """The failed placement of a job; None if it has none."""

    def __init__(self) -> None:
        self._failed: FailedPlacement | None = None
        self._problem_since: tuple[int, float] | None = None
        self._timeout_at = inf

    def limit(self, capacity: Callable[[], int], now: float) -> int | None:
        """Return the largest count that may be scheduled now. None for no limit."""
        failed = self.failed_placement(now)
        return None if failed is None or capacity() > failed.capacity else failed.limit

    def failed_placement(self, now: float) -> FailedPlacement | None:
        """Return the failed placement whose pause is not over at `now`."""
        return self._failed if self._failed is not None and now < self._failed.until else None

    def allow(self, reason: str, since: float) -> None:
        """Drop a placement that failed for a reason that no longer holds."""
        failed = self._failed
        if failed is not None and failed.reason == reason and failed.until - failed.pause < since:
            self._failed = None

    def next_due(self, now: float) -> float:
        """Return when time alone changes something; infinite if it does not."""
        until = self._failed.until if self._failed is not None else inf
        return min((moment for moment in (self._timeout_at, until) if moment > now), default=inf)

    def update(
        self,
        *,
        generation: int,
        count: int,
        training: int,
        problem: tuple[str, str] | None,
        placed: int,
        valid: Callable[[], Sequence[int]],
        capacity: Callable[[], int],
        now: float,
    ) -> None:
        """Record the state of the current allocation."""
        self._timeout_at = inf
        if problem is None:
            self._problem_since = None
            if self._failed is not None and training >= self._failed.count:
                self._failed = None
            return
        if self._problem_since is None or self._problem_since[0] != generation:
            self._problem_since = (generation, now)
        timeout = TIMEOUT_TRAINING if training else TIMEOUT_WAITING
        if now - self._problem_since[1] < timeout:
            self._timeout_at = self._problem_since[1] + timeout
            return
        counts = valid()
        if not counts:
            return
        limit = max((other for other in counts if other <= max(placed, training)), default=counts[0])
        if limit >= count:
            return
        pause = FIRST_PAUSE
        if self._failed is not None and self._failed.count <= count:
            pause = min(2 * self._failed.pause, MAX_PAUSE)
        self._problem_since = None
        self._failed = FailedPlacement(count, limit, *problem, now + pause, capacity(), pause)
