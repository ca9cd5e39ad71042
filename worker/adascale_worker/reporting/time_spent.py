"""Where the time of this replica goes, from the first generation of its trainer on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from adascale_core.messages.channel import Spent
from adascale_core.messages.replica_seconds import Cause

INTERVAL: Final = 1.0
"""Seconds between two messages to the agent, at least, while steps are made."""


class TimeSpent:
    """Divides the time of the main thread among causes: each moment has one.

    The agent adds the time before the first generation, and after the last message.
    """

    def __init__(self, send: Callable[[Spent], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._until: float | None = None
        """The time before is divided; None before the first generation."""
        self._sent_at, self._reported = float("-inf"), ""
        """When the last message was sent, and its present cause."""
        self._present = Cause.STARTING
        """The cause of what is neither a step nor anything that is measured by itself."""
        self.repeated_until = 0
        """The last step that was made before a checkpoint was restored; it and those before are repeated."""

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Tell the agent that the device is checked, before the first generation."""
        self._send(Spent(present=Cause.CHECK))
        yield
        self._send(Spent(present=Cause.STARTING))

    def begin(self) -> None:
        """Begin with the first generation."""
        if self._until is None:
            self._until = self._clock()
            self._report(self._present)

    @contextmanager
    def measured(self, cause: Cause) -> Iterator[None]:
        """Charge what is done meanwhile to a cause, unless it is a step or measured by itself."""
        outer = self._present
        self._charge(outer)
        self._present = cause
        self._report(cause)
        try:
            yield
        finally:
            # A generator that was left is closed at any time.
            if self._present is cause:
                self._charge(cause)
                self._present = outer
                self._report()

    def add(self, cause: Cause, seconds: float) -> None:
        """Charge the last seconds to a cause, and what was before them to what it belongs to."""
        self._charge(self._present, seconds)
        self._charge(cause)

    def leave_step(self) -> None:
        """Charge what follows the last step, up to now, to the program, or to the start."""
        self._charge(self._present)
        if self._reported:
            self._report()

    def finish_step(self, step: int, waited: float, efficiency: float) -> None:
        """Charge the time since the last step, of which the replica has `waited` for others."""
        seconds = self._elapsed()
        if step <= self.repeated_until:
            self._seconds[Cause.REPEATED] += seconds
        else:
            waited = min(waited, seconds)
            useful = (seconds - waited) * min(efficiency, 1.0)
            self._seconds[Cause.EXCHANGE] += waited
            self._seconds[Cause.USEFUL] += useful
            self._seconds[Cause.EFFICIENCY_LOST] += seconds - waited - useful
        self._present = Cause.PROGRAM
        if self._clock() - self._sent_at >= INTERVAL:
            self._report()

    def discard_step(self, usual: float) -> None:
        """Charge a step that is not made: the time that one usually takes, and until the loss was noticed."""
        seconds = self._elapsed()
        repeated = min(seconds, usual) if usual else seconds
        self._seconds[Cause.REPEATED] += repeated
        self._seconds[Cause.DETECTION] += seconds - repeated

    def close(self) -> None:
        """Report all, at the end of the process."""
        self._charge(self._present)
        self._report(self._present)

    def _elapsed(self, until: float = 0.0) -> float:
        """Return the seconds that are not divided yet, up to some seconds ago, and take them for divided."""
        if self._until is None:
            return 0.0
        now = max(self._clock() - until, self._until)
        seconds, self._until = now - self._until, now
        return seconds

    def _charge(self, cause: Cause, until: float = 0.0) -> None:
        self._seconds[cause] += self._elapsed(until)

    def _report(self, present: str = "") -> None:
        if self._until is not None:
            self._sent_at, self._reported = self._clock(), present
            self._send(Spent(dict(self._seconds), present, measures=True))
