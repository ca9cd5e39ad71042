"""Replays a workload: which job trains where, how far it gets, and what a policy sees of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from types import MappingProxyType
from typing import NamedTuple, Protocol

from adascale_controller.simulation.application import Application, Placement, shape
from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchPlan
from adascale_core.errors import AdaScaleError
from adascale_core.messages.reports import GainReport, StepTime

MAX_TIME = 400 * 86400.0
"""Seconds after which a simulation is given up."""
_END = 1e-9
"""A job whose progress is this share of a step below an end has reached it."""


@dataclass(frozen=True)
class Submission:
    """A job of a workload."""

    name: str  # unique in the workload
    time: float  # when it is submitted, in seconds
    application: Application
    # what policies of fixed size use
    replicas: int
    batch_size: int
    # type of accelerator -> the application there. Empty if types are not distinguished. It differs
    # between types in step times and in the largest local batch size only.
    by_type: Mapping[str, Application] = field(default_factory=lambda: MappingProxyType({}))
    restart: float | None = None  # seconds without training at each change; None for that of the settings
    # when it should be complete, in seconds from the begin of the workload; None for never
    deadline: float | None = None


@dataclass(frozen=True)
class SimulationSettings:
    """The cluster and its costs."""

    nodes: Sequence[int]  # for each node, how many replicas it holds
    restart: float = 30.0  # seconds without training at each start and each change of a job's nodes
    interval: float = 60.0  # seconds between two decisions
    prepare: float = 0.0  # seconds from a decision to the interruption, in which training continues as before
    max_time: float = MAX_TIME  # seconds after which the simulation is given up
    # for each node, the type of its accelerators. Empty if types are not distinguished.
    types: Sequence[str] = ()
    # whether a job moves to other nodes of its type without a restart if as many of its replicas share
    # each node as before, as in the published simulation of Sia
    free_moves: bool = False

    def type_of(self, nodes: Sequence[int]) -> str:
        """Return the type of accelerators of the nodes of a job; empty if types are not distinguished."""
        if not self.types or not nodes:
            return ""
        found = {self.types[node] for node in nodes}
        if len(found) > 1:
            raise AdaScaleError(
                f"the policy placed a job on accelerators of the types {', '.join(sorted(found))}, "
                "and a job runs on one type at a time"
            )
        return found.pop()

    def nodes_by_type(self) -> dict[str, list[int]]:
        """Return type of accelerator -> its nodes, in the order of the first node of each type."""
        found: dict[str, list[int]] = {}
        for node in range(len(self.nodes)):
            found.setdefault(self.type_of([node]), []).append(node)
        return found

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
    nodes: tuple[int, ...] = ()  # the node of each replica, by rank
    # the nodes that train; other than `nodes` while a change is prepared
    training_nodes: tuple[int, ...] = ()
    accelerator: str = ""  # the type of accelerator on which it trains, or trained last
    plan: BatchPlan | None = None
    progress: float = 0.0
    epoch: int = 0
    steps: float = 0.0
    generation: int = 0
    restarts: int = 0
    prepared_at: float = 0.0
    trains_from: float = 0.0  # when the last change is over, in seconds
    started_at: float | None = None
    completed_at: float | None = None
    # type of accelerator -> replicas times seconds
    replica_seconds_on: dict[str, float] = field(default_factory=dict)
    # (type of accelerator, nodes, plan) -> reported step time
    measured: dict[tuple[str, int, BatchPlan], StepTime] = field(default_factory=dict)
    step_times: tuple[StepTime, ...] = ()  # the values of `measured`
    report: GainReport | None = None  # the latest report
    # (seconds, nodes) of each change, for pictures
    history: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    _placed: tuple[tuple[int, ...], Placement] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The job's name."""
        return self.submission.name

    @property
    def application(self) -> Application:
        """What it trains, on the type of accelerator on which it trains."""
        return self.application_on(self.accelerator)

    def application_on(self, accelerator: str) -> Application:
        """Return what it trains, on a type of accelerator."""
        return self.submission.by_type.get(accelerator, self.submission.application)

    @property
    def replicas(self) -> int:
        """How many replicas it has."""
        return len(self.nodes)

    @property
    def replica_seconds(self) -> float:
        """Replicas times seconds, on all types."""
        return sum(self.replica_seconds_on.values())

    @property
    def pace(self) -> Pace:
        """How fast it trains at present."""
        assert self.plan is not None
        plan, nodes = self.plan, self.training_nodes
        if self._placed is None or self._placed[0] != nodes:
            self._placed = nodes, shape(nodes)
        placement = self._placed[1]
        step, sync = self.application.step_time(placement, plan.local_bsz)
        estimate = self.application.estimate(plan.global_bsz, self.epoch)
        return Pace(
            plan,
            len(placement),
            step + (step - sync) * (plan.accumulation - 1),
            sync,
            estimate,
            estimate.gain(plan.scale(self.application.bounds)),
        )


class Pace(NamedTuple):
    """How fast a job trains."""

    plan: BatchPlan
    nodes: int  # on how many nodes its replicas are
    step_time: float  # the true seconds of an optimizer step: step + (step - sync) * (a - 1)
    sync_time: float  # of them, seconds of communication
    estimate: GradientEstimate  # squared norm and variance of its gradient
    gain: float  # steps at the initial batch size that a step is worth


class Policy(Protocol):
    """Decides for all jobs that are submitted and not complete."""

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica. A job that is not named does not run."""

    def plan(self, job: SimulatedJob) -> BatchPlan:
        """Return the batch plan with which a job trains on its present nodes from now on."""


def simulate(
    submissions: Sequence[Submission],
    policy: Policy,
    settings: SimulationSettings,
    noise: Callable[[], float] = lambda: 1.0,
) -> list[SimulatedJob]:
    """Return the jobs after all of them are complete.

    A decision takes place at each multiple of the interval at which there are jobs, and the batch is planned
    at each decision, each start, and the end of each epoch.
    """
    jobs = [SimulatedJob(each) for each in sorted(submissions, key=lambda each: (each.time, each.name))]
    arrived = 0
    active: list[SimulatedJob] = []
    now = 0.0
    while arrived < len(jobs) or active:
        if not active:
            # Nothing changes before the next job arrives. The multiple may be rounded to less than its time.
            arrival = jobs[arrived].submission.time
            now = max(ceil(arrival / settings.interval) * settings.interval, arrival)
        while arrived < len(jobs) and jobs[arrived].submission.time <= now:
            active.append(jobs[arrived])
            arrived += 1
        allocation = policy.allocate(active, settings, now)
        allocated = [(job, tuple(allocation.get(job.name, ()))) for job in active]
        _require_room((nodes for _, nodes in allocated), settings)
        for job, nodes in allocated:
            _reallocate(job, nodes, now, settings)
            if job.training_nodes:
                job.plan = policy.plan(job)
        now += settings.interval
        if now > settings.max_time:
            names = ", ".join(job.name for job in active[:5])
            raise AdaScaleError(
                f"jobs do not end within {settings.max_time / 86400:.0f} days: {names}: check their length, "
                "--restart and --interval"
            )
        for job in active:
            _advance(job, now, settings, policy, noise)
        active = [job for job in active if job.completed_at is None]
    return jobs


def _require_room(placed: Iterable[Sequence[int]], settings: SimulationSettings) -> None:
    """Check that a policy places no more replicas on a node than it holds."""
    used = Counter(node for nodes in placed for node in nodes)
    for node, number in used.items():
        if number > settings.nodes[node]:
            raise AdaScaleError(
                f"the policy placed {number} replicas on node {node}, which holds {settings.nodes[node]}"
            )


def _reallocate(job: SimulatedJob, nodes: tuple[int, ...], now: float, settings: SimulationSettings) -> None:
    if nodes == job.nodes:
        return
    is_free = (
        settings.free_moves
        and bool(nodes)
        and job.training_nodes == job.nodes
        and settings.type_of(nodes) == job.accelerator
        and sorted(shape(nodes)) == sorted(shape(job.nodes))
    )
    job.nodes = nodes
    job.history.append((now, nodes))
    if is_free:
        job.training_nodes = nodes
        return
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
    job.accelerator = settings.type_of(job.training_nodes)
    restart = job.submission.restart
    job.trains_from = job.prepared_at + (settings.restart if restart is None else restart)


def _advance(
    job: SimulatedJob, until: float, settings: SimulationSettings, policy: Policy, noise: Callable[[], float]
) -> None:
    start = until - settings.interval
    clock = start
    if job.nodes and job.training_nodes != job.nodes:
        clock = _train(job, clock, min(job.prepared_at, until), policy, noise)
        if job.completed_at is None and job.prepared_at <= until:
            job.training_nodes = job.nodes
            job.accelerator = settings.type_of(job.nodes)
            job.plan = policy.plan(job)
    if job.nodes and job.completed_at is None and job.training_nodes == job.nodes:
        _train(job, max(clock, job.trains_from), until, policy, noise)
    end = until if job.completed_at is None else job.completed_at
    if job.nodes:
        used = settings.type_of(job.nodes)
        before = job.replica_seconds_on.get(used, 0.0)
        job.replica_seconds_on[used] = before + len(job.nodes) * (end - start)


def _train(
    job: SimulatedJob, clock: float, until: float, policy: Policy, noise: Callable[[], float]
) -> float:
    """Train from `clock` until a time or the end of the job, and return the time reached."""
    ends = job.application.epoch_ends
    pace = job.pace
    while clock < until:
        _measure(job, pace, noise)
        step_time = pace.step_time
        rate = pace.gain / step_time
        left = ends[job.epoch] - job.progress
        if left > rate * (until - clock) + _END:
            job.progress += rate * (until - clock)
            job.steps += (until - clock) / step_time
            _report(job, pace, until)
            return until
        clock += max(left, 0.0) / rate
        job.steps += max(left, 0.0) / rate / step_time
        job.progress = ends[job.epoch]
        job.epoch += 1
        if job.epoch == len(ends):
            job.completed_at = clock
            return clock
        pace = job.pace
        _report(job, pace, clock)
        job.plan = policy.plan(job)
        if job.plan != pace.plan:
            pace = job.pace
    return clock


def _report(job: SimulatedJob, pace: Pace, now: float) -> None:
    plan = pace.plan
    job.report = GainReport(
        generation=job.generation,
        step=int(job.steps),
        progress=job.progress,
        epoch=job.epoch,
        replicas=plan.replicas,
        local_bsz=plan.local_bsz,
        accumulation=plan.accumulation,
        scale=plan.scale(job.application.bounds),
        gain=pace.gain,
        grad_sqr=pace.estimate.grad_sqr,
        grad_var=pace.estimate.grad_var,
        step_time=pace.step_time,
        time=now,
        nodes=pace.nodes,
        accelerator=job.accelerator,
    )


def _measure(job: SimulatedJob, pace: Pace, noise: Callable[[], float]) -> None:
    plan = pace.plan
    key = job.accelerator, pace.nodes, plan
    if key not in job.measured:
        factor = noise()
        job.measured[key] = StepTime(
            plan.replicas,
            plan.local_bsz,
            plan.accumulation,
            pace.step_time * factor,
            nodes=pace.nodes,
            sync_time=pace.sync_time * factor if plan.replicas > 1 else None,
            accelerator=job.accelerator,
        )
        job.step_times = tuple(job.measured.values())
