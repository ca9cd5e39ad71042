"""A clock for what gets its time passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Returns `now`, which the test sets."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now
