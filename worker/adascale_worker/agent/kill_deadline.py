"""When the agent kills a trainer that does not leave its generation."""

from __future__ import annotations

RESCALE_GRACE = 600.0
"""Seconds that a trainer may take to reach the end of its step and leave a generation that is not broken."""
KILL_INTERVAL = 10.0
"""Seconds after which a trainer that has survived SIGKILL (in uninterruptible sleep) is killed again."""


class KillDeadline:
    """The time at which a trainer is killed. Times are in seconds on any clock."""

    def __init__(self) -> None:
        self._time: float | None = None

    def set(self, time: float) -> None:
        """Set the deadline to `time`."""
        self._time = time

    def clear(self) -> None:
        """Remove the deadline."""
        self._time = None

    def advance(self, time: float) -> None:
        """Set the deadline to `time` unless it is earlier already."""
        self._time = time if self._time is None else min(self._time, time)

    def is_exceeded(self, now: float) -> bool:
        """Whether the trainer must be killed."""
        return self._time is not None and now > self._time
