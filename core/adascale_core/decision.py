"""Which job gets how many replicas, decided for all jobs at once.

One pure function, `decide`, that the Kubernetes operator, the local runner and any simulator call:

1. Every job is admitted, by arrival, whose smallest valid count fits beside those of the jobs before it.
2. Of all ways to give the admitted jobs valid counts, the one of the highest total worth is taken. What a
   count is worth to a job is the logarithm of its goodput, in steps at its `batch_size` per second, less
   what a change costs. The sum of logarithms is fair between jobs of different size (proportional
   fairness): a replica goes where it makes a job faster by the largest factor.

A job whose change is under way or recent, that is not measured, or that is about to end, moves only where
there is no room otherwise. Same input, same answer; and since every change raises the total worth, jobs
do not move to and fro: with nothing new, the answer to a decision carried out is to stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, log2

from adascale_core.batch import BatchBounds, BatchPlan, plan_batch, valid_replicas
from adascale_core.gain import GradientEstimate
from adascale_core.messages import StepTime
from adascale_core.names import DEFAULT_EFFICIENCY_TARGET
from adascale_core.throughput import StepTimeModel

LEAST_SPEEDUP = 1.05
"""A change must be worth this factor of speed at least, and so must each doubling of a job's replicas."""
GROWTH = 2
"""A job grows to at most this many times the largest count that it has been measured on."""
HORIZON = 600.0
"""Seconds ahead for which a change must pay where the end of the job is not known."""
SETTLE_RESTARTS = 2.0
"""A change may follow another once the job has trained for this many restarts' time since..."""
SETTLE_SECONDS = 5.0
"""...and for so many seconds, because what it has gained has to be measured first."""

_UNITS = 10**9
"""Worth is counted in whole numbers of this fraction, so that sums are exact and ties are ties."""
_FORCED = 10**18
"""What a change costs that is made only for want of room: more than all other worth together."""
_IMPOSSIBLE = -(10**30)


def settle_seconds(restart_seconds: float) -> float:
    """Seconds that a job is left alone after a change that stopped it for `restart_seconds`."""
    return max(SETTLE_SECONDS, SETTLE_RESTARTS * restart_seconds)


@dataclass(frozen=True)
class JobState:
    """What the decision has to know of a job.

    Args:
        id: the job id.
        arrival: when the job came, in any unit; earlier goes first.
        bounds: the batch sizes that it allows.
        min_replicas, max_replicas: the counts between which it may run.
        replicas: the count it has now; 0 if none.
        settled_at: when that count began to train, in seconds; none while a change is under way.
        largest: the largest count that it has been measured on.
        estimate: its gradient's squared norm and variance, if known.
        step_times: its measured step times.
        efficiency_target: gain per scale that a batch must be worth while throughput is not known.
        remaining: steps at `batch_size` that it still has to make, if known.
        restart_seconds: how long a change of its count stops it.
        prepare_seconds: how long a change is prepared, while it goes on as before.
    """

    id: str
    arrival: float
    bounds: BatchBounds
    min_replicas: int
    max_replicas: int
    replicas: int = 0
    settled_at: float | None = None
    largest: int = 0
    estimate: GradientEstimate | None = None
    step_times: Sequence[StepTime] = ()
    efficiency_target: float = DEFAULT_EFFICIENCY_TARGET
    remaining: float | None = None
    restart_seconds: float = 10.0
    prepare_seconds: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What a replica count is worth to a job.

    Args:
        plan: the batch plan it would use.
        scale, gain: of that plan.
        step_time: seconds per optimizer step.
    """

    plan: BatchPlan
    scale: float
    gain: float
    step_time: float

    @property
    def efficiency(self) -> float:
        """gain / scale."""
        return self.gain / self.scale

    @property
    def goodput(self) -> float:
        """Steps at `batch_size` per second."""
        return self.gain / self.step_time


@dataclass(frozen=True)
class Decision:
    """The replica count for a job, and why, in words."""

    replicas: int
    reason: str


def predict(
    bounds: BatchBounds,
    counts: Iterable[int],
    estimate: GradientEstimate,
    model: StepTimeModel,
    efficiency_target: float = DEFAULT_EFFICIENCY_TARGET,
) -> dict[int, Prediction]:
    """What each of `counts`, all of them valid, is predicted to be worth."""
    predictions = {}
    for count in counts:
        plan = plan_batch(
            bounds,
            count,
            estimate=estimate,
            throughput=model.throughput if model.known else None,
            efficiency_target=efficiency_target,
        )
        scale = plan.scale(bounds)
        predictions[count] = Prediction(plan, scale, estimate.gain(scale), model.step_time(plan))
    return predictions


def decide(jobs: Iterable[JobState], capacity: int, now: float) -> dict[str, Decision]:
    """The replica count of every job.

    Args:
        jobs: all jobs that want to run.
        capacity: how many replicas fit in all, those that run included.
        now: the time, in seconds on the clock of `settled_at`.

    Returns:
        job id -> decision. Counts are valid for their job or 0, and sum to at most `capacity`.
    """
    queue = sorted(jobs, key=lambda job: (job.arrival, job.id))
    outlooks = [_Outlook.of(job) for job in queue]
    options = []
    free = capacity
    for outlook in outlooks:
        smallest = outlook.counts[0] if outlook.counts else None
        if smallest is None or smallest > free:
            options.append({0: 0})
            continue
        free -= smallest
        options.append(outlook.options(now))
    chosen = _best(options, capacity)
    return {
        job.id: Decision(count, outlook.reason(count))
        for job, outlook, count in zip(queue, outlooks, chosen, strict=True)
    }


def _best(options: Sequence[Mapping[int, int]], capacity: int) -> list[int]:
    """One count per job, of the highest total worth, of those that sum to at most `capacity`.

    Found exactly, from the last job to the first: `worth[i][free]` is the highest that the jobs from i on
    reach with `free` replicas. Where two ways are worth the same, the earlier job gets more.

    Args:
        options: per job, count -> worth.
        capacity: at least the sum of the smallest counts.
    """
    capacity = max(0, min(capacity, sum(max(counts) for counts in options)))
    worth = [[0] * (capacity + 1)]
    for counts in reversed(options):
        rest = worth[-1]
        worth.append(
            [
                max(
                    (rest[free - count] + value for count, value in counts.items() if count <= free),
                    default=_IMPOSSIBLE,
                )
                for free in range(capacity + 1)
            ]
        )
    chosen = []
    free = capacity
    for counts, rest in zip(options, reversed(worth[:-1]), strict=True):
        fitting = [count for count in counts if count <= free]
        chosen.append(max(fitting, key=lambda count: (rest[free - count] + counts[count], count)))
        free -= chosen[-1]
    return chosen


@dataclass(frozen=True)
class _Outlook:
    """A job with the counts that it may ever have, and predictions for those that it may have next.

    Args:
        job: the job.
        counts: valid counts between its limits, ascending.
        predicted: what each of those that it may have next is worth; empty while that is not measured.
    """

    job: JobState
    counts: Sequence[int]
    predicted: Mapping[int, Prediction]

    @classmethod
    def of(cls, job: JobState) -> _Outlook:
        counts = [
            count for count in valid_replicas(job.bounds, job.max_replicas) if count >= job.min_replicas
        ]
        model = StepTimeModel.fit(job.step_times)
        if job.estimate is None or model is None:
            return cls(job, counts, {})
        largest = max([job.largest, *(one.replicas for one in job.step_times)])
        next_larger = [count for count in counts if count > largest][:1]
        reach = max([GROWTH * largest, job.replicas, *counts[:1], *next_larger])
        reachable = [count for count in counts if count <= reach]
        return cls(job, counts, predict(job.bounds, reachable, job.estimate, model, job.efficiency_target))

    @property
    def current(self) -> int | None:
        """The count that the job can stay at, if there is one."""
        return self.job.replicas if self.job.replicas in self.counts else None

    def options(self, now: float) -> dict[int, int]:
        """Count -> worth of the counts that the job may have next."""
        if self.predicted:
            speeds = {count: prediction.goodput for count, prediction in self.predicted.items()}
        else:
            # Nothing is measured: it does not grow, and where it must shrink, as little as can be.
            most = max(self.job.replicas, self.counts[0])
            speeds = {count: float(count) for count in self.counts if count <= most and self.job.replicas}
            speeds.setdefault(self.counts[0], float(self.counts[0]))
        before = self.current or self.counts[0]
        change = self._cost_of_change(now) if self.current else 0
        return {
            count: round(_UNITS * (log(speed) - log(LEAST_SPEEDUP) * max(log2(count / before), 0.0)))
            - (change if count != before else 0)
            for count, speed in speeds.items()
        }

    def _cost_of_change(self, now: float) -> int:
        job = self.job
        if job.settled_at is None or now - job.settled_at < settle_seconds(job.restart_seconds):
            return _FORCED
        if job.replicas not in self.predicted:
            return _FORCED
        speed = self.predicted[job.replicas].goodput
        left = HORIZON if job.remaining is None else job.remaining / speed - job.prepare_seconds
        if left <= job.restart_seconds:
            return _FORCED
        # So much faster it must be to be as far at the end as without the change.
        faster = 1 / (1 - job.restart_seconds / left)
        return round(_UNITS * log(max(faster, LEAST_SPEEDUP)))

    def reason(self, count: int) -> str:
        """Why the job gets `count` replicas, in words."""
        job, before = self.job, self.job.replicas
        if not self.counts:
            return f"no replica count between {job.min_replicas} and {job.max_replicas} is valid"
        if count == 0:
            return f"waiting for room for {_replicas(self.counts[0])}"
        if before == 0:
            return f"started on {_replicas(count)}"
        if count == before:
            return "stays"
        if self.current is None:
            return f"{before} is no valid replica count any more"
        cause = "makes room"
        if not {before, count} <= set(self.predicted):
            return cause
        old, new = self.predicted[before], self.predicted[count]
        effect = (
            f"gain {old.gain:.1f} -> {new.gain:.1f} predicted, "
            f"{new.goodput / old.goodput:.1f} times the progress per second"
        )
        return effect if new.goodput > old.goodput else f"{cause}: {effect}"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
