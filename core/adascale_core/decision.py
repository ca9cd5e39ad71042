"""Which job gets how many replicas, decided for all jobs at once.

One pure function, `decide`, that the Kubernetes operator, the local runner and any simulator call:

1. Every job is admitted, by arrival, whose smallest valid count fits beside those of the jobs before it.
2. Of all ways to give the admitted jobs valid counts, the one of the highest total worth is taken. What a
   count is worth to a job is the logarithm of its goodput, in steps at its `batch_size` per second, less
   what a change costs. The sum of logarithms is fair between jobs of different size (proportional
   fairness): a replica goes where it makes a job faster by the largest factor.

Replicas fit into a number, or onto the nodes of a cluster. Where replicas are alike a number says it all, and
the best shares are found exactly. Otherwise they are searched for: from the least that every job needs, and
from where all jobs are now, job by job to where it is worth most for the room it takes.

A job whose change is under way or recent, that is not measured, or that is about to end, moves only where
there is no room otherwise. Same input, same answer; and since every change raises the total worth, jobs
do not move to and fro: with nothing new, the answer to a decision carried out is to stay.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, log2

from adascale_core.batch import BatchBounds, BatchPlan, is_valid_replicas, plan_batch, valid_replicas
from adascale_core.capacity import Capacity, NodeCapacity, Packing, ReplicaCapacity
from adascale_core.gain import GradientEstimate
from adascale_core.messages import StepTime
from adascale_core.names import DEFAULT_EFFICIENCY_TARGET
from adascale_core.throughput import StepTimeModel

MIN_SPEEDUP = 1.05
"""A change must be worth this factor of speed at least, and so must each doubling of a job's replicas."""
GROWTH = 2
"""A job grows to at most this many times the largest count that it has been measured on."""
HORIZON = 600.0
"""Seconds ahead for which a change must pay where the end of the job is not known."""
STABILIZATION_RESTARTS = 2.0
"""A change may follow another once the job has trained for this many restarts' time since..."""
STABILIZATION_SECONDS = 5.0
"""...and for so many seconds, because what it has gained has to be measured first."""

_UNITS = 10**9
"""Worth is counted in whole numbers of this fraction, so that sums are exact and ties are ties."""
_FORCED = 10**18
"""What a change costs that is made only for want of room: more than all other worth together."""
_IMPOSSIBLE = -(10**30)
_ROUNDS = 8
"""How often a search goes over all jobs to better them one by one."""


def stabilization_seconds(restart_seconds: float) -> float:
    """Seconds that a job is left alone after a change that stopped it for `restart_seconds`."""
    return max(STABILIZATION_SECONDS, STABILIZATION_RESTARTS * restart_seconds)


@dataclass(frozen=True)
class JobState:
    """What the decision has to know of a job.

    Args:
        id: the job id.
        arrival: when the job came, in any unit; earlier goes first.
        bounds: the batch sizes that it allows.
        min_replicas, max_replicas: the counts between which it may run.
        limit: counts above this were tried and could not be placed; none: no such count is known. The
            smallest count of the job is open in any case: below it there is nothing to fall back on.
        replicas: the count it has now; 0 if none.
        stable_since: when that count began to train, in seconds; none while a change is under way.
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
    stable_since: float | None = None
    largest: int = 0
    estimate: GradientEstimate | None = None
    step_times: Sequence[StepTime] = ()
    efficiency_target: float = DEFAULT_EFFICIENCY_TARGET
    remaining: float | None = None
    restart_seconds: float = 10.0
    prepare_seconds: float = 0.0
    limit: int | None = None


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
    """The replica count for a job.

    Args:
        replicas: the count; 0 if it does not run.
        reason: why, in words.
        waiting: whether it does not run for want of room.
    """

    replicas: int
    reason: str
    waiting: bool = False


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


def decide(jobs: Iterable[JobState], capacity: int | Capacity, now: float) -> dict[str, Decision]:
    """The replica count of every job.

    Args:
        jobs: all jobs that want to run.
        capacity: how many replicas fit in all, or what they have to fit into, those that run included.
        now: the time, in seconds on the clock of `stable_since`.

    Returns:
        job id -> decision. Counts are valid for their job or 0, and fit all at once.
    """
    queue = sorted(jobs, key=lambda job: (job.arrival, job.id))
    outlooks = [_Outlook.of(job) for job in queue]
    room = ReplicaCapacity(capacity) if isinstance(capacity, int) else capacity
    number = room.number([outlook.job.id for outlook in outlooks if outlook.counts])
    if number is not None:
        chosen = _best(_admit(outlooks, number, now), number)
    else:
        assert isinstance(room, NodeCapacity), "a number of replicas is a number"
        chosen = _search(outlooks, room, now)
    return {
        job.id: Decision(count, outlook.reason(count), waiting=not count and bool(outlook.counts))
        for job, outlook, count in zip(queue, outlooks, chosen, strict=True)
    }


def _admit(outlooks: Sequence[_Outlook], number: int, now: float) -> list[dict[int, int]]:
    """Per job, count -> worth; only the count 0 where the smallest does not fit beside those before it."""
    options = []
    free = number
    for outlook in outlooks:
        smallest = outlook.counts[0] if outlook.counts else None
        if smallest is None or smallest > free:
            options.append({0: 0})
            continue
        free -= smallest
        options.append(outlook.options(now))
    return options


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


def _search(outlooks: Sequence[_Outlook], room: NodeCapacity, now: float) -> list[int]:
    """One count per job, of the highest total worth that is found, of those that fit onto the nodes.

    To stay is among what is compared, so it is left only for what is worth more.
    """
    admitted = _admit_to_nodes(outlooks, room)
    options = {outlook.job.id: outlook.options(now) for outlook in outlooks if outlook.job.id in admitted}
    least = {job: outlook.counts[0] for job, outlook in admitted.items()}
    stay = {job: outlook.current or outlook.counts[0] for job, outlook in admitted.items()}
    found = []
    for start, first in ((stay, {}), (least, stay), (least, {})):
        if room.fits(start):
            climb = _Climb(options, room, start)
            climb.restore(first)
            climb.climb()
            found.append(climb.top())
    best = max(found, key=lambda counts: sum(options[job][count] for job, count in counts.items()))
    return [best.get(outlook.job.id, 0) for outlook in outlooks]


def _admit_to_nodes(outlooks: Sequence[_Outlook], room: NodeCapacity) -> dict[str, _Outlook]:
    """The jobs, by arrival, whose smallest count fits beside those of the jobs before it."""
    packing = room.packing()
    admitted: dict[str, _Outlook] = {}
    # What has not found room once will not find it beside even more jobs.
    refused: dict[object, int] = {}
    for outlook in outlooks:
        job = outlook.job.id
        if not outlook.counts:
            continue
        smallest, equivalence_class = outlook.counts[0], room.equivalence_class(job)
        if equivalence_class in refused and smallest >= refused[equivalence_class]:
            continue
        if packing.give(job, smallest, thorough=True):
            admitted[job] = outlook
        else:
            refused[equivalence_class] = smallest
    if room.fits({job: outlook.counts[0] for job, outlook in admitted.items()}):
        return admitted
    # They fit only in the order of their arrival, which later questions would not find again.
    found: dict[str, int] = {}
    for job, outlook in admitted.items():
        if room.fits(found | {job: outlook.counts[0]}):
            found[job] = outlook.counts[0]
    return {job: admitted[job] for job in found}


class _Climb:
    """A way from counts to better ones, job by job; every step raises the total worth.

    Args:
        options: job id -> count -> worth; who came first is first.
        room: what the counts have to fit into.
        start: job id -> count; these fit.
    """

    def __init__(
        self, options: Mapping[str, Mapping[int, int]], room: NodeCapacity, start: Mapping[str, int]
    ) -> None:
        packing = room.pack(start)
        assert packing is not None, "a climb begins with counts that fit"
        self._options = options
        self._room = room
        self._packing: Packing = packing
        self._start = dict(start)
        self._counts = dict(start)
        self._steps: list[tuple[str, int]] = []

    def restore(self, desired: Mapping[str, int]) -> None:
        """Bring jobs to the counts that are desired for them, as far as there is room."""
        larger = [job for job in desired if desired[job] > self._counts[job]]
        for job in sorted(larger, key=lambda job: -self._density(job, desired[job])):
            self._change(job, desired[job])

    def climb(self) -> None:
        """Go on as long as a job can be bettered."""
        for _ in range(_ROUNDS):
            before = len(self._steps)
            self._grow()
            for job, worth in self._options.items():
                for count in sorted(worth, key=lambda count: (-worth[count], count)):
                    if count == self._counts[job] or self._change(job, count):
                        break
            if len(self._steps) == before:
                return

    def top(self) -> dict[str, int]:
        """The last counts on the way that fit when they are packed from nothing.

        Replicas that were placed one after the other may not be found places for at once, and the next
        decision would take these counts for too many.
        """
        last = len(self._steps)
        if not self._room.fits(self._counts):
            fitting = 0
            while last - fitting > 1:
                middle = (fitting + last) // 2
                if self._room.fits(self._start | dict(self._steps[:middle])):
                    fitting = middle
                else:
                    last = middle
            last = fitting
        return self._start | dict(self._steps[:last])

    def _grow(self) -> None:
        """Give replicas, and several at once where valid counts have gaps, to where they are worth most."""
        jobs = list(self._options)
        refused: dict[str, int] = {}
        queue: list[tuple[float, int, int]] = []

        def enter(i: int) -> None:
            job = jobs[i]
            larger = [
                count
                for count in self._options[job]
                if self._counts[job] < count < refused.get(job, count + 1) and self._gain(job, count) > 0
            ]
            if larger:
                count = max(larger, key=lambda count: (self._density(job, count), -count))
                insort(queue, (self._density(job, count), -i, count))

        for i in range(len(jobs)):
            enter(i)
        while queue:
            _, i, count = queue.pop()
            if not self._change(jobs[-i], count):
                refused[jobs[-i]] = count
            enter(-i)

    def _change(self, job: str, count: int) -> bool:
        if self._gain(job, count) <= 0 or not self._packing.give(job, count):
            return False
        self._counts[job] = count
        self._steps.append((job, count))
        return True

    def _gain(self, job: str, count: int) -> int:
        return self._options[job][count] - self._options[job][self._counts[job]]

    def _density(self, job: str, count: int) -> float:
        """What more replicas are worth, per share of the nodes that they take."""
        return self._gain(job, count) / (self._room.share(job) * (count - self._counts[job]))


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
        if job.limit is not None:
            counts = [count for count in counts if count <= job.limit] or counts[:1]
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
            count: round(_UNITS * (log(speed) - log(MIN_SPEEDUP) * max(log2(count / before), 0.0)))
            - (change if count != before else 0)
            for count, speed in speeds.items()
        }

    def _cost_of_change(self, now: float) -> int:
        job = self.job
        if job.stable_since is None or now - job.stable_since < stabilization_seconds(job.restart_seconds):
            return _FORCED
        if job.replicas not in self.predicted:
            return _FORCED
        speed = self.predicted[job.replicas].goodput
        left = HORIZON if job.remaining is None else job.remaining / speed - job.prepare_seconds
        if left <= job.restart_seconds:
            return _FORCED
        # So much faster it must be to be as far at the end as without the change.
        faster = 1 / (1 - job.restart_seconds / left)
        return round(_UNITS * log(max(faster, MIN_SPEEDUP)))

    def reason(self, count: int) -> str:
        """Why the job gets `count` replicas, in words."""
        job, before = self.job, self.job.replicas
        if not self.counts:
            if job.min_replicas > job.max_replicas:
                return f"at least {job.min_replicas} are asked for, and at most {job.max_replicas}"
            return f"no replica count between {job.min_replicas} and {job.max_replicas} is valid"
        if count == 0:
            return f"waiting for room for {_replicas(self.counts[0])}"
        if before == 0:
            return f"started on {_replicas(count)}"
        if count == before:
            return "stays"
        if self.current is None:
            if job.limit is not None and before > job.limit and is_valid_replicas(job.bounds, before):
                return f"no place was found for {_replicas(before)}"
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
