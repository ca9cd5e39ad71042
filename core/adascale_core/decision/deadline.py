"""Whether a job can be complete by its deadline, and what that is worth.

A deadline is a target: a job that misses it goes on. The decision maximizes a sum over jobs, to which a count
on which a job is predicted to meet its deadline adds `DEADLINE_WORTH`, divided by the hours until the job is
complete. That is far more than other jobs lose in logarithms of goodput. So the decision first meets the
deadlines that need the fewest replica-hours, and then divides what is left by goodput. The smallest such
count is the minimum satisfactory share of ElasticFlow (Gu et al. 2023), for a share that stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from adascale_core.performance.throughput import Floats

Flags = npt.NDArray[np.bool_]

DEADLINE_WORTH = 100.0
"""What a deadline that is met in an hour adds to the sum of logarithms of goodput."""
MIN_HOURS, MAX_HOURS = 1 / 60, 1.0
"""Between which the hours are counted. The worth of a deadline is less than the cost of a change that is only
made for lack of capacity."""
KEPT_WORTH = 2.0
"""By how much more the deadline of a job is worth whose present count meets it: replicas that go from one job
to another and back help neither to meet its deadline."""
UNCERTAINTY = 1.2
"""The factor by which the seconds to the end of a job may be predicted too high."""


@dataclass(frozen=True)
class Feasibility:
    """Whether a job can be complete by its deadline."""

    count: int | None  # the smallest count on which it is predicted to be; None if it is on no count
    source: str  # the measurements from which that is predicted, for people


@dataclass(frozen=True, eq=False)
class DeadlineOutlook:
    """How the counts of a job compare with its deadline."""

    left: float  # seconds to the deadline
    counts: tuple[int, ...]  # all valid counts, ascending
    # predicted seconds to the end of the job on each count, with the change to it, on one node as far as
    # the counts fit there, and on several; shape (2, counts)
    seconds: Floats
    reach: int  # how many of the counts the job may have next
    present: int = 0  # its present count; 0 if it has none that it can keep

    def __str__(self) -> str:
        """Which count meets the deadline, for people."""
        seconds, count = self.shortest
        if self._first is None:
            return f"in {self.left:.0f} s, which no count meets: {count} replicas take {seconds:.0f} s"
        count, seconds = self.counts[self._first], float(self.seconds[0][self._first])
        return f"in {self.left:.0f} s, which {count} replicas meet ({seconds:.0f} s)"

    @property
    def sufficient(self) -> int | None:
        """The smallest count that meets the deadline, on as few nodes as hold it; None if there is none."""
        index = self._first
        return None if index is None else self.counts[index]

    @property
    def shortest(self) -> tuple[float, int]:
        """The fewest seconds to the end, and the count that takes them."""
        index = int(self.seconds[0].argmin())
        return float(self.seconds[0][index]), self.counts[index]

    @cached_property
    def _first(self) -> int | None:
        found = np.nonzero(self.seconds[0] <= self._allowed)[0]
        return int(found[0]) if len(found) else None

    @property
    def _allowed(self) -> float:
        """The predicted seconds within which a count meets the deadline.

        If none does, the fastest counts are tried until they would miss it by more than the uncertainty.
        """
        shortest = self.shortest[0]
        return shortest if shortest / UNCERTAINTY <= self.left < shortest else self.left

    @property
    def worth(self) -> float:
        """What a count that meets the deadline adds to the utility; 0 if there is none."""
        index = self._first
        if index is None:
            return 0.0
        hours = float(self.seconds[0][index]) / 3600
        worth = DEADLINE_WORTH / min(max(hours, MIN_HOURS), MAX_HOURS)
        is_met = self.met[:, np.array(self.counts[: self.reach]) == self.present].any()
        return worth * KEPT_WORTH if is_met else worth

    @cached_property
    def met(self) -> Flags:
        """Whether each count that the job may have next meets the deadline, of shape (2, `reach`).

        If only larger counts do, the largest that it may have next counts as one, so that the job grows.
        """
        met: Flags = self.seconds[:, : self.reach] <= self._allowed
        if self._first is not None and self._first >= self.reach:
            met = np.repeat(np.arange(self.reach)[None] == self.reach - 1, 2, axis=0)
        return met

    def next_change(self) -> float:
        """Return the seconds after which another count misses the deadline; infinite if all do."""
        slack = np.append(self.left - self.seconds, self.left - self.shortest[0] / UNCERTAINTY)
        return float(slack[slack >= 0].min(initial=np.inf))
