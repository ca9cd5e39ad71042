"""Which job gets how many replicas, decided for all jobs at once.

One pure function, `decide`, that the Kubernetes operator, the local runner and any simulator call. In
order: every job its smallest valid count, by arrival; then replica by replica to the job whose goodput
(steps at its `batch_size` per second) grows by the largest factor per replica, which is the allocation
of highest product of speedups and so is fair between jobs of different size; last, a change that would
not pay for its restart is not made. Same input, same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log

from adascale_core.batch import BatchBounds, BatchPlan, plan_batch, valid_replicas
from adascale_core.gain import GradientEstimate
from adascale_core.messages import StepTime
from adascale_core.names import DEFAULT_EFFICIENCY_TARGET
from adascale_core.throughput import StepTimeModel

LEAST_SPEEDUP = 1.05
"""A larger count must be this much faster."""
GROWTH = 2
"""A job grows to at most this many times the largest count that it has been measured on."""
HORIZON = 600.0
"""Seconds ahead for which a change must pay where the end of the job is not known."""
SETTLE_RESTARTS = 2.0
"""A change may follow another once the job has trained for this many restarts' time since."""


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
    worth = {job.id: _worth(job) for job in queue}
    pinned: dict[str, int] = {}
    while True:
        counts = _distribute(queue, worth, capacity, pinned)
        stays = _first_that_should_stay(queue, worth, counts, pinned, capacity, now)
        if stays is None:
            break
        pinned[stays.id] = stays.replicas
    return {job.id: Decision(counts[job.id], _reason(job, counts[job.id], worth[job.id])) for job in queue}


def _worth(job: JobState) -> dict[int, Prediction]:
    """Predictions for the counts that a job may be given now; empty while nothing is measured."""
    model = StepTimeModel.fit(job.step_times)
    if job.estimate is None or model is None:
        return {}
    limit = min(job.max_replicas, GROWTH * max(job.largest, job.replicas, job.min_replicas))
    counts = [count for count in valid_replicas(job.bounds, limit) if count >= job.min_replicas]
    return predict(job.bounds, counts, job.estimate, model, job.efficiency_target)


def _counts(job: JobState) -> list[int]:
    return [count for count in valid_replicas(job.bounds, job.max_replicas) if count >= job.min_replicas]


def _distribute(
    queue: Sequence[JobState],
    worth: Mapping[str, Mapping[int, Prediction]],
    capacity: int,
    pinned: Mapping[str, int],
) -> dict[str, int]:
    """Smallest counts by arrival, then the rest by largest growth of goodput per replica."""
    counts: dict[str, int] = {}
    free = capacity
    for job in queue:
        smallest = pinned.get(job.id) or next(iter(_counts(job)), inf)
        counts[job.id] = int(smallest) if smallest <= free else 0
        free -= counts[job.id]
    while True:
        step = _best_growth(queue, worth, counts, free, pinned)
        if step is None:
            return counts
        job_id, count = step
        free -= count - counts[job_id]
        counts[job_id] = count


def _best_growth(
    queue: Sequence[JobState],
    worth: Mapping[str, Mapping[int, Prediction]],
    counts: Mapping[str, int],
    free: int,
    pinned: Mapping[str, int],
) -> tuple[str, int] | None:
    best: tuple[str, int] | None = None
    best_value = 0.0
    for job in queue:
        now = counts[job.id]
        predicted = worth[job.id]
        if job.id in pinned or now not in predicted:
            continue
        for count, prediction in predicted.items():
            if not now < count <= now + free:
                continue
            speedup = prediction.goodput / predicted[now].goodput
            value = log(speedup) / (count - now)
            if speedup >= LEAST_SPEEDUP and value > best_value * (1 + 1e-9):
                best, best_value = (job.id, count), value
    return best


def _first_that_should_stay(
    queue: Sequence[JobState],
    worth: Mapping[str, Mapping[int, Prediction]],
    counts: Mapping[str, int],
    pinned: Mapping[str, int],
    capacity: int,
    now: float,
) -> JobState | None:
    """The first job whose count would change without need and without paying for it."""
    for job in queue:
        if job.id in pinned or counts[job.id] == job.replicas or job.replicas not in _counts(job):
            continue
        if not _fits(queue, {**pinned, job.id: job.replicas}, capacity):
            continue
        if not _pays(job, worth[job.id], counts[job.id], now):
            return job
    return None


def _fits(queue: Sequence[JobState], pinned: Mapping[str, int], capacity: int) -> bool:
    """Whether the pinned counts leave every other job the smallest count it could have without them."""
    others = [job for job in queue if job.id not in pinned]
    free = capacity - sum(pinned.values())
    if free < 0:
        return False
    running = [next(iter(_counts(job)), 0) for job in others]
    unpinned = capacity - sum(next(iter(_counts(job)), 0) for job in queue if job.id in pinned)
    return _admitted(running, free) == _admitted(running, unpinned)


def _admitted(smallest: Sequence[int], free: int) -> int:
    """How many jobs get their smallest count, by order of arrival."""
    admitted = 0
    for count in smallest:
        if count <= free:
            free -= count
            admitted += 1
    return admitted


def _pays(job: JobState, predicted: Mapping[int, Prediction], count: int, now: float) -> bool:
    if not predicted or count not in predicted or job.replicas not in predicted:
        # Nothing is measured: there is no reason to move a job that runs.
        return False
    if job.settled_at is None or now - job.settled_at < SETTLE_RESTARTS * job.restart_seconds:
        return False
    faster = predicted[count].goodput / predicted[job.replicas].goodput
    if faster <= 1:
        # Given up in favour of other jobs, whose growth was worth more.
        return count < job.replicas
    left = HORIZON if job.remaining is None else job.remaining / predicted[job.replicas].goodput
    return left * (1 - 1 / faster) > job.restart_seconds


def _reason(job: JobState, count: int, predicted: Mapping[int, Prediction]) -> str:
    before = job.replicas
    if count == 0:
        smallest = next(iter(_counts(job)), None)
        if smallest is None:
            return f"no replica count between {job.min_replicas} and {job.max_replicas} is valid"
        return f"waiting for room: at least {smallest} replicas are needed"
    if before == 0:
        return f"started on {count} {'replica' if count == 1 else 'replicas'}"
    if count == before:
        return "stays"
    if count in predicted and before in predicted:
        old, new = predicted[before], predicted[count]
        return (
            f"gain {old.gain:.1f} -> {new.gain:.1f} predicted, "
            f"{new.goodput / old.goodput:.1f} times the progress per second"
        )
    return "room for other jobs" if count < before else "room became free"
