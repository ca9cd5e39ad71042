"""A twin of ElasticFlow (Gu et al. 2023), to compare with: admission by deadlines, then marginal returns.

Each job trains with the batch size of the workload, on a power of two of GPUs. Its throughput on each count
is known, as ElasticFlow measures it beforehand. Whenever a job arrives or ends:

1. The minimum satisfactory share of a job is the smallest count with which it meets its deadline, if in each
   slot of time it has as many of them as jobs of earlier deadlines leave free (progressive filling, section
   4.1). A job that arrives is admitted if all admitted jobs, and it, have such a share; others are never
   admitted.
2. Each admitted job gets what this plan has for the present slot. Further GPUs go, power by power, to the job
   whose replica-seconds grow least by them (section 4.2).

Jobs that were not admitted, and admitted jobs that are late because of restarts, run on what is left, in the
order of arrival, since all jobs of a simulation end. With `keeps_all` each of them keeps a GPU before that,
as `adascale` stops no job for a later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import ceil, inf

import numpy as np
import numpy.typing as npt
from policies import FixedBatch, most_replicas
from published_workloads import packed, profiled, step_seconds

from adascale_controller.simulation.engine import SimulatedJob, SimulationSettings
from adascale_core.errors import AdaScaleError

Slots = npt.NDArray[np.int64]
MAX_SLOTS = 100_000
"""From the present to the latest deadline."""


class ElasticFlow(FixedBatch):
    """ElasticFlow, with slots as long as the interval of decisions."""

    def __init__(self, *, keeps_all: bool = False) -> None:
        self._keeps_all = keeps_all
        self._admitted: dict[str, bool] = {}
        """Job -> whether it was admitted, of the jobs that are not complete."""
        self._counts: dict[str, int] = {}

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica."""
        if {job.name for job in jobs} != set(self._admitted):
            self._decide([_Job(job, settings, now) for job in jobs], settings, now)
        return _place(self._counts, settings)

    def _decide(self, jobs: Sequence[_Job], settings: SimulationSettings, now: float) -> None:
        admitted = sorted((job for job in jobs if self._admitted.get(job.name)), key=_deadline)
        planned = self._plans(jobs, admitted, settings, now)
        # A job that is late, because of restarts, has lost its share. The GPU that it keeps may be another's.
        while any(plan is None for plan in planned):
            admitted = [job for job, plan in zip(admitted, planned, strict=True) if plan is not None]
            planned = self._plans(jobs, admitted, settings, now)
        for job in jobs:
            if job.name not in self._admitted:
                extended = sorted([*admitted, job], key=_deadline)
                found = self._plans(jobs, extended, settings, now)
                if all(plan is not None for plan in found):
                    admitted, planned = extended, found
        names = {job.name for job in admitted}
        self._admitted = {job.name: job.name in names for job in jobs}
        self._counts = share_out(admitted, planned, self._room(jobs, admitted, settings))
        others = [job for job in jobs if job.name not in names]
        free = settings.total - sum(self._counts.values())
        for later, job in zip(reversed(range(len(others))), others, strict=True):
            room = free - later if self._keeps_all else free
            count = max((each for each in job.counts if each <= room), default=0)
            self._counts[job.name] = count
            free -= count

    def _plans(
        self, jobs: Sequence[_Job], admitted: Sequence[_Job], settings: SimulationSettings, now: float
    ) -> list[Slots | None]:
        return plans(admitted, self._room(jobs, admitted, settings), settings.interval, now)

    def _room(self, jobs: Sequence[_Job], admitted: Sequence[_Job], settings: SimulationSettings) -> int:
        """Return the GPUs for the admitted jobs."""
        return settings.total - (len(jobs) - len(admitted) if self._keeps_all else 0)


class _Job:
    """What the policy knows of a job at one moment."""

    def __init__(self, job: SimulatedJob, settings: SimulationSettings, now: float) -> None:
        if job.submission.deadline is None:
            raise AdaScaleError(
                "the policy elasticflow needs a deadline for each job: add --deadlines 0.5-1.5"
            )
        self.name = job.name
        self.deadline = job.submission.deadline
        self.present = job.replicas
        self.remaining = remaining_steps(job)
        restart = settings.restart if job.submission.restart is None else job.submission.restart
        self.restart = restart
        self.restarting = max(job.trains_from - now, 0.0)
        self.throughput = _throughputs(job, settings)
        """Count -> steps per second, of the powers of two on which more GPUs are faster."""

    @property
    def counts(self) -> Iterable[int]:
        return self.throughput

    def pause(self, count: int) -> float:
        """Return the seconds without training at the begin of the first slot."""
        return self.restarting if count == self.present else self.restart


def _deadline(job: _Job) -> tuple[float, str]:
    return job.deadline, job.name


def remaining_steps(job: SimulatedJob) -> float:
    """Return the steps with the batch size of the workload that a job has still to make."""
    application, size = profiled(job.application), job.submission.batch_size
    ends = application.epoch_ends
    before = (application.iterations(size, job.epoch - 1), ends[job.epoch - 1]) if job.epoch else (0.0, 0.0)
    done = (job.progress - before[1]) / (ends[job.epoch] - before[1])
    steps = application.iterations(size, job.epoch) - before[0]
    return application.iterations(size, len(ends) - 1) - before[0] - done * steps


def _throughputs(job: SimulatedJob, settings: SimulationSettings) -> dict[int, float]:
    application, size = job.application, job.submission.batch_size
    most = most_replicas(job)
    found: dict[int, float] = {}
    count = 1
    while count <= min(most, settings.total):
        speed = 1 / step_seconds(application, packed(count, max(settings.nodes)), size)
        if found and speed <= max(found.values()):
            break
        found[count] = speed
        count *= 2
    return found


def plans(jobs: Sequence[_Job], total: int, interval: float, now: float) -> list[Slots | None]:
    """Return the GPUs of each job in each slot from now on; None for a job that misses its deadline."""
    slots = max((ceil((job.deadline - now) / interval) for job in jobs), default=0)
    if slots > MAX_SLOTS:
        raise AdaScaleError(
            f"the policy elasticflow plans at most {MAX_SLOTS} slots, and the latest deadline is {slots} "
            "intervals away: raise --interval"
        )
    free = np.full(max(slots, 1), total)
    found = []
    for job in jobs:
        plan = satisfactory_plan(job, free, interval, now)
        found.append(plan)
        if plan is not None:
            free = free - plan
    return found


def satisfactory_plan(job: _Job, free: Slots, interval: float, now: float) -> Slots | None:
    """Return the GPUs of a job in each slot with its minimum satisfactory share; None if there is none."""
    begins = now + interval * np.arange(len(free))
    seconds = np.clip(job.deadline - begins, 0.0, interval)
    for share in job.counts:
        usable = np.minimum(free, share)
        # Powers of two.
        used = np.where(usable > 0, 1 << np.log2(np.maximum(usable, 1)).astype(np.int64), 0)
        speed = np.array([job.throughput.get(int(count), 0.0) for count in used])
        trained = seconds.copy()
        first = int(np.argmax(used > 0))
        trained[first] = max(trained[first] - job.pause(int(used[first])), 0.0)
        steps = np.cumsum(speed * trained)
        if steps[-1] >= job.remaining:
            used[int(np.searchsorted(steps, job.remaining)) + 1 :] = 0
            return used
    return None


def share_out(jobs: Sequence[_Job], planned: Sequence[Slots | None], total: int) -> dict[str, int]:
    """Return the GPUs of each admitted job in the present slot."""
    counts = {job.name: int(plan[0]) for job, plan in zip(jobs, planned, strict=True) if plan is not None}
    free = total - sum(counts.values())
    by_name = {job.name: job for job in jobs}
    heap = [(_cost(job, counts[job.name]), job.name) for job in jobs]
    heapify(heap)
    while free and heap:
        cost, name = heappop(heap)
        following = _next(counts[name])
        if cost == inf or following - counts[name] > free:
            continue
        free -= following - counts[name]
        counts[name] = following
        heappush(heap, (_cost(by_name[name], following), name))
    return counts


def _next(count: int) -> int:
    return 2 * count or 1


def _cost(job: _Job, count: int) -> float:
    """Return by how much the next power of two raises the replica-seconds of a job, as a factor."""
    following = job.throughput.get(_next(count))
    if following is None:
        return inf
    return 1.0 if not count else _next(count) / following / (count / job.throughput[count])


def _place(counts: Mapping[str, int], settings: SimulationSettings) -> dict[str, tuple[int, ...]]:
    """Return the nodes of each job, the largest jobs first: powers of two fit without being split."""
    size = max(settings.nodes)
    if min(settings.nodes) != size or size & (size - 1):
        raise AdaScaleError("the policy elasticflow needs nodes of one size, a power of two: see --gpus")
    free = list(settings.nodes)
    placed = {}
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        if counts[name]:
            share = min(counts[name], size)
            fitting = [node for node, left in enumerate(free) if left >= share]
            # The fullest nodes first, so that whole nodes stay free.
            used = sorted(fitting, key=lambda node: free[node])[: counts[name] // share]
            for node in used:
                free[node] -= share
            placed[name] = tuple(node for node in used for _ in range(share))
    return placed
