"""Replica counts that were tried and could not be placed.

Capacity is reckoned from nodes where they may be read, and what is reckoned may be wrong: a quota, a spread
constraint, an image that only some nodes can pull. Where nodes may not be read, trying is all there is. While
a larger count is tried, training goes on at the old one; after a while the try is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIMEOUT_TRAINING = 60.0
"""Seconds that a count is tried for while training goes on; a cluster autoscaler may add nodes meanwhile."""
TIMEOUT_WAITING = 10.0
"""Seconds where nothing trains, and a smaller count would."""
FIRST_PAUSE = 60.0
MAX_BACKOFF = 900.0


@dataclass(frozen=True)
class Refused:
    """A count that could not be placed.

    Args:
        count: the count.
        limit: the largest one that can be.
        reason, message: why.
        until: when it may be tried again, in seconds since 1970.
        room: how many replicas seemed to fit then.
        pause: seconds until then, as chosen.
    """

    count: int
    limit: int
    reason: str
    message: str
    until: float
    room: int
    pause: float


class Trials:
    """What was tried for one job."""

    def __init__(self) -> None:
        self.refused: Refused | None = None
        self._since: tuple[int, float] | None = None

    def limit(self, room: int, now: float) -> int | None:
        """The largest count that may be desired now; none: any.

        Args:
            room: how many of its replicas seem to fit in all.
            now: seconds since 1970.
        """
        refused = self.refused
        if refused is None or now >= refused.until or room > refused.room:
            return None
        return refused.limit

    def standing(self, now: float) -> Refused | None:
        """The refusal that holds now."""
        return self.refused if self.refused is not None and now < self.refused.until else None

    def see(
        self,
        *,
        generation: int,
        count: int,
        training: int,
        problem: tuple[str, str] | None,
        placed: int,
        valid: Sequence[int],
        room: int,
        now: float,
    ) -> None:
        """Take in how the present allocation fares.

        Args:
            generation, count: the allocation.
            training: the replicas that train meanwhile.
            problem: reason and message, if a replica can't start.
            placed: how many ranks from 0 on could be placed.
            valid: the counts that the job may run on, ascending.
            room, now: as in `limit`.
        """
        if problem is None:
            self._since = None
            if self.refused is not None and training >= self.refused.count:
                self.refused = None
            return
        if self._since is None or self._since[0] != generation:
            self._since = (generation, now)
        patience = TIMEOUT_TRAINING if training else TIMEOUT_WAITING
        if now - self._since[1] < patience or not valid:
            return
        limit = max((one for one in valid if one <= max(placed, training)), default=valid[0])
        if limit >= count:
            return
        again = self.refused is not None and self.refused.count <= count
        pause = min(2 * self.refused.pause, MAX_BACKOFF) if again and self.refused else FIRST_PAUSE
        self._since = None
        self.refused = Refused(count, limit, *problem, now + pause, room, pause)
