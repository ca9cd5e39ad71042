"""When the agent kills a trainer that does not leave its generation."""

from __future__ import annotations

from adascale_core.messages import AllocationView
from adascale_core.names import LEAVE_GRACE

RESCALE_GRACE = 600.0
"""Seconds that a trainer may take to save its state and leave a generation that is not broken."""
KILL_INTERVAL = 10.0
"""Seconds after which a trainer that has survived SIGKILL (in uninterruptible sleep) is killed again."""


class KillDeadline:
    """The time at which a trainer is killed. Times are in seconds on any clock."""

    def __init__(self) -> None:
        self._time: float | None = None

    def set(self, time: float) -> None:
        """Set the deadline to `time`."""
        self._time = time

    def advance(self, time: float) -> None:
        """Set the deadline to `time` unless it is earlier already."""
        self._time = time if self._time is None else min(self._time, time)

    def is_exceeded(self, now: float) -> bool:
        """Whether the trainer must be killed."""
        return self._time is not None and now > self._time


def leave_grace(view: AllocationView | None, generation: int) -> float | None:
    """Return the seconds that a trainer has to leave `generation`; None while that has not ended."""
    if view is None or not view.has_ended(generation):
        return None
    if view.complete:
        # The trainer is about to enter a generation that never begins, and has no state to save.
        return 0.0
    return LEAVE_GRACE if view.broken else RESCALE_GRACE
