"""The phase of a job: whether it may run, has to stop, is blocked, or has ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from adascale_controller.formatting import plural
from adascale_controller.operator.observe.failed_pods import failed_pods
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.reconcile.failures import (
    count_failures,
    has_permanent_failure,
    has_repeated_failure,
)
from adascale_controller.operator.types.conditions import ConditionType, Reason, condition_of
from adascale_core.failures.count import FailureCount
from adascale_core.failures.exit_codes import describe_exit

LOG_LINES = 20
"""How many lines of the program's output the condition of a failed job holds."""


class JobPhase(Enum):
    """The phases of a job."""

    RUNNABLE = auto()
    """It may have replicas."""
    STOPPING = auto()
    """It may have no replicas. Those that it has save their state and leave."""
    BLOCKED = auto()
    """Nothing can be changed until something else has changed. Its replicas stay."""
    COMPLETE = auto()
    FAILED = auto()


@dataclass(frozen=True)
class Assessment:
    """The phase of a job, and why.

    Args:
        phase: the phase.
        failures: the failures of its program.
        reason, message: those of the condition that shows the phase.
    """

    phase: JobPhase
    failures: FailureCount
    reason: Reason = Reason.TRAINING
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job is complete or failed."""
        return self.phase in {JobPhase.COMPLETE, JobPhase.FAILED}


_Finding = tuple[JobPhase, Reason, str]


def assess(observed: ObservedJob) -> Assessment:
    """Return the phase of a job."""
    failures = count_failures(observed)
    finding = _ended(observed, failures) or _blocked(observed) or _stopped(observed)
    if finding is None:
        return Assessment(JobPhase.RUNNABLE, failures)
    phase, reason, message = finding
    return Assessment(phase, failures, reason, message)


def _ended(observed: ObservedJob, failures: FailureCount) -> _Finding | None:
    job, indexed_job = observed.resource, observed.own_indexed_job
    for condition_type, phase, default in _END_CONDITIONS:
        condition = condition_of(job.status, condition_type)
        # A job with an invalid spec may be corrected. Any other end is final.
        if condition is not None and condition.status and condition.reason != Reason.INVALID_SPEC:
            return phase, _reason(condition.reason, default), condition.message
    if indexed_job is not None and indexed_job.complete:
        return JobPhase.COMPLETE, Reason.FINISHED, "The program has finished"
    if indexed_job is not None and indexed_job.failed is not None:
        job_reason, message = indexed_job.failed
        reason = _reason(job_reason, Reason.FAILED)
        if reason is Reason.DEADLINE_EXCEEDED and job.job is not None:
            message = f"activeDeadlineSeconds ({job.job.active_deadline_seconds}) exceeded"
        return JobPhase.FAILED, reason, message
    if job.job is None and (observed.current_allocation is None or observed.indexed_job is None):
        return JobPhase.FAILED, Reason.INVALID_SPEC, job.invalid or ""
    limit = job.job.backoff_limit if job.job is not None else None
    if limit is not None and failures.exceeds(limit):
        message = f"The program has failed {plural(failures.count, 'time')}, backoffLimit ({limit}) exceeded"
        return (
            JobPhase.FAILED,
            Reason.BACKOFF_LIMIT_EXCEEDED,
            f"{message}. {last_failure(observed)}".rstrip(),
        )
    restarts = observed.service.restarts_without_progress if observed.service is not None else 0
    if job.job is not None and restarts > job.job.max_restarts_without_progress:
        message = (
            f"The trainers were lost {plural(restarts, 'time')} without a step in between, "
            f"maxRestartsWithoutProgress ({job.job.max_restarts_without_progress}) exceeded"
        )
        return JobPhase.FAILED, Reason.NO_PROGRESS, f"{message}{_last_losses(observed)}"
    if has_permanent_failure(observed):
        message = "The program is not restarted, because it would fail again"
        return JobPhase.FAILED, Reason.PROGRAM_FAILED, f"{message}. {last_failure(observed)}".rstrip()
    if has_repeated_failure(observed):
        message = "The program has failed twice in the same way before its first step"
        return JobPhase.FAILED, Reason.PROGRAM_FAILED, f"{message}. {last_failure(observed)}".rstrip()
    return None


_END_CONDITIONS = (
    (ConditionType.COMPLETE, JobPhase.COMPLETE, Reason.FINISHED),
    (ConditionType.FAILED, JobPhase.FAILED, Reason.FAILED),
)


def _reason(name: str, default: Reason) -> Reason:
    """Return the reason of a name, which another version or the Job controller may have chosen."""
    return Reason(name) if name in set(Reason) else default


def last_failure(observed: ObservedJob) -> str:
    """Return a description of the program's latest failure with the last lines of its output.

    Empty if no pod holds a claim.
    """
    pod = next(reversed(failed_pods(observed.own_pods)), None)
    if pod is None or pod.exit is None or pod.exit.exit_code is None:
        return ""
    text = f"Replica {pod.rank} (pod {pod.name}) failed: {describe_exit(pod.exit.exit_code)}"
    log = pod.exit.termination.log if pod.exit.termination is not None else pod.exit.message
    lines = log.rstrip().splitlines()[-LOG_LINES:]
    return f"{text}:\n" + "\n".join(lines) if lines else text


def _last_losses(observed: ObservedJob) -> str:
    """Return how trainers have ended, in brackets; empty if no replica has registered it."""
    replicas = observed.service.replicas if observed.service is not None else ()
    codes = {replica.exit_code for replica in replicas if replica.exit_code is not None}
    memory = any(pod.exit is not None and pod.exit.reason == "OOMKilled" for pod in observed.own_pods)
    ends = [*(["OOMKilled"] if memory else []), *map(describe_exit, sorted(codes))]
    return f" ({', '.join(ends)})" if ends else ""


def _blocked(observed: ObservedJob) -> _Finding | None:
    job, indexed_job = observed.resource, observed.indexed_job
    if indexed_job is not None and indexed_job.owner != job.uid:
        if indexed_job.owner is None and not indexed_job.deleting:
            return (
                JobPhase.BLOCKED,
                Reason.NAME_CONFLICT,
                f"Job {job.name} exists and does not belong to this AdaScaleJob: delete it, or rename the "
                "AdaScaleJob",
            )
        return (
            JobPhase.BLOCKED,
            Reason.CLEANING_UP,
            f"Waiting for an earlier AdaScaleJob {job.name} to be deleted",
        )
    if indexed_job is None and any(pod.exit is None for pod in observed.pods):
        return (
            JobPhase.BLOCKED,
            Reason.CLEANING_UP,
            f"Waiting for the pods of an earlier Job {job.name} to end",
        )
    if observed.service is None:
        return (
            JobPhase.BLOCKED,
            Reason.METRICS_SERVICE_UNAVAILABLE,
            "The metrics service does not answer; running replicas continue",
        )
    if indexed_job is not None and indexed_job.deleting:
        return JobPhase.STOPPING, Reason.TEMPLATE_CHANGED, "Waiting for the old Job to be deleted"
    return None


def _stopped(observed: ObservedJob) -> _Finding | None:
    job = observed.resource.job
    if job is None:
        # It continues with the spec that it had.
        return JobPhase.BLOCKED, Reason.INVALID_SPEC, observed.resource.invalid or ""
    if job.suspend:
        return JobPhase.STOPPING, Reason.SUSPENDED, "spec.suspend is true"
    if job.replica_limit == 0:
        return JobPhase.STOPPING, Reason.SCALED_TO_ZERO, "spec.replicaLimit is 0"
    indexed_job = observed.own_indexed_job
    if indexed_job is not None and indexed_job.digest != observed.digest:
        return (
            JobPhase.STOPPING,
            Reason.TEMPLATE_CHANGED,
            "spec.template or spec.stepTimeoutSeconds has changed: saving state, then replacing all pods",
        )
    claim = observed.claim
    if claim is not None and not claim.exists and not claim.own:
        return (
            JobPhase.STOPPING if indexed_job is None else JobPhase.BLOCKED,
            Reason.VOLUME_NOT_FOUND,
            f"PersistentVolumeClaim {claim.name} not found in namespace {observed.resource.namespace}: "
            "create it, or remove spec.checkpoint.claimName to have the operator create one",
        )
    return None
