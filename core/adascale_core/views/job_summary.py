"""What a list shows of a job: its state, its latest gain, how long it will still train, and its runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from adascale_core.messages import Message
from adascale_core.messages.allocation import ActiveAllocation, Allocation, SlowReplacement
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.names import WAITS_FOR_OTHERS
from adascale_core.performance.slow_replica import SlowReplica
from adascale_core.rendezvous.rendezvous import Rendezvous


class JobStateName(StrEnum):
    """What a job does, the same in `kubectl get`, `adascale list` and the metrics service."""

    PENDING = "Pending"
    """It has no replicas yet, or waits for capacity."""
    STARTING = "Starting"
    """Its replicas start."""
    RUNNING = "Running"
    """It trains on the desired replicas."""
    RESCALING = "Rescaling"
    """It trains, and a change of the replica count is in progress."""
    RECOVERING = "Recovering"
    """A replica was lost, and the next generation has not begun."""
    STOPPING = "Stopping"
    """The user has stopped it, and its replicas save their state."""
    STOPPED = "Stopped"
    """It has no replicas any more, and has not ended."""
    SUSPENDED = "Suspended"
    """It is stopped by `suspend`, or by a `replicaLimit` of 0."""
    FAILED = "Failed"
    """It has failed for good, or its program has failed on all replicas that are there."""
    COMPLETE = "Complete"
    """Its program has finished."""
    UNKNOWN = "Unknown"
    """Its checkpoints cannot be read, which record whether it has finished."""


ENDED = frozenset({JobStateName.STOPPED, JobStateName.FAILED, JobStateName.COMPLETE})
"""The states of a job that does not train any more, unless somebody starts it again."""


@dataclass(frozen=True)
class RegisteredJob(Message):
    """The generations of a job, and what has been registered and reported in them.

    Args:
        desired: the newest allocation; None before the first.
        active: the allocation that trainers run in or move to; None before the first.
        broken: whether the active generation has lost a member.
        complete: whether the program has finished.
        replicas: the last registration of each replica, by index.
        latest: the latest report; None if there is none.
    """

    desired: Allocation | None
    active: ActiveAllocation | None
    broken: bool
    complete: bool
    replicas: Collection[Registration]
    latest: GainReport | None

    @property
    def state(self) -> JobStateName:
        """The state of the job, as far as the metrics service knows it."""
        training = self.training_replicas
        if self.complete:
            return JobStateName.COMPLETE
        if {replica.state for replica in self.replicas} == {ReplicaState.FAILED}:
            return JobStateName.FAILED
        if self.desired is None:
            return JobStateName.PENDING
        if self.desired.failed:
            return JobStateName.FAILED
        if self.desired.replicas == 0:
            return JobStateName.RESCALING if training else JobStateName.STOPPED
        if self.broken:
            return JobStateName.RECOVERING
        if self.active is None or not training:
            return JobStateName.STARTING
        is_current = self.active.generation == self.desired.generation
        return JobStateName.RUNNING if is_current else JobStateName.RESCALING

    @property
    def training_replicas(self) -> int:
        """How many of the registered replicas train in the active generation."""
        generation = None if self.active is None else self.active.generation
        return sum(
            each.state is ReplicaState.RUNNING and each.generation == generation for each in self.replicas
        )

    def is_spare(self, replica: int) -> bool:
        """Whether a replica is beyond those that train, while as many as desired do."""
        desired, active = self.desired, self.active
        if desired is None or active is None or self.broken or not desired.spares:
            return False
        return active.replicas == desired.replicas and replica not in active.indices

    @property
    def waiting_spares(self) -> int:
        """The number of spares that are ready to take the place of a lost replica."""
        return sum(
            each.state is ReplicaState.WAITING and self.is_spare(each.replica) for each in self.replicas
        )

    @property
    def stall(self) -> str | None:
        """Where the replicas are while no step ends, the slowest first; None while steps end."""
        stalls = [
            (each.stall == WAITS_FOR_OTHERS, f"replica {each.replica} {each.stall}")
            for each in self.replicas
            if each.stall and each.state is ReplicaState.RUNNING
        ]
        return "; ".join(text for _, text in sorted(stalls)) or None

    @property
    def slow(self) -> SlowReplica | None:
        """The replica for which the others wait, by its index; None if none is slow, or no step ends."""
        latest, active = self.latest, self.active
        if latest is None or latest.slow_replica is None or latest.slow_factor is None or self.complete:
            return None
        if active is None or self.broken or latest.generation != active.generation or self.stall is not None:
            # The report is of other replicas, or of long ago.
            return None
        return SlowReplica(latest.slow_replica, latest.slow_factor)

    @property
    def slow_replacement(self) -> SlowReplacement | None:
        """The spare that trains in the place of a slow replica, since the last change; None if none does."""
        if self.active is None or self.broken or self.complete:
            return None
        return self.active.slow_replacement


@dataclass(frozen=True)
class RunView(Message):
    """What is known of the runs of a state folder besides what their metrics service has stored.

    Args:
        folder: the state folder.
        url: the address of the metrics service of the run; None if it does not run.
        began_at: when the first run began, in seconds since 1970.
        ended_at: when the last run ended, in seconds since 1970; None if it runs, or if that is not known.
        reason: why the last run has failed; empty if it has not.
        result: what the program has reported as its result.
        versions: of the packages that matter for a run, by name.
    """

    folder: str
    url: str | None
    began_at: float
    ended_at: float | None = None
    reason: str = ""
    result: Mapping[str, float | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEntry(Message):
    """A state folder in the list of runs.

    Args:
        id: distinguishes it from others on this machine: `<job id>~<digest of the folder>`.
        job: the id of its job.
        database: the SQLite file of its metrics service.
        logs: the folder with the output of its replicas.
        state: what the job does if it does not run; None if it runs.
        began_at: when its last run began, in seconds since 1970.
        run: what else is known of it.
    """

    id: str
    job: str
    database: str
    logs: str
    state: JobStateName | None
    began_at: float
    run: RunView


MAX_SECONDS_LEFT = 1e9
"""A longer prediction of the time left is not shown."""


@dataclass(frozen=True)
class JobSummary(Message):
    """A job in a list.

    Args:
        id: the full job id.
        state: its state.
        replicas: the number of replicas that train.
        desired: the desired number of replicas; None before the first allocation.
        max_replicas: the most replicas that it may get; None if it is not declared.
        created_at: when the service created it, in seconds since 1970.
        generation: the active generation; 0 if there is none.
        failures, disruptions: the numbers of generations that ended by a failure of the program, and by
            another loss.
        batch_size: the batch size that the learning rate was tuned for; None if it is not declared.
        target: the progress at which training ends; None if the program decides.
        latest: the latest report; None if there is none.
        seconds_left: the predicted seconds until its end; None if unknown, or if it does not train.
        run: its runs on this machine; None unless `adascale ui` shows it.
        spares: the number of spare replicas that wait.
        slowness: which replica is slow, or which was and is replaced by a spare, without its node, for
            people; empty if there is none.
    """

    id: str
    state: JobStateName
    replicas: int
    desired: int | None
    max_replicas: int | None
    created_at: float
    generation: int
    failures: int
    disruptions: int
    batch_size: int | None
    target: float | None
    latest: GainReport | None
    seconds_left: float | None
    run: RunView | None = None
    spares: int = 0
    slowness: str = ""


def summarize(
    job_id: str, spec: JobSpec | None, rendezvous: Rendezvous, latest: GainReport | None, created_at: float
) -> JobSummary:
    """Return the summary of a job."""
    job = RegisteredJob(
        rendezvous.desired,
        rendezvous.active,
        rendezvous.broken,
        rendezvous.complete,
        rendezvous.replicas.values(),
        latest,
    )
    desired, active, replacement = job.desired, job.active, job.slow_replacement
    training = 0 if job.complete else job.training_replicas
    steps = spec.steps if spec is not None else None
    target = steps if steps is not None else latest.target if latest is not None else None
    seconds_left = latest.seconds_left(target) if latest is not None and training else None
    return JobSummary(
        id=job_id,
        state=job.state,
        replicas=training,
        desired=desired.replicas if desired is not None else None,
        max_replicas=spec.max_replicas if spec is not None else None,
        created_at=created_at,
        generation=active.generation if active is not None else 0,
        failures=rendezvous.failures,
        disruptions=rendezvous.disruptions,
        batch_size=spec.batch_size if spec is not None else None,
        target=target,
        latest=latest,
        seconds_left=seconds_left if seconds_left is not None and seconds_left < MAX_SECONDS_LEFT else None,
        spares=job.waiting_spares,
        slowness=str(job.slow or (replace(replacement, node="") if replacement is not None else "")),
    )
