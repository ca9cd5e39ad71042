"""What a simulation shows: completion times, restarts, use of the cluster, and fairness."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adascale_controller.simulation.application import Application, fixed_plan, shape
from adascale_controller.simulation.engine import SimulatedJob, SimulationSettings, Submission
from adascale_core.batch.plans import candidate_plans


@dataclass(frozen=True)
class JobResult:
    """A completed job."""

    name: str
    application: str
    # in seconds from the begin of the workload
    submitted: float
    started: float
    completed: float
    completion_time: float  # seconds from submission to completion
    queueing_time: float  # seconds from submission to the first start
    restarts: int  # how often its nodes changed after the first start
    gpu_hours: float
    # its completion time divided by that on an equal share of the cluster, among as many jobs as there
    # were on average (Mahajan et al. 2020, Themis, section 3.1); at most 1 is fair. On a cluster with
    # several types of accelerators, the share is on one type, and its time is the mean over the types,
    # each as often as it has GPUs. The share is at least one replica and a whole number, and its time is
    # that of training with the best batch in each epoch and one restart.
    finish_time_fairness: float
    # when it should have been complete, in seconds from the begin of the workload; None if it had no
    # deadline
    deadline: float | None = None


@dataclass(frozen=True)
class Results:
    """All jobs of a simulation."""

    jobs: Sequence[JobResult]

    @classmethod
    def of(cls, jobs: Sequence[SimulatedJob], settings: SimulationSettings) -> Results:
        """Return the results of the jobs of a simulation."""
        equal_share = _EqualShare(settings)
        contention = Contention(jobs)
        return cls([_result(job, contention.of(job), equal_share) for job in jobs])

    @property
    def makespan(self) -> float:
        """Seconds from the first submission to the last completion."""
        return max(job.completed for job in self.jobs) - min(job.submitted for job in self.jobs)

    def summary(self) -> dict[str, float]:
        """Return the numbers over all jobs, in seconds unless the name says otherwise."""
        times = sorted(job.completion_time for job in self.jobs)
        queueing = [job.queueing_time for job in self.jobs]
        fairness = [job.finish_time_fairness for job in self.jobs]
        met = [float(job.completed <= job.deadline) for job in self.jobs if job.deadline is not None]
        return {
            "mean_completion_time": _mean(times),
            "median_completion_time": quantile(times, 0.5),
            "p95_completion_time": quantile(times, 0.95),
            "p99_completion_time": quantile(times, 0.99),
            "makespan": self.makespan,
            "gpu_hours": sum(job.gpu_hours for job in self.jobs),
            "restarts_per_job": _mean([float(job.restarts) for job in self.jobs]),
            "mean_queueing_time": _mean(queueing),
            "max_queueing_time": max(queueing),
            "worst_finish_time_fairness": max(fairness),
            "unfairly_treated_share": _mean([float(each > 1.0) for each in fairness]),
            **({"deadlines_met_share": _mean(met)} if met else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the summary and `jobs`."""
        return {**self.summary(), "jobs": [asdict(job) for job in self.jobs]}


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, interpolated linearly."""
    position = share * (len(ascending) - 1)
    low = int(position)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (position - low) * (ascending[high] - ascending[low])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _result(job: SimulatedJob, contention: float, equal_share: _EqualShare) -> JobResult:
    assert job.completed_at is not None
    assert job.started_at is not None
    time = job.completed_at - job.submission.time
    return JobResult(
        name=job.name,
        application=job.application.name,
        submitted=job.submission.time,
        started=job.started_at,
        completed=job.completed_at,
        completion_time=time,
        queueing_time=job.started_at - job.submission.time,
        restarts=job.restarts,
        gpu_hours=job.replica_seconds / 3600,
        finish_time_fairness=time / equal_share.completion_time(job.submission, contention),
        deadline=job.submission.deadline,
    )


class Contention:
    """The mean number of jobs in the cluster while a job is in it."""

    def __init__(self, jobs: Sequence[SimulatedJob]) -> None:
        changes: list[tuple[float, int]] = []
        for job in jobs:
            assert job.completed_at is not None
            changes += [(job.submission.time, 1), (job.completed_at, -1)]
        changes.sort()
        self._times = [changes[0][0]]
        self._jobs = [0]
        """How many jobs there are from each of the times on."""
        self._job_seconds = [0.0]
        """The sum over jobs of the seconds that they were in the cluster until each of the times."""
        for time, change in changes:
            self._job_seconds.append(self._until(time))
            self._times.append(time)
            self._jobs.append(self._jobs[-1] + change)

    def _until(self, time: float) -> float:
        i = bisect_right(self._times, time) - 1
        return self._job_seconds[i] + self._jobs[i] * (time - self._times[i])

    def of(self, job: SimulatedJob) -> float:
        """Return the mean over the life of a completed job, itself included."""
        start, end = job.submission.time, job.completed_at
        assert end is not None
        return max((self._until(end) - self._until(start)) / (end - start), 1.0) if end > start else 1.0


class _EqualShare:
    """How long an application takes on an equal share of the cluster, with the best batch in each epoch."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._nodes = settings.nodes_by_type()
        self._gpus = {
            name: sum(settings.nodes[node] for node in nodes) for name, nodes in self._nodes.items()
        }
        self._memory: dict[tuple[str, str, int], float] = {}

    def completion_time(self, job: Submission, contention: float) -> float:
        """Return the seconds on `1 / contention` of the cluster, rounded down, at least one replica."""
        return sum(gpus * self._on(name, job, contention) for name, gpus in self._gpus.items()) / sum(
            self._gpus.values()
        )

    def _on(self, name: str, job: Submission, contention: float) -> float:
        """Return the seconds on a type of accelerator."""
        application = job.by_type.get(name, job.application)
        replicas = min(max(int(self._settings.total / contention), 1), self._gpus[name])
        if application.max_replicas is not None:
            replicas = min(replicas, application.max_replicas)
        bounds = application.bounds
        if bounds.max_batch_size is not None:
            replicas = min(replicas, bounds.max_batch_size // bounds.lower)
        key = name, application.name, replicas
        if key not in self._memory:
            self._memory[key] = self._training_time(application, replicas, self._nodes[name])
        return self._memory[key] + (self._settings.restart if job.restart is None else job.restart)

    def _training_time(self, application: Application, replicas: int, among: Sequence[int]) -> float:
        nodes: list[int] = []
        sizes = self._settings.nodes
        for node in sorted(among, key=lambda node: -sizes[node]):
            nodes += [node] * min(sizes[node], replicas - len(nodes))
        placement = shape(nodes)
        bounds = application.bounds
        plans = candidate_plans(bounds, replicas)
        if application.pinned_batch_size is not None:
            plans = [fixed_plan(application, replicas, application.pinned_batch_size)]
        seconds = {
            i: step + (step - sync) * (plan.accumulation - 1)
            for i, plan in enumerate(plans)
            for step, sync in [application.step_time(placement, plan.local_bsz)]
        }
        total, before = 0.0, 0.0
        for epoch, end in enumerate(application.epoch_ends):
            total += min(
                (end - before)
                * seconds[i]
                / application.estimate(plan.global_bsz, epoch).gain(plan.scale(bounds))
                for i, plan in enumerate(plans)
            )
            before = end
        return total
