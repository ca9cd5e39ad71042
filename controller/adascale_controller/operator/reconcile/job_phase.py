"""The phase of a job: whether it may run, has to stop, is blocked, or has ended.

The pods of a changed template replace the others one by one, where the job can train on fewer. Each is
deleted and leaves as any replica that is lost: the others keep the state of training, and the next pod of its
rank, of the new template, gets the state from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from adascale_controller.formatting import plural
from adascale_controller.job.failures import Failures, find_end
from adascale_controller.job.placement_backoff import FailedPlacement
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, is_program_failure
from adascale_controller.operator.reconcile.failures import failures_of
from adascale_controller.operator.types.conditions import (
    ConditionType,
    condition_of,
)
from adascale_controller.operator.types.kubernetes import seconds
from adascale_controller.operator.types.settings import QUEUE_NAME
from adascale_core import names
from adascale_core.batch.plans import is_valid_replicas
from adascale_core.failures import EXIT_REFUSED
from adascale_core.messages.registration import ReplicaState


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

    phase: JobPhase
    failures: Failures
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
    failures = failures_of(observed)
    finding = _ended(observed, failures) or _blocked(observed) or _stopped(observed)
    if finding is None:
        return Assessment(JobPhase.RUNNABLE, failures)
    phase, reason, message = finding
    return Assessment(phase, failures, reason, message)


def _ended(observed: ObservedJob, failures: Failures) -> _Finding | None:
    job = observed.resource
    for condition_type, phase, default in _END_CONDITIONS:
        condition = condition_of(job.status, condition_type)
        # A job with an invalid spec may be corrected. Any other end is final.
        if condition is not None and condition.status and condition.reason != Reason.INVALID_SPEC:
            return phase, _reason(condition.reason, default), condition.message
    are_gone = observed.view.complete and all(pod.exit is not None for pod in observed.pods)
    if job.recorded_allocation is not None and (observed.finished_pod is not None or are_gone):
        return JobPhase.COMPLETE, Reason.FINISHED, "The program has finished"
    if job.job is None:
        if observed.current_allocation is not None and observed.live_pods:
            return None
        return JobPhase.FAILED, Reason.INVALID_SPEC, job.invalid or ""
    memory = any(pod.exit is not None and pod.exit.reason == "OOMKilled" for pod in observed.pods)
    started_at = seconds(job.status.get("startTime"))
    end = find_end(job.job, failures, started_at, observed.now, out_of_memory=memory)
    return None if end is None else (JobPhase.FAILED, end.reason, str(end))


_END_CONDITIONS = (
    (ConditionType.COMPLETE, JobPhase.COMPLETE, Reason.FINISHED),
    (ConditionType.FAILED, JobPhase.FAILED, Reason.FAILED),
)


def _reason(name: str, default: Reason) -> Reason:
    """Return the reason of a name, which another version may have chosen."""
    return Reason(name) if name in set(Reason) else default


def deadline(observed: ObservedJob) -> float | None:
    """Return when `activeDeadlineSeconds` has passed, in seconds since 1970; None while it does not count."""
    job, started = observed.resource.job, seconds(observed.resource.status.get("startTime"))
    if job is None or job.active_deadline_seconds is None or started is None:
        return None
    return started + job.active_deadline_seconds


def _blocked(observed: ObservedJob) -> _Finding | None:
    job, others = observed.resource, observed.others
    kind, owner, _ = others[0].controller if others else ("", "", "")
    if kind == "Job":
        return (
            JobPhase.BLOCKED,
            Reason.NAME_CONFLICT,
            f"Job {owner}, which an earlier version of the operator has created, has pods with the label "
            f"{names.LABEL_JOB}={job.name}: delete it (kubectl delete job {owner}). Training continues from "
            "the last checkpoint",
        )
    if others:
        return (
            JobPhase.BLOCKED,
            Reason.CLEANING_UP,
            f"Waiting for {plural(len(others), 'pod')} of an earlier AdaScaleJob {job.name} to end "
            f"({others[0].name}{', ...' if len(others) > 1 else ''}); if that was deleted with "
            f"--cascade=orphan, delete the pods: kubectl delete pods --selector {names.LABEL_JOB}={job.name}",
        )
    if observed.service is None:
        return (
            JobPhase.BLOCKED,
            Reason.METRICS_SERVICE_UNAVAILABLE,
            "The metrics service does not answer; running replicas continue",
        )
    return None


def _stopped(observed: ObservedJob) -> _Finding | None:
    job = observed.resource.job
    if job is None:
        # It continues with the pods that it has.
        return JobPhase.BLOCKED, Reason.INVALID_SPEC, observed.resource.invalid or ""
    if job.suspend:
        return JobPhase.STOPPING, Reason.SUSPENDED, "spec.suspend is true"
    if job.replica_limit == 0:
        return JobPhase.STOPPING, Reason.SCALED_TO_ZERO, "spec.replicaLimit is 0"
    return _changed(observed) or _missing_claim(observed) or _held(observed)


def _changed(observed: ObservedJob) -> _Finding | None:
    """Return that the pods are those of another template, or in another queue."""
    what = "spec.template or spec.stepTimeoutSeconds"
    if observed.core is not None or any(pod.is_extra for pod in observed.pods):
        what = "spec.template, spec.stepTimeoutSeconds, spec.opportunistic or the smallest count"
    if observed.outdated_pods:
        check = observed.template_check
        if check is not None and not check.done and observed.training_replicas:
            detail = f": {check.message}" if check.message else ""
            return (
                JobPhase.BLOCKED,
                check.reason or Reason.TEMPLATE_CHANGED,
                f"{what} has changed. The present pods continue to train until a pod of the new template has "
                f"started{detail}",
            )
        if not is_one_by_one(observed):
            return (
                JobPhase.STOPPING,
                Reason.TEMPLATE_CHANGED,
                f"{what} has changed: saving state, then replacing all pods",
            )
    elif any(
        pod.queue != observed.resource.queue_of(extra=pod.is_extra) for pod in observed.live_pods.values()
    ):
        return (
            JobPhase.STOPPING,
            Reason.QUEUE_CHANGED,
            f"The label {QUEUE_NAME} has changed: saving state, then creating the pods again",
        )
    return None


def _missing_claim(observed: ObservedJob) -> _Finding | None:
    claim = observed.claim
    if claim is not None and not claim.exists and not claim.own:
        return (
            JobPhase.BLOCKED if observed.live_pods else JobPhase.STOPPING,
            Reason.VOLUME_NOT_FOUND,
            f"PersistentVolumeClaim {claim.name} not found in namespace {observed.resource.namespace}: "
            "create it, or remove spec.checkpoint.claimName to have the operator create one",
        )
    return None


def _held(observed: ObservedJob) -> _Finding | None:
    """Return that Kueue decides when the job may run."""
    if not observed.is_held:
        return None
    if observed.refusal is not None:
        return JobPhase.QUEUED, observed.refusal.reason, observed.refusal.message
    detail = f": {observed.queue.message}" if observed.queue is not None and observed.queue.message else ""
    queue = observed.resource.queueing.queue
    return JobPhase.QUEUED, Reason.QUEUED, f"Waiting to be admitted by Kueue, in LocalQueue {queue}{detail}"


# -- the pods of a changed template ------------------------------------------------------------------------


def is_one_by_one(observed: ObservedJob) -> bool:
    """Whether the job trains on while its pods are replaced one by one."""
    holds = any(replica.holds for replica in observed.view.replicas)
    fails = any(pod.template == observed.digest and _has_failed(pod) for pod in observed.pods)
    return holds and not fails and _can_spare_one(observed)


def next_pods(observed: ObservedJob, failed_placement: FailedPlacement | None) -> Iterator[Pod]:
    """Yield the pods of another template that are to be replaced now: those that do not run, and one more."""
    outdated, live = observed.outdated_pods, observed.live_pods
    waiting = [pod for pod in outdated if not pod.has_started]
    if waiting or not outdated:
        yield from waiting
    elif _is_settled(observed) and _can_spare_one(observed):
        began = min(pod.created_at for pod in outdated)
        if len(outdated) == len(live) and _has_failed_since(failed_placement, began):
            # The first pod of the new template may be what could not be placed.
            return
        yield outdated[-1]


def _is_settled(observed: ObservedJob) -> bool:
    """Whether all replicas that the job is to have train together, each in the pod of its index."""
    view, training, allocation = observed.view, observed.training, observed.current_allocation
    if training is None or allocation is None:
        return False
    if view.desired != allocation or training.generation != allocation.generation:
        return False
    members, live = training.indices, observed.live_pods
    running = {
        replica.replica
        for replica in view.replicas
        if replica.state is ReplicaState.RUNNING and replica.generation == allocation.generation
    }
    ready = {replica.replica for replica in view.replicas if replica.state is ReplicaState.WAITING}
    is_whole = len(members) == allocation.replicas and set(allocation.indices) == live.keys()
    # A spare that is placed must have started: otherwise those that train would be replaced by such pods.
    starting = {rank for rank, pod in live.items() if pod.is_placed} - members - ready
    return is_whole and running == members and not starting


def _can_spare_one(observed: ObservedJob) -> bool:
    """Whether the job trains on while one of its replicas is replaced."""
    job, allocation = observed.resource.job, observed.current_allocation
    if job is None or allocation is None:
        return False
    fewer = range(job.spec.min_replicas, allocation.replicas)
    return any(is_valid_replicas(job.spec.bounds, count) for count in fewer)


def _has_failed_since(placement: FailedPlacement | None, moment: float) -> bool:
    return placement is not None and placement.until - placement.pause >= moment


def _has_failed(pod: Pod) -> bool:
    """Whether a pod has ended in a way that another one of its template would repeat."""
    end = pod.exit
    if end is None:
        return False
    return is_program_failure(end) or (end.of_worker and end.exit_code == EXIT_REFUSED)
