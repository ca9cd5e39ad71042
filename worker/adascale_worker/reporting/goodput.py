"""The goodput of a job: its progress per second, smoothed so that a prediction from it does not jump."""

from __future__ import annotations

import math

WINDOW = 60.0
"""Seconds of training: what was measured so long ago has 1/e of the weight of the newest."""


class Goodput:
    """The mean progress per second of about the last minute of training, without interruptions."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._progress = 0.0
        self._made = self._seconds = 0.0

    def update(self, step: int, progress: float, step_time: float) -> float | None:
        """Return the goodput after a report; None if it is not measured yet."""
        before, self._step = self._step, step
        made, self._progress = progress - self._progress, progress
        # Steps that were lost with a replica are repeated.
        if before is not None and step > before and made > 0 and step_time > 0:
            seconds = (step - before) * step_time
            kept = math.exp(-seconds / WINDOW)
            # The steps of this report have a steady rate, and the earlier ones of them weigh less too.
            weight = WINDOW * (1 - kept)
            self._made = kept * self._made + weight * made / seconds
            self._seconds = kept * self._seconds + weight
        return self._made / self._seconds if self._seconds > 0 else None
