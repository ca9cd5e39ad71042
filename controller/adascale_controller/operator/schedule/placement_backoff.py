"""Backoff for replica counts that could not be placed.

The free resources of nodes are an estimate: a quota, a spread constraint or an image that only some nodes can
pull may keep a replica from a node that has room. Where nodes may not be read, trying is the only way. While
a larger count is tried, training continues at the old one. After a timeout the count is given up, and it may
be scheduled again after a pause, which doubles with each failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from adascale_controller.operator.types.actions import FailedPlacement

TIMEOUT_TRAINING = 60.0
"""Seconds until a count fails while the job trains. A cluster autoscaler may add nodes in the meantime."""
TIMEOUT_WAITING = 10.0
"""Seconds until a count fails while nothing trains and a smaller count could."""
FIRST_PAUSE = 60.0
"""Seconds until a count that failed once may be scheduled again."""
MAX_PAUSE = 900.0
"""The longest pause, in seconds."""


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
        """Return the failed placement whose pause is not over at `now`, in seconds since 1970."""
        return self._failed if self._failed is not None and now < self._failed.until else None

    def allow(self, reason: str, since: float) -> None:
        """Forget a placement that failed for a reason that no longer holds."""
        failed = self._failed
        if failed is not None and failed.reason == reason and failed.until - failed.pause < since:
            self._failed = None

    def next_due(self, now: float) -> float:
        """Return when time alone changes something, in seconds since 1970; infinite if it does not."""
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
