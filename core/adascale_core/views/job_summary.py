"""What a list shows of a job: its phase, its latest gain, and how long it will still train."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.message import Message
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.rendezvous.rendezvous import Rendezvous

MAX_SECONDS_LEFT = 1e9
"""A longer prediction of the time left is not shown."""


class JobPhase(StrEnum):
    """What a job does."""

    QUEUED = "Queued"
    """It has not got replicas yet."""
    STOPPED = "Stopped"
    """It has no replicas any more: it is suspended, scaled to zero, or gave its replicas to other jobs."""
    STARTING = "Starting"
    """Its replicas start."""
    RUNNING = "Running"
    """It trains on the desired replicas."""
    RESCALING = "Rescaling"
    """It trains, and a change of the replica count is in progress."""
    RECOVERING = "Recovering"
    """A replica was lost, and the next generation has not begun."""
    FAILED = "Failed"
    """It has failed for good, or its program has failed on all replicas that are there."""
    COMPLETE = "Complete"
    """Its program has finished."""


@dataclass(frozen=True)
class JobSummary(Message):
    """A job in a list.

    Args:
        id: the full job id.
        phase: what it does.
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
        goodput: steps at the initial batch size per second; None if it is not measured.
        seconds_left: the predicted seconds until its end; None if unknown, or if it does not train.
    """

    id: str
    phase: JobPhase
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
    goodput: float | None
    seconds_left: float | None


def summarize(
    job_id: str, spec: JobSpec | None, state: Rendezvous, latest: GainReport | None, created_at: float
) -> JobSummary:
    """Return the summary of a job."""
    training = _training(state)
    phase = _phase(state, training)
    steps = spec.scale_invariant_steps if spec is not None else None
    target = steps if steps is not None else latest.target if latest is not None else None
    goodput = latest.gain / latest.step_time if latest is not None and latest.step_time > 0 else None
    seconds_left = None
    if latest is not None and target is not None and goodput and training:
        seconds_left = max(target - latest.progress, 0.0) / goodput
    return JobSummary(
        id=job_id,
        phase=phase,
        replicas=training,
        desired=state.desired.replicas if state.desired is not None else None,
        max_replicas=spec.max_replicas if spec is not None else None,
        created_at=created_at,
        generation=state.active.generation if state.active is not None else 0,
        failures=state.failures,
        disruptions=state.disruptions,
        batch_size=spec.batch_size if spec is not None else None,
        target=target,
        latest=latest,
        goodput=goodput,
        seconds_left=seconds_left if seconds_left is not None and seconds_left < MAX_SECONDS_LEFT else None,
    )


def _training(state: Rendezvous) -> int:
    if state.active is None or state.complete:
        return 0
    return sum(
        registration.state is ReplicaState.RUNNING and registration.generation == state.active.generation
        for registration in state.replicas.values()
    )


def _phase(state: Rendezvous, training: int) -> JobPhase:
    states = {registration.state for registration in state.replicas.values()}
    if state.complete:
        return JobPhase.COMPLETE
    if states == {ReplicaState.FAILED}:
        return JobPhase.FAILED
    if state.desired is None:
        return JobPhase.QUEUED
    if state.desired.failed:
        return JobPhase.FAILED
    if state.desired.replicas == 0:
        return JobPhase.RESCALING if training else JobPhase.STOPPED
    if state.broken:
        return JobPhase.RECOVERING
    if state.active is None or not training:
        return JobPhase.STARTING
    is_desired = state.active.generation == state.desired.generation
    return JobPhase.RUNNING if is_desired else JobPhase.RESCALING
