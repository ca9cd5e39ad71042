"""Policies to compare with: twins of Tiresias and Optimus, first come first served, earliest deadline first,
and equal shares.

They use the number of replicas and the batch size of the workload; Optimus and equal shares only the latter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf

from published_workloads import packed, profiled

from adascale_controller.simulation.application import ROUNDING, fixed_plan
from adascale_controller.simulation.engine import SimulatedJob, SimulationSettings
from adascale_core.batch.plans import BatchPlan


class FixedBatch:
    """The plan of policies that do not change the batch size."""

    def plan(self, job: SimulatedJob) -> BatchPlan:
        """Return the plan of the batch size of the workload."""
        return fixed_plan(job.application, len(job.training_nodes), job.submission.batch_size)


def most_replicas(job: SimulatedJob) -> int:
    """Return how many replicas a job can use with the batch size of the workload."""
    most = job.submission.batch_size // job.application.bounds.lower
    return min(most, job.application.max_replicas or most)


def place_emptiest_first(free: list[int], replicas: int) -> tuple[int, ...]:
    """Return nodes for the replicas, the emptiest node first, and take them from `free`."""
    nodes: list[int] = []
    while len(nodes) < replicas:
        node = max(range(len(free)), key=lambda each: (free[each], -each))
        taken = min(free[node], replicas - len(nodes))
        nodes.extend([node] * taken)
        free[node] -= taken
    return tuple(nodes)


def _place(
    jobs: Sequence[SimulatedJob], counts: Mapping[str, int], settings: SimulationSettings
) -> dict[str, tuple[int, ...]]:
    """Place jobs in their order; those whose count is unchanged keep their nodes."""
    placed = {job.name: job.nodes for job in jobs if job.nodes and len(job.nodes) == counts.get(job.name, 0)}
    free = list(settings.nodes)
    for nodes in placed.values():
        for node in nodes:
            free[node] -= 1
    for job in jobs:
        if job.name not in placed and counts.get(job.name, 0):
            placed[job.name] = place_emptiest_first(free, counts[job.name])
    return placed


class Tiresias(FixedBatch):
    """Discretized two-dimensional least attained service, with two queues (Gu et al. 2019, section 3).

    Jobs of the first queue run before those of the second, in the order of arrival in the queue, at a fixed
    number of replicas. A job moves to the second queue after 16 hours of service of a replica.
    """

    THRESHOLD = 16 * 3600.0
    """Replica-seconds."""

    def __init__(self) -> None:
        self._queues: tuple[list[str], list[str]] = ([], [])
        self._service: dict[str, float] = {}
        self._running: set[str] = set()
        self._checked_at = 0.0

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica."""
        by_name = {job.name: job for job in jobs}
        first, second = ([name for name in queue if name in by_name] for queue in self._queues)
        first += [job.name for job in jobs if job.name not in self._service]
        for job in jobs:
            ran = now - self._checked_at if job.name in self._running else 0.0
            service = self._service.get(job.name, 0.0) + ran * job.submission.replicas
            self._service[job.name] = service
            if service >= self.THRESHOLD and job.name in first:
                first.remove(job.name)
                second.append(job.name)
        self._queues, self._checked_at = (first, second), now
        free = settings.total
        order, counts = [], {}
        for name in [*first, *second]:
            replicas = by_name[name].submission.replicas
            if replicas <= free:
                counts[name] = replicas
                order.append(by_name[name])
                free -= replicas
        self._running = set(counts)
        return _place(order, counts, settings)


class Optimus(FixedBatch):
    """Greedy marginal gain in completion time (Peng et al. 2018, section 4), with an exact prediction.

    Every job gets one replica in the order of arrival; each further replica goes to the job whose remaining
    time it shortens most.
    """

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica."""
        del now
        free = settings.total
        node = max(settings.nodes)
        counts: dict[str, int] = {}
        gains: dict[str, float] = {}
        remaining = {job.name: self._remaining_steps(job) for job in jobs}
        by_name = {job.name: job for job in jobs}

        def marginal_gain(name: str) -> float:
            job, count = by_name[name], counts[name]
            if count + 1 > most_replicas(job) or free < 1:
                return 0.0
            times = [self._step_time(job, replicas, node) for replicas in (count, count + 1)]
            return (times[0] - times[1]) * remaining[name]

        for job in jobs:
            if free < 1:
                break
            counts[job.name] = 1
            free -= 1
            gains[job.name] = marginal_gain(job.name)
        while free > 0 and gains:
            name = max(gains, key=lambda each: gains[each])
            if gains[name] <= 0:
                break
            counts[name] += 1
            gains[name] = marginal_gain(name)
            free -= 1
        return _place(sorted(jobs, key=lambda job: counts.get(job.name, 0)), counts, settings)

    def _remaining_steps(self, job: SimulatedJob) -> float:
        last = len(job.application.epoch_ends) - 1
        if job.epoch >= last:
            return 1.0
        application, size = profiled(job.application), job.submission.batch_size
        return application.iterations(size, last) - application.iterations(size, job.epoch)

    def _step_time(self, job: SimulatedJob, replicas: int, node: int) -> float:
        application, size = job.application, job.submission.batch_size
        plan = fixed_plan(application, replicas, size)
        if replicas == 1 and plan.accumulation == 1:
            plan = BatchPlan(1, ceil(plan.local_bsz / 2 - ROUNDING), 2)
        step, sync = application.step_time(packed(replicas, node), plan.local_bsz)
        return step + (step - sync) * (plan.accumulation - 1)


class FirstComeFirstServed(FixedBatch):
    """Jobs start in the order of arrival at a fixed number of replicas, and run to their end."""

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica."""
        del now
        free = settings.total - sum(job.replicas for job in jobs)
        counts = {job.name: job.replicas for job in jobs if job.replicas}
        for job in jobs:
            if job.name in counts:
                continue
            if job.submission.replicas > free:
                break
            counts[job.name] = job.submission.replicas
            free -= job.submission.replicas
        return _place(jobs, counts, settings)


class EarliestDeadlineFirst(FixedBatch):
    """The jobs with the earliest deadlines run, at a fixed number of replicas; others are stopped for them.

    A job whose deadline has passed, or that has none, comes after all others.
    """

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica."""

        def urgency(job: SimulatedJob) -> tuple[bool, float, float]:
            deadline = inf if job.submission.deadline is None else job.submission.deadline
            return deadline <= now, deadline, job.submission.time

        free = settings.total
        counts: dict[str, int] = {}
        for job in sorted(jobs, key=urgency):
            if job.submission.replicas <= free:
                counts[job.name] = job.submission.replicas
                free -= job.submission.replicas
        return _place(jobs, counts, settings)


class EqualShares(FixedBatch):
    """Every job has the same number of replicas, as far as it can use them; the earliest have one more."""

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica."""
        del now
        counts = dict.fromkeys((job.name for job in jobs), 0)
        most = {job.name: most_replicas(job) for job in jobs}
        free = settings.total
        growing = [job.name for job in jobs]
        while free and growing:
            for name in list(growing):
                if not free:
                    break
                if counts[name] == most[name]:
                    growing.remove(name)
                else:
                    counts[name] += 1
                    free -= 1
        return _place(jobs, counts, settings)
