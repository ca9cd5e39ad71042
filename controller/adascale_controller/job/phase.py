"""The phase of a job, and what it does in words: the same in conditions, Events and the output of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from adascale_controller.formatting import plural
from adascale_controller.job.failures import Failures
from adascale_controller.job.reasons import Reason
from adascale_controller.schema import JobDefinition
from adascale_core.decision.deadline import Feasibility
from adascale_core.failures import EXIT_PEER_LOST, describe_exit
from adascale_core.messages.registration import ReplicaState
from adascale_core.views.jobs import JobView


class JobPhase(Enum):
    """The phases of a job."""

    RUNNABLE = auto()
    """It may have replicas."""
    STOPPING = auto()
    """It may have no replicas. Those that it has save their state and leave."""
    QUEUED = auto()
    """It may have no replicas until Kueue admits the pods of its smallest count."""
    BLOCKED = auto()
    """Nothing can be changed until something else has changed. Its replicas stay."""
    COMPLETE = auto()
    FAILED = auto()


@dataclass(frozen=True)
class Assessment:
    """The phase of a job, and why."""

    failures: Failures
    phase: JobPhase
    # of the condition that shows the phase
    reason: Reason = Reason.TRAINING
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job is complete or failed."""
        return self.phase in {JobPhase.COMPLETE, JobPhase.FAILED}


Explanation = tuple[Reason, str]
"""A reason and its message."""


def requested_stop(job: JobDefinition) -> Explanation | None:
    """Return why the spec of a job lets it have no replicas now; None if it may have some."""
    if job.spec.suspend:
        return Reason.SUSPENDED, "spec.suspend is true"
    if job.spec.replica_limit == 0:
        return Reason.SCALED_TO_ZERO, "spec.replicaLimit is 0"
    return None


def replica_limit_problem(job: JobDefinition) -> str | None:
    """Return a message about a limit below the smallest valid count. None if there is no such limit."""
    limit, fewest = job.spec.replica_limit, job.core_replicas
    if not limit or limit >= fewest:
        return None
    return (
        f"spec.replicaLimit is {limit}, but the job needs at least {plural(fewest, 'replica')}, so the limit "
        f"is {fewest}: raise spec.replicaLimit to {fewest} or more, lower spec.minReplicas, or set "
        "spec.replicaLimit to 0 to stop the job"
    )


def describe_start(job: JobDefinition, replicas: int, failures: int, *, has_trained: bool) -> Explanation:
    """Return why a job does not train yet whose replicas start."""
    if failures:
        message = (
            f"Restarting after failure {failures} of the program (backoffLimit {job.spec.backoff_limit})"
        )
        return Reason.PROGRAM_FAILED, message
    if has_trained:
        return Reason.REENTERING, f"Resuming on {plural(replicas, 'replica')}"
    return Reason.STARTING, f"Starting on {plural(replicas, 'replica')}"


def describe_training(replicas: int, stall: str | None) -> Explanation:
    """Return on how many replicas a job trains, and where they are while no step ends."""
    message = f"Training on {plural(replicas, 'replica')}"
    if stall is not None:
        return Reason.STALLED, f"{message}, but no step ends: {stall}"
    return Reason.TRAINING, message


A_LOSS = "A replica was lost"
"""What is said of a loss before it is known which trainer was lost."""


def describe_loss(view: JobView) -> str | None:
    """Return which trainer was lost, and how; None before its agent has registered it, often after others."""
    earliest = view.active.generation if view.broken and view.active else 0
    for replica in sorted(view.replicas, key=lambda replica: -replica.generation):
        code, is_new = replica.exit_code, replica.generation >= earliest
        if replica.state is ReplicaState.LOST and is_new and code is not None and code != EXIT_PEER_LOST:
            return f"The trainer of replica {replica.replica} was lost ({describe_exit(code)})"
    return None


def describe_change(before: int, after: int, reason: str) -> str:
    """Return that a job gets another replica count, and why."""
    return f"Rescaling {before} -> {after}: {reason}"


# -- whether `completionDeadlineSeconds` is met, which is a target and ends no job ---------------------------


def deadline_target(job: JobDefinition) -> str:
    """Return the deadline of a job in words."""
    return f"completionDeadlineSeconds ({job.spec.completion_deadline_seconds})"


def describe_completion(job: JobDefinition, *, in_time: bool) -> Explanation:
    """Return whether an ended job has met its deadline."""
    if in_time:
        return Reason.DEADLINE_MET, f"Complete within {deadline_target(job)}"
    return Reason.DEADLINE_MISSED, f"Not complete within {deadline_target(job)}"


def describe_feasibility(
    job: JobDefinition, feasibility: Feasibility | None, *, has_passed: bool, limit: int | None
) -> Explanation | None:
    """Return whether a job that has at most `limit` replicas can meet its deadline.

    None as long as nothing is predicted.
    """
    if has_passed:
        reason, message = describe_completion(job, in_time=False)
        return reason, f"{message}; it goes on"
    if feasibility is None:
        return None
    predicted = f"{deadline_target(job)}, as predicted from {feasibility.source}"
    if feasibility.count is None:
        return Reason.NO_COUNT_SUFFICES, f"No replica count meets {predicted}"
    counts = plural(feasibility.count, "replica")
    if limit is not None and feasibility.count > limit:
        message = f"{counts} or more would meet {predicted}, and it has at most {limit}"
        return Reason.NO_COUNT_SUFFICES, message
    return Reason.COUNT_SUFFICES, f"{counts} or more, from now on, meet {predicted}"
