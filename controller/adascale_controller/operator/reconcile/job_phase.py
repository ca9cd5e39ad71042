"""The phase of a job: whether it may run, has to stop, is blocked, or has ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from adascale_controller.formatting import plural
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import failed_pods
from adascale_controller.operator.reconcile import template_rollout
from adascale_controller.operator.reconcile.failures import (
    count_failures,
    has_permanent_failure,
    has_repeated_failure,
)
from adascale_controller.operator.types.conditions import ConditionType, Reason, condition_of
from adascale_controller.operator.types.workload import ELASTIC_JOB, QUEUE_NAME, extra_name
from adascale_core import names
from adascale_core.failures import FailureCount, describe_exit, failure_cause

LOG_LINES = 20
"""How many lines of the program's output the condition of a failed job holds."""


class JobPhase(Enum):
    """The phases of a job."""

    RUNNABLE = auto()
    """It may have replicas."""
    STOPPING = auto()
    """It may have no replicas. Those that it has save their state and leave."""
    QUEUED = auto()
    """It may have no replicas until Kueue admits its Indexed Job, which is suspended until then."""
    BLOCKED = auto()
    """Nothing can be changed until something else has changed. Its replicas stay."""
    COMPLETE = auto()
    FAILED = auto()


@dataclass(frozen=True)
class Assessment:
    """The phase of a job, and why."""

    phase: JobPhase
    failures: FailureCount
    # of the condition that shows the phase
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
    finding = (
        _between_jobs(observed) or _ended(observed, failures) or _blocked(observed) or _stopped(observed)
    )
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
    if any(each.complete for each in observed.own_indexed_jobs) or (
        indexed_job is not None and observed.finished_beside_others
    ):
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
        return JobPhase.FAILED, Reason.BACKOFF_LIMIT_EXCEEDED, _with_cause(message, observed)
    restarts = observed.service.restarts_without_progress if observed.service is not None else 0
    if job.job is not None and restarts > job.job.max_restarts_without_progress:
        message = (
            f"The trainers were lost {plural(restarts, 'time')} without a step in between, "
            f"maxRestartsWithoutProgress ({job.job.max_restarts_without_progress}) exceeded"
        )
        return JobPhase.FAILED, Reason.NO_PROGRESS, f"{message}{_last_losses(observed)}"
    if has_permanent_failure(observed):
        message = "The program is not restarted, because it would fail again"
        return JobPhase.FAILED, Reason.PROGRAM_FAILED, _with_cause(message, observed)
    if has_repeated_failure(observed):
        message = "The program has failed twice in the same way before its first step"
        return JobPhase.FAILED, Reason.PROGRAM_FAILED, _with_cause(message, observed)
    return None


_END_CONDITIONS = (
    (ConditionType.COMPLETE, JobPhase.COMPLETE, Reason.FINISHED),
    (ConditionType.FAILED, JobPhase.FAILED, Reason.FAILED),
)


def _reason(name: str, default: Reason) -> Reason:
    """Return the reason of a name, which another version or the Job controller may have chosen."""
    return Reason(name) if name in set(Reason) else default


def _with_cause(message: str, observed: ObservedJob) -> str:
    """Return the error of the program, what follows from it, and the program's last output."""
    failure = last_failure(observed)
    return ". ".join(filter(None, (failure_cause(failure), message, failure)))


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


def _between_jobs(observed: ObservedJob) -> _Finding | None:
    """Whether the next Indexed Job has to be created before anything else: nothing controls the pods."""
    if template_rollout.is_between_jobs(observed):
        return JobPhase.BLOCKED, Reason.TEMPLATE_CHANGED, _ONE_BY_ONE
    return None


_CHANGED = "spec.template or spec.stepTimeoutSeconds has changed"
_ONE_BY_ONE = f"{_CHANGED}: pods of the new template replace the others one by one, while these train"


def _blocked(observed: ObservedJob) -> _Finding | None:
    job, indexed_job, extra_job = observed.resource, observed.indexed_job, observed.extra_job
    for name, other in ((job.name, indexed_job), (extra_name(job.name), extra_job)):
        if other is not None and other.owner not in (None, job.uid) and other.of not in (None, job.name):
            holds = " and has its extra pods" if other.first else ""
            return (
                JobPhase.BLOCKED,
                Reason.NAME_CONFLICT,
                f"Job {name} exists and belongs to AdaScaleJob {other.of}{holds}: rename one of the two "
                "AdaScaleJobs",
            )
    if extra_job is not None and extra_job.owner != job.uid:
        name = extra_name(job.name)
        return (
            JobPhase.BLOCKED,
            Reason.CLEANING_UP if extra_job.owner else Reason.NAME_CONFLICT,
            f"Job {name} exists and does not belong to this AdaScaleJob, whose extra pods would have that "
            f"name: delete it (kubectl delete job {name}), or rename the AdaScaleJob",
        )
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
            f"Waiting for Job {job.name} of an earlier AdaScaleJob to be deleted; if that was deleted with "
            f"--cascade=orphan, delete the Job: kubectl delete job {job.name}",
        )
    left = [pod.name for pod in observed.pods if pod.exit is None]
    if extra_job is not None:
        left = [pod.name for pod in observed.leaving if pod.rank < extra_job.first]
    if indexed_job is None and left:
        return (
            JobPhase.BLOCKED,
            Reason.CLEANING_UP,
            f"Waiting for {plural(len(left), 'pod')} of an earlier Job {job.name} to end ({left[0]}"
            f"{', ...' if len(left) > 1 else ''}); if that was deleted with --cascade=orphan, delete the "
            f"pods: kubectl delete pods --selector {names.LABEL_JOB}={job.name}",
        )
    if observed.service is None:
        return (
            JobPhase.BLOCKED,
            Reason.METRICS_SERVICE_UNAVAILABLE,
            "The metrics service does not answer; running replicas continue",
        )
    if indexed_job is not None and indexed_job.leaves_pods:
        return JobPhase.BLOCKED, Reason.TEMPLATE_CHANGED, _ONE_BY_ONE
    is_gone = indexed_job is None and extra_job is not None and extra_job.deleting
    if is_gone or (indexed_job is not None and indexed_job.deleting):
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
    what = "spec.template or spec.stepTimeoutSeconds"
    has_changed = any(each.digest != observed.digest for each in observed.own_indexed_jobs)
    if has_changed:
        if observed.core is not None or observed.own_extra_job is not None:
            what = "spec.template, spec.stepTimeoutSeconds, spec.opportunistic or the smallest count"
        check = observed.template_check
        if check is not None and not check.done and observed.training_replicas:
            detail = f": {check.message}" if check.message else ""
            return (
                JobPhase.BLOCKED,
                check.reason or Reason.TEMPLATE_CHANGED,
                f"{what} has changed. The present pods continue to train until a pod of the new template has "
                f"started{detail}",
            )
        if template_rollout.begins(observed):
            return JobPhase.BLOCKED, Reason.TEMPLATE_CHANGED, _ONE_BY_ONE
    if has_changed or template_rollout.is_given_up(observed):
        return (
            JobPhase.STOPPING,
            Reason.TEMPLATE_CHANGED,
            f"{what} has changed: saving state, then replacing all pods",
        )
    if indexed_job is not None and indexed_job.queue_request != observed.resource.queueing.request:
        return (
            JobPhase.STOPPING,
            Reason.QUEUE_CHANGED,
            f"The label {QUEUE_NAME} or the annotation {ELASTIC_JOB} has changed: saving state, then "
            "creating the Job again",
        )
    return _missing_claim(observed) or _held(observed)


def _missing_claim(observed: ObservedJob) -> _Finding | None:
    claim, indexed_job = observed.claim, observed.own_indexed_job
    if claim is not None and not claim.exists and not claim.own:
        return (
            JobPhase.STOPPING if indexed_job is None else JobPhase.BLOCKED,
            Reason.VOLUME_NOT_FOUND,
            f"PersistentVolumeClaim {claim.name} not found in namespace {observed.resource.namespace}: "
            "create it, or remove spec.checkpoint.claimName to have the operator create one",
        )
    return None


def _held(observed: ObservedJob) -> _Finding | None:
    """Return that others decide when the job may run: Kueue, or who has suspended its Indexed Job."""
    job, indexed_job = observed.resource, observed.own_indexed_job
    detail = f": {observed.queue.message}" if observed.queue is not None and observed.queue.message else ""
    if indexed_job is None:
        queue = job.queueing.queue
        if queue is None:
            return None
        if observed.refusal is not None and not observed.refusal.extra:
            return JobPhase.QUEUED, observed.refusal.problem.reason, observed.refusal.problem.message
        return JobPhase.QUEUED, Reason.QUEUED, f"Waiting to be admitted by Kueue, in LocalQueue {queue}"
    if not observed.is_held:
        return None
    if indexed_job.queue is not None:
        message = f"Waiting to be admitted by Kueue, in LocalQueue {indexed_job.queue}{detail}"
        return JobPhase.QUEUED, Reason.QUEUED, message
    return (
        JobPhase.STOPPING,
        Reason.JOB_SUSPENDED,
        f"spec.suspend of Job {job.name} was set, and not by the operator: set it to false to continue. If "
        f"Kueue manages jobs without a queue name here, set the label {QUEUE_NAME} of the AdaScaleJob",
    )
