"""Which replica is slow: the one for which the others wait in each step.

Each replica measures how long it computes in a step until it waits for the others. The times of single
steps vary and have outliers, such as a page fault or a log line. So replicas are compared by their typical
times: the mean of the middle half of the times of the last steps. Outliers do not change it, as they do not
change the median, and it varies less than the median. The slowest of replicas that are equal is slower by
chance, the more the times of their steps vary. So a difference counts only if it is several times its
standard error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import dist, hypot, sqrt
from statistics import fmean, median
from typing import Final, NamedTuple

WINDOW: Final = 32
"""The steps over which the time of a replica is compared. With the steps until the replicas exchange it, at
most 16, a slow replica is found within 50 steps."""
SLOW_FACTOR: Final = 1.15
"""From this factor on, the time of the slowest replica over that of the others, it is slow."""
MIN_ERRORS: Final = 8.0
"""By how many standard errors the slowest is slower at least. The errors are estimated from few steps, and
compared after each step of a long training: of two equal replicas, one is 7 of them slower once in some
million steps."""
END_FACTOR: Final = 1.1
"""Below this factor, a replica that was slow is no longer slow: it is not named again and again."""
_QUARTER: Final = WINDOW // 4


@dataclass(frozen=True)
class SlowReplica:
    """A replica that is slower than the others."""

    replica: int  # its rank, or its index
    factor: float  # its typical time over the median of those of the others, above 1

    def __str__(self) -> str:
        return self.describe()

    def describe(self, place: str = "") -> str:
        """Return which replica is slow, by how much, and where it is."""
        return (
            f"replica {self.replica}{place} is slow: in each step it computes {self.factor:.2f} times as "
            "long as the others, which wait for it"
        )


class TypicalTime(NamedTuple):
    """The typical time of a replica."""

    seconds: float = 0.0  # 0 if it is not measured
    error: float = 0.0  # the standard error of `seconds`, if the times of steps vary independently


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
    def typical(self) -> TypicalTime:
        """The mean of the middle half of the times; not measured before `WINDOW` steps."""
        if len(self._times) < WINDOW:
            return TypicalTime()
        middle = sorted(self._times)[_QUARTER : WINDOW - _QUARTER]
        # The error of this mean is that of the times with the outer quarters replaced by the ends of the
        # middle half, over the share of the middle half (Tukey and McLaughlin).
        replaced = [middle[0]] * _QUARTER + middle + [middle[-1]] * _QUARTER
        deviation = dist(replaced, [fmean(replaced)] * WINDOW) / sqrt(WINDOW - 1)
        return TypicalTime(fmean(middle), deviation / sqrt(WINDOW) / 0.5)


def slow_replica(
    times: Sequence[float], errors: Sequence[float], previous: SlowReplica | None = None
) -> SlowReplica | None:
    """Return the slowest replica if it is slow, by rank; None if no replica is.

    `times` and their standard `errors` are those of `TypicalTime`, by rank. `previous` is the last result for
    the same replicas.
    """
    if len(times) < 2 or min(times) <= 0.0:
        return None
    slowest = max(range(len(times)), key=lambda rank: times[rank])
    usual = median(_without(times, slowest))
    found = SlowReplica(slowest, times[slowest] / usual)
    if previous is not None and previous.replica == slowest:
        return found if found.factor >= END_FACTOR else None
    if found.factor < SLOW_FACTOR:
        return None
    error = hypot(errors[slowest], median(_without(errors, slowest)))
    return found if times[slowest] - usual >= MIN_ERRORS * error else None


def _without(numbers: Sequence[float], rank: int) -> list[float]:
    return [*numbers[:rank], *numbers[rank + 1 :]]
