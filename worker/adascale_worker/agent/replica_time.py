"""The time of a replica since its pod has started: what its trainers measure, and the rest by the agent."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from adascale_core.messages.channel import Spent
from adascale_core.messages.replica_seconds import Cause


def began() -> float:
    """Return when this process was started, by the monotonic clock; now where that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name of the program, in parentheses, may have spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - age
    return time.monotonic()


class ReplicaTime:
    """The seconds of this replica by cause, which add up to the time since the agent was started.

    What no trainer has measured belongs to the present phase, which the main thread sets.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, start: float | None = None) -> None:
        self._clock = clock
        self._began = began() if start is None else start
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Without those of the present trainer, and of the present phase."""
        self._trainer = Spent()
        self._phase: str = Cause.STARTING
        """Empty while a trainer measures: its next message has the time since the last."""
        self._returned: dict[str, float] = {}
        """What `seconds` has returned."""
        self._changing = threading.Lock()

    def follow(self, phase: Cause, spent: Spent = Spent()) -> None:  # noqa: B008 (frozen)
        """Note what the replica does, unless its trainer measures that, and what the trainer has reported."""
        with self._changing:
            self._trainer = spent
            self._enter(spent.present if spent.measures else phase)

    def end_trainer(self, cause: Cause) -> None:
        """Count the time of a trainer that has ended; since its last report, to this cause."""
        with self._changing:
            self._phase = self._phase or cause
            self._enter(Cause.STARTING)
            self._seconds = self._sum()
            self._trainer = Spent()

    def seconds(self) -> dict[str, float]:
        """Return the seconds by cause, up to now; in a step of a trainer, up to its last message."""
        with self._changing:
            found = self._sum()
            if self._phase:
                found[self._phase] += self._rest()
            # A counter never falls, also by the milliseconds that a message takes.
            self._returned = {
                cause: max(seconds, self._returned.get(cause, 0.0)) for cause, seconds in found.items()
            }
            return self._returned

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            if self._phase:
                self._seconds[self._phase] += self._rest()
            self._phase = phase

    def _rest(self) -> float:
        """Return the seconds that are not divided yet."""
        return max(self._clock() - self._began - sum(self._sum().values()), 0.0)

    def _sum(self) -> defaultdict[str, float]:
        found = self._seconds.copy()
        for cause, seconds in self._trainer.seconds.items():
            found[cause] += seconds
        return found
