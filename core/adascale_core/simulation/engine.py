"""Replays a workload: which job trains where, how far it gets, and what a policy sees of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from adascale_core.batch import BatchPlan
from adascale_core.errors import AdaScaleError
from adascale_core.gain import GradientEstimate
from adascale_core.messages import GainReport, StepTime
from adascale_core.simulation.application import Application
from adascale_core.simulation.cluster import shape

_END = 1e-9
"""A job whose progress is this share of a step below an end has reached it."""


class SimulationError(AdaScaleError):
    """A policy or a workload that cannot be simulated."""


@dataclass(frozen=True)
class Submission:
    """A job of a workload.

    Args:
        name: its name, unique in the workload.
        time: when it is submitted, in seconds.
        application: what it trains.
        replicas, batch_size: what policies of fixed size use.
    """

    name: str
    time: float
    application: Application
    replicas: int
    batch_size: int


@dataclass(frozen=True)
class Settings:
    """The cluster and its costs.

    Args:
        nodes: for each node, how many replicas it holds.
        restart: seconds without training at each start and each change of a job's nodes.
        interval: seconds between two decisions.
        prepare: seconds from a decision to the interruption, in which training continues as before.
        max_time: seconds after which the simulation is given up.
    """

    nodes: Sequence[int]
    restart: float = 30.0
    interval: float = 60.0
    prepare: float = 0.0
    max_time: float = 400 * 86400.0

    @property
    def total(self) -> int:
        """How many replicas the cluster holds."""
        return sum(self.nodes)


@dataclass
class SimulatedJob:
    """A job of the simulation.

    A policy may read what a cluster's controller knows: everything but `application`, of which it may read
    name, bounds and limits. The policies of other papers may read more, where the paper does.
    """

    submission: Submission
    nodes: tuple[int, ...] = ()
    """The node of each replica, by rank."""
    training_nodes: tuple[int, ...] = ()
    """The nodes that train; other than `nodes` while a change is prepared."""
    plan: BatchPlan | None = None
    progress: float = 0.0
    epoch: int = 0
    steps: float = 0.0
    generation: int = 0
    restarts: int = 0
    prepared_at: float = 0.0
    trains_from: float = 0.0
    """When the last change is over, in seconds."""
    started_at: float | None = None
    completed_at: float | None = None
    replica_seconds: float = 0.0
    measured: dict[tuple[int, BatchPlan], StepTime] = field(default_factory=dict)
    """(nodes, plan) -> reported step time."""
    report: GainReport | None = None
    """The latest report."""
    history: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """(seconds, nodes) of each change, for pictures."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.submission.name

    @property
    def application(self) -> Application:
        """What it trains."""
        return self.submission.application

    @property
    def replicas(self) -> int:
        """How many replicas it has."""
        return len(self.nodes)

    @property
    def estimate(self) -> GradientEstimate:
        """Squared norm and variance of its gradient at present."""
        assert self.plan is not None
        return self.application.estimate(self.plan.global_bsz, self.epoch)

    @property
    def gain(self) -> float:
        """The gain of its present plan."""
        assert self.plan is not None
        return self.estimate.gain(self.plan.scale(self.application.bounds))

    @property
    def step_time(self) -> float:
        """The true seconds of an optimizer step of its present plan: step + (step - sync) * (a - 1)."""
        assert self.plan is not None
        step, sync = self.application.step_time(shape(self.training_nodes), self.plan.local_bsz)
        return step + (step - sync) * (self.plan.accumulation - 1)


class Policy(Protocol):
    """Decides for all jobs that are submitted and not complete."""

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: Settings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica. A job that is not named does not run."""

    def plan(self, job: SimulatedJob) -> BatchPlan:
        """Return the batch plan with which a job trains on its present nodes from now on."""


def simulate(
    submissions: Sequence[Submission],
    policy: Policy,
    settings: Settings,
    noise: Callable[[], float] = lambda: 1.0,
) -> list[SimulatedJob]:
    """Return the jobs after all of them are complete.

    A decision takes place at each multiple of the interval at which there are jobs, and the batch is planned
    at each decision, each start, and the end of each epoch.

    Args:
        submissions: the workload.
        policy: the policy.
        settings: the cluster.
        noise: returns the factor of the next reported step time.

    Raises:
        SimulationError: the policy uses more than a node holds, or a job never ends.
    """
    jobs = [SimulatedJob(each) for each in sorted(submissions, key=lambda each: (each.time, each.name))]
    arrived = 0
    active: list[SimulatedJob] = []
    now = 0.0
    while arrived < len(jobs) or active:
        if not active:
            # Nothing changes before the next job arrives.
            now = ceil(jobs[arrived].submission.time / settings.interval) * settings.interval
        while arrived < len(jobs) and jobs[arrived].submission.time <= now:
            active.append(jobs[arrived])
            arrived += 1
        allocation = policy.allocate(active, settings, now)
        _require_room(allocation, settings)
        for job in active:
            _reallocate(job, tuple(allocation.get(job.name, ())), now, settings)
            if job.training_nodes:
                job.plan = policy.plan(job)
        now += settings.interval
        if now > settings.max_time:
            names = ", ".join(job.name for job in active[:5])
            raise SimulationError(f"jobs do not end within {settings.max_time:.0f} s: {names}")
        for job in active:
            _advance(job, now, settings, policy, noise)
        active = [job for job in active if job.completed_at is None]
    return jobs


def _require_room(allocation: Mapping[str, tuple[int, ...]], settings: Settings) -> None:
    free = list(settings.nodes)
    for nodes in allocation.values():
        for node in nodes:
            free[node] -= 1
    if min(free, default=0) < 0:
        node = min(range(len(free)), key=lambda each: free[each])
        raise SimulationError(
            f"the policy placed {settings.nodes[node] - free[node]} replicas on node {node}, "
            f"which holds {settings.nodes[node]}"
        )


def _reallocate(job: SimulatedJob, nodes: tuple[int, ...], now: float, settings: Settings) -> None:
    if nodes == job.nodes:
        return
    job.nodes = nodes
    job.history.append((now, nodes))
    if not nodes:
        job.training_nodes = ()
        return
    job.generation += 1
    if job.started_at is None:
        job.started_at = now
    else:
        job.restarts += 1
    job.prepared_at = now + settings.prepare
    if now < job.trains_from or len(nodes) < len(job.training_nodes) or not job.training_nodes:
        # Replicas that leave, and those that do not train, are not waited for.
        job.training_nodes = nodes
    if job.prepared_at <= now:
        job.training_nodes = nodes
    job.trains_from = job.prepared_at + settings.restart


def _advance(
    job: SimulatedJob, until: float, settings: Settings, policy: Policy, noise: Callable[[], float]
) -> None:
    start = until - settings.interval
    clock = start
    if job.nodes and job.training_nodes != job.nodes:
        clock = _train(job, clock, min(job.prepared_at, until), policy, noise)
        if job.completed_at is None and job.prepared_at <= until:
            job.training_nodes = job.nodes
            job.plan = policy.plan(job)
    if job.nodes and job.completed_at is None and job.training_nodes == job.nodes:
        _train(job, max(clock, job.trains_from), until, policy, noise)
    end = until if job.completed_at is None else job.completed_at
    job.replica_seconds += len(job.nodes) * (end - start)


def _train(
    job: SimulatedJob, clock: float, until: float, policy: Policy, noise: Callable[[], float]
) -> float:
    """Train from `clock` until a time or the end of the job, and return the time reached."""
    ends = job.application.epoch_ends
    while clock < until:
        assert job.plan is not None
        _measure(job, noise)
        step_time = job.step_time
        rate = job.gain / step_time
        left = ends[job.epoch] - job.progress
        if left > rate * (until - clock) + _END:
            job.progress += rate * (until - clock)
            job.steps += (until - clock) / step_time
            _report(job, until)
            return until
        clock += max(left, 0.0) / rate
        job.steps += max(left, 0.0) / rate / step_time
        job.progress = ends[job.epoch]
        job.epoch += 1
        if job.epoch == len(ends):
            job.completed_at = clock
            return clock
        _report(job, clock)
        job.plan = policy.plan(job)
    return clock


def _report(job: SimulatedJob, now: float) -> None:
    assert job.plan is not None
    plan, estimate = job.plan, job.estimate
    job.report = GainReport(
        generation=job.generation,
        step=int(job.steps),
        progress=job.progress,
        epoch=job.epoch,
        replicas=plan.replicas,
        local_bsz=plan.local_bsz,
        accumulation=plan.accumulation,
        scale=plan.scale(job.application.bounds),
        gain=job.gain,
        grad_sqr=estimate.grad_sqr,
        grad_var=estimate.grad_var,
        step_time=job.step_time,
        time=now,
        nodes=len(set(job.training_nodes)),
    )


def _measure(job: SimulatedJob, noise: Callable[[], float]) -> None:
    assert job.plan is not None
    nodes = len(set(job.training_nodes))
    key = nodes, job.plan
    if key not in job.measured:
        plan = job.plan
        factor = noise()
        sync = job.application.step_time(shape(job.training_nodes), plan.local_bsz)[1] * factor
        job.measured[key] = StepTime(
            plan.replicas,
            plan.local_bsz,
            plan.accumulation,
            job.step_time * factor,
            nodes=nodes,
            sync_time=sync if plan.replicas > 1 else None,
        )
