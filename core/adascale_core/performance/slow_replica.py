"""Which replica is slow: the one for which the others wait in each step.

Each replica measures how long it computes in a step until it waits for the others. The times of single
steps vary and have outliers, such as a page fault or a log line. So replicas are compared by their typical
times: the mean of the middle half of the times of the last steps. Outliers do not change it, as they do not
change the median, and it varies less than the median.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

WINDOW: Final = 32
"""The steps over which the time of a replica is compared. With the steps until the replicas exchange it, at
most 16, a slow replica is found within 50 steps."""
SLOW_FACTOR: Final = 1.15
"""From this factor on, the time of the slowest replica over that of the others, it is slow."""
END_FACTOR: Final = 1.1
"""Below this factor, a replica that was slow is no longer slow: it is not named again and again."""


@dataclass(frozen=True)
class SlowReplica:
    """A replica that is slower than the others.

    Args:
        replica: its rank, or its index.
        factor: its typical time over the median of those of the others, above 1.
    """

    replica: int
    factor: float

    def __str__(self) -> str:
        return (
            f"replica {self.replica} is slow: in each step it computes {self.factor:.2f} times as long as "
            "the others, which wait for it"
        )


class RecentTimes:
    """The times in which one replica has computed its last steps."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        """Add the time of a step."""
        self._times.append(seconds)

    def clear(self) -> None:
        """Begin with other replicas, or with another batch size."""
        self._times.clear()

    @property
    def typical(self) -> float:
        """The mean of the middle half of the times, in seconds; 0 before `WINDOW` steps."""
        if len(self._times) < WINDOW:
            return 0.0
        return fmean(sorted(self._times)[WINDOW // 4 : WINDOW - WINDOW // 4])


def slow_replica(times: Sequence[float], previous: SlowReplica | None = None) -> SlowReplica | None:
    """Return the slowest replica if it is slow, by rank; None if no replica is.

    Args:
        times: rank -> its typical time in seconds; 0 or less if it is not measured.
        previous: what was found before for the same replicas.
    """
    if len(times) < 2 or min(times) <= 0.0:
        return None
    slowest = max(range(len(times)), key=lambda rank: times[rank])
    others = [seconds for rank, seconds in enumerate(times) if rank != slowest]
    factor = times[slowest] / median(others)
    was_slow = previous is not None and previous.replica == slowest
    return SlowReplica(slowest, factor) if factor >= (END_FACTOR if was_slow else SLOW_FACTOR) else None
