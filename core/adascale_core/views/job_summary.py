"""What a list shows of a job: its state, its latest gain, how long it will still train, and its runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from adascale_core.messages import Message
from adascale_core.messages.allocation import ActiveAllocation, Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
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


def training_replicas(active: ActiveAllocation | None, replicas: Collection[Registration]) -> int:
    """Return how many of the registered replicas train in the active generation."""
    return sum(
        active is not None
        and replica.state is ReplicaState.RUNNING
        and replica.generation == active.generation
        for replica in replicas
    )


def is_spare(
    desired: Allocation | None, active: ActiveAllocation | None, replica: int, *, broken: bool
) -> bool:
    """Whether a replica is beyond those that train, while as many as desired do.

    Args:
        desired, active, broken: as of `registered_state`.
        replica: its index.
    """
    if desired is None or active is None or broken or not desired.spares:
        return False
    return active.replicas == desired.replicas and replica not in active.indices


def waiting_spares(
    desired: Allocation | None,
    active: ActiveAllocation | None,
    replicas: Collection[Registration],
    *,
    broken: bool,
) -> int:
    """Return how many spares are ready to take the place of a lost replica."""
    return sum(
        replica.state is ReplicaState.WAITING and is_spare(desired, active, replica.replica, broken=broken)
        for replica in replicas
    )


def registered_state(
    desired: Allocation | None,
    active: ActiveAllocation | None,
    replicas: Collection[Registration],
    *,
    broken: bool,
    complete: bool,
) -> JobStateName:
    """Return the state of a job, as far as the metrics service knows it.

    Args:
        desired: the newest allocation. None before the first.
        active: the allocation that trainers run in or move to. None before the first.
        replicas: the last registration of each replica.
        broken: whether the active generation has lost a member.
        complete: whether the program has finished.
    """
    training = training_replicas(active, replicas)
    if complete:
        return JobStateName.COMPLETE
    if {replica.state for replica in replicas} == {ReplicaState.FAILED}:
        return JobStateName.FAILED
    if desired is None:
        return JobStateName.PENDING
    if desired.failed:
        return JobStateName.FAILED
    if desired.replicas == 0:
        return JobStateName.RESCALING if training else JobStateName.STOPPED
    if broken:
        return JobStateName.RECOVERING
    if active is None or not training:
        return JobStateName.STARTING
    return JobStateName.RUNNING if active.generation == desired.generation else JobStateName.RESCALING


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
        spares: the number of spare replicas that wait.
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


def summarize(
    job_id: str, spec: JobSpec | None, rendezvous: Rendezvous, latest: GainReport | None, created_at: float
) -> JobSummary:
    """Return the summary of a job."""
    replicas = rendezvous.replicas.values()
    desired, active, complete = rendezvous.desired, rendezvous.active, rendezvous.complete
    state = registered_state(desired, active, replicas, broken=rendezvous.broken, complete=complete)
    training = 0 if complete else training_replicas(active, replicas)
    steps = spec.steps if spec is not None else None
    target = steps if steps is not None else latest.target if latest is not None else None
    seconds_left = latest.seconds_left(target) if latest is not None and training else None
    return JobSummary(
        id=job_id,
        state=state,
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
        spares=waiting_spares(desired, active, replicas, broken=rendezvous.broken),
    )
