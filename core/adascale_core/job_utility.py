"""What each replica count is worth to a job.

The utility of a count is the logarithm of the job's predicted goodput, less the cost of the change to it.
The sum of logarithms is fair between jobs of different size (proportional fairness, Kelly 1997): a replica
goes to the job that it accelerates by the largest factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, log2

from adascale_core.batch import is_valid_replicas, valid_replicas
from adascale_core.job_state import JobState
from adascale_core.prediction import Prediction, predict
from adascale_core.throughput import StepTimeModel

MIN_SPEEDUP = 1.05
"""The least factor of goodput for which the replica count changes, and for each doubling of the replicas."""
MAX_GROWTH = 2
"""A job grows to at most this many times the largest count on which it was measured."""
HORIZON = 600.0
"""Seconds within which a change must pay off if the remaining time of the job is unknown."""
STABILIZATION_RESTARTS = 2.0
"""A change may follow another once the job has trained for this many times the duration of a restart..."""
STABILIZATION_SECONDS = 5.0
"""...and for this many seconds, so that the effect of the last change is measured first."""

UTILITY_UNIT = 10**9
"""Utilities are integers, in this fraction of a natural logarithm: sums are exact, and equal is equal."""
FORCED_CHANGE_COST = 10**18
"""The cost of a change that is only made for lack of capacity: more than all utilities together."""


def stabilization_seconds(restart_seconds: float) -> float:
    """Return the seconds without a change after a change that interrupted training for `restart_seconds`."""
    return max(STABILIZATION_SECONDS, STABILIZATION_RESTARTS * restart_seconds)


@dataclass(frozen=True)
class JobUtility:
    """A job with its candidate counts, and predictions for the counts that it may have next.

    Args:
        job: the job.
        counts: valid counts within its bounds, ascending.
        predictions: count -> prediction, of the counts that it may have next; empty if it is not measured.
    """

    job: JobState
    counts: Sequence[int]
    predictions: Mapping[int, Prediction]

    @classmethod
    def of(cls, job: JobState) -> JobUtility:
        """Return the candidate counts and predictions of `job`."""
        counts = [
            count for count in valid_replicas(job.bounds, job.max_replicas) if count >= job.min_replicas
        ]
        if job.limit is not None:
            counts = [count for count in counts if count <= job.limit] or counts[:1]
        model = StepTimeModel.fit(job.step_times)
        if job.estimate is None or model is None:
            return cls(job, counts, {})
        largest = max([job.largest, *(measured.replicas for measured in job.step_times)])
        next_larger = [count for count in counts if count > largest][:1]
        limit = max([MAX_GROWTH * largest, job.replicas, *counts[:1], *next_larger])
        reachable = [count for count in counts if count <= limit]
        return cls(job, counts, predict(job.bounds, reachable, job.estimate, model, job.efficiency_target))

    @property
    def present_count(self) -> int | None:
        """The present count if the job can keep it; None if it has none, or it is no longer valid."""
        return self.job.replicas if self.job.replicas in self.counts else None

    def utilities(self, now: float) -> dict[int, int]:
        """Return count -> utility, in `UTILITY_UNIT`, of the counts that the job may have next.

        Args:
            now: the time, in seconds on the clock of `JobState.stable_since`.
        """
        if self.predictions:
            speeds = {count: prediction.goodput for count, prediction in self.predictions.items()}
        else:
            # Without measurements the job does not grow, and shrinks only if it has to, by as little as
            # possible.
            upper = max(self.job.replicas, self.counts[0])
            speeds = {count: float(count) for count in self.counts if count <= upper and self.job.replicas}
            speeds.setdefault(self.counts[0], float(self.counts[0]))
        before = self.present_count or self.counts[0]
        change = self._cost_of_change(now) if self.present_count else 0
        return {
            count: round(UTILITY_UNIT * (log(speed) - log(MIN_SPEEDUP) * max(log2(count / before), 0.0)))
            - (change if count != before else 0)
            for count, speed in speeds.items()
        }

    def _cost_of_change(self, now: float) -> int:
        job = self.job
        if job.stable_since is None or now - job.stable_since < stabilization_seconds(job.restart_seconds):
            return FORCED_CHANGE_COST
        if job.replicas not in self.predictions:
            return FORCED_CHANGE_COST
        goodput = self.predictions[job.replicas].goodput
        left = HORIZON if job.remaining is None else job.remaining / goodput - job.prepare_seconds
        if left <= job.restart_seconds:
            return FORCED_CHANGE_COST
        # The factor of goodput at which the job has made the same progress at its end as without the change.
        break_even = 1 / (1 - job.restart_seconds / left)
        return round(UTILITY_UNIT * log(max(break_even, MIN_SPEEDUP)))

    def reason(self, count: int) -> str:
        """Return why the job gets `count` replicas, for events and conditions."""
        job, before = self.job, self.job.replicas
        if not self.counts:
            if job.min_replicas > job.max_replicas:
                return f"minReplicas {job.min_replicas} is greater than maxReplicas {job.max_replicas}"
            return f"no replica count from {job.min_replicas} to {job.max_replicas} is valid"
        if count == 0:
            return f"Insufficient capacity for {_replicas(self.counts[0])}"
        if before == 0:
            return f"started on {_replicas(count)}"
        if count == before:
            return "unchanged"
        if self.present_count is None:
            if job.limit is not None and before > job.limit and is_valid_replicas(job.bounds, before):
                return f"{_replicas(before)} could not be scheduled"
            return f"{_replicas(before)} {'is' if before == 1 else 'are'} no longer valid"
        cause = "frees capacity for other jobs"
        if not {before, count} <= set(self.predictions):
            return cause
        old, new = self.predictions[before], self.predictions[count]
        effect = (
            f"predicted gain {old.gain:.1f} -> {new.gain:.1f}, "
            f"{new.goodput / old.goodput:.1f} times the progress per second"
        )
        return effect if new.goodput > old.goodput else f"{cause}: {effect}"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
