"""A node that new pods of a job avoid for a time, because a replica was slow there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from adascale_controller.operator.types.kubernetes import seconds, timestamp

FIRST_PAUSE: Final = 30 * 60
"""Seconds for which a node is avoided. No other node is avoided meanwhile."""
MAX_PAUSE: Final = 8 * 60 * 60
"""The most seconds. The time doubles when a replica is slow again soon after it."""


@dataclass(frozen=True)
class AvoidedNode:
    """The node that a job avoids, or has avoided last.

    Args:
        name: of the node.
        until: until when, in seconds since 1970.
        pause: for how many seconds.
    """

    name: str
    until: float
    pause: int

    @classmethod
    def read(cls, status: Mapping[str, Any]) -> Self | None:
        """Return the node in the status of an AdaScaleJob; None if it has avoided none."""
        recorded = status.get("avoidedNode")
        if not recorded:
            return None
        return cls(recorded["name"], seconds(recorded["until"]) or 0.0, recorded["seconds"])

    @classmethod
    def begin(cls, name: str, before: AvoidedNode | None, now: float) -> Self:
        """Return a node that is avoided from now on, for twice as long if another one was just avoided."""
        repeats = before is not None and now < before.until + before.pause
        pause = min(2 * before.pause, MAX_PAUSE) if before is not None and repeats else FIRST_PAUSE
        return cls(name, float(int(now) + pause), pause)

    def to_json(self) -> dict[str, Any]:
        """Return it as in the status."""
        return {"name": self.name, "until": timestamp(self.until), "seconds": self.pause}
