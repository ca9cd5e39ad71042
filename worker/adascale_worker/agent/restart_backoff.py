"""When an agent starts its next trainer after one has ended."""

from __future__ import annotations

MAX_DELAY = 30.0
"""Seconds."""


class RestartBackoff:
    """Delays trainers that follow others which were killed before they had finished a step.

    Such an end may repeat itself, as when the program exceeds the memory of its container.
    """

    def __init__(self) -> None:
        self._fruitless = 0

    def delay_after(self, *, made_step: bool) -> float:
        """Return the seconds until the next trainer is started: 0, 1, 2, 4 and so on."""
        if made_step:
            self._fruitless = 0
            return 0.0
        self._fruitless += 1
        # Bounded, because floats are.
        return min(2.0 ** min(self._fruitless - 2, 30), MAX_DELAY) if self._fruitless > 1 else 0.0
