"""The phase of a job: whether it may run, has to stop, is blocked, or has ended.

The pods of a changed template replace the others one by one. A further pod, of the new template, joins as a
spare and gets the state of training. Then the last pod of the old template is deleted, and leaves as any
replica that is lost: the spare takes its place, and the next pod of its rank is the next spare. Where there
is no room for a further pod, a pod leaves before the next one joins, if the job can train on fewer replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final

from adascale_controller.formatting import plural
from adascale_controller.job.failures import Failures, find_end, restart_pause
from adascale_controller.job.phase import Assessment, JobPhase, requested_stop
from adascale_controller.job.placement_backoff import FailedPlacement
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, is_program_failure, program_failures
from adascale_controller.operator.types.kubernetes import ConditionType, condition_of, seconds
from adascale_controller.operator.types.settings import QUEUE_NAME
from adascale_core import names
from adascale_core.batch.plans import is_valid_replicas
from adascale_core.failures import EXIT_REFUSED, FailureCount
from adascale_core.messages.registration import ReplicaState

LONG_LIFE: Final = 600.0
"""Seconds after which the end of a pod does not delay its replacement."""
FIRST_PAUSE: Final = 10.0
"""Seconds from the end of a pod to its replacement, as of a Job. They double with each further end."""
MAX_PAUSE: Final = 600.0
"""The longest such pause, in seconds."""


def read_failures(status: Mapping[str, Any]) -> FailureCount:
    """Return the failures recorded in a status."""
    attempts = status.get("attempts") or {}
    return FailureCount(
        status.get("failures", 0), attempts.get("failedGeneration", 0), attempts.get("falseStarts", 0)
    )


def failures_of(observed: ObservedJob) -> Failures:
    """Return the failures of a job, from its status and its pods."""
    recorded, job = read_failures(observed.resource.status), observed.resource.job
    if not observed.program_finished:
        recorded = recorded.with_generations(_registered_failures(observed))
    return Failures(
        recorded,
        program_failures(observed.pods),
        observed.service,
        observed.current_allocation,
        # A suspended job has no spares, but its pods may have been spares.
        max(observed.spares, job.spec.spare_replicas if job is not None else 0),
        finished=observed.program_finished,
    )


def _registered_failures(observed: ObservedJob) -> set[int]:
    """Return the generations in which agents have registered a failure of the program, and have no pod."""
    if observed.resource.recorded_allocation is None:
        # They may be those of an earlier job of this name.
        return set()
    ranks, replicas = {pod.rank for pod in observed.pods}, observed.view.replicas
    failed = (each for each in replicas if each.state is ReplicaState.FAILED and each.replica not in ranks)
    return {each.generation for each in failed}


def is_lost(pod: Pod, now: float) -> bool:
    """Whether a pod was ended from outside, so that its replacement may start at once.

    A pod that was killed or ran out of memory soon after its start is not lost: its replacement may end the
    same way.
    """
    if pod.exit is None or pod.phase != "Failed" or is_program_failure(pod.exit):
        return False
    return pod.exit.disruption or pod.deletion_deadline is not None or now > pod.created_at + LONG_LIFE


def replaced_at(pods: Sequence[Pod], now: float) -> float:
    """Return when another pod of a replica may be created after these, in the order of their attempts."""
    end = pods[-1].exit if pods else None
    if end is None or is_lost(pods[-1], now):
        return now
    number = sum(not is_lost(pod, now) for pod in pods)
    return (end.ended_at or pods[-1].created_at) + restart_pause(number, FIRST_PAUSE, MAX_PAUSE)


ROOM_TIMEOUT = 60.0
"""Seconds for which a pod of a changed template waits for room beside the others."""
_WITHOUT_ROOM = frozenset({Reason.UNSCHEDULABLE, Reason.QUEUED})


_Finding = tuple[JobPhase, Reason, str]


def assess(observed: ObservedJob) -> Assessment:
    """Return the phase of a job."""
    failures = failures_of(observed)
    finding = _ended(observed, failures) or _blocked(observed) or _stopped(observed)
    return Assessment(failures, *(finding or (JobPhase.RUNNABLE, Reason.TRAINING, "")))


def _ended(observed: ObservedJob, failures: Failures) -> _Finding | None:
    job = observed.resource
    for condition_type, phase, default in END_CONDITIONS:
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


END_CONDITIONS = (
    (ConditionType.COMPLETE, JobPhase.COMPLETE, Reason.FINISHED),
    (ConditionType.FAILED, JobPhase.FAILED, Reason.FAILED),
)


def _reason(name: str, default: Reason) -> Reason:
    """Return the reason of a name, which another version may have chosen."""
    return Reason(name) if name in set(Reason) else default


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
    if (stop := requested_stop(job)) is not None:
        return JobPhase.STOPPING, *stop
    return _changed(observed) or _missing_claim(observed) or _held(observed)


def changed_parts(observed: ObservedJob) -> str:
    """Return what may have changed since outdated pods were created."""
    if observed.core is not None or any(pod.is_extra or pod.awaits_gang for pod in observed.pods):
        return (
            "spec.template, spec.stepTimeoutSeconds, spec.opportunistic, the smallest count or the PodGroup"
        )
    return "spec.template or spec.stepTimeoutSeconds"


def _changed(observed: ObservedJob) -> _Finding | None:
    """Return that the pods are those of another template, or in another queue."""
    if observed.outdated_pods:
        if not _is_one_by_one(observed):
            return (
                JobPhase.STOPPING,
                Reason.TEMPLATE_CHANGED,
                f"{changed_parts(observed)} has changed: saving state, then replacing all pods",
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


def replacement_spares(observed: ObservedJob, ranks: range) -> int:
    """Return the number of spares beyond those of the spec while pods of these ranks are replaced."""
    if not _may_have_spares(observed):
        return 0
    active = observed.view.active
    members = active.indices if active is not None else frozenset()
    # The further pod stays until the others have joined. A pod that was deleted may still be a member.
    joined = (members | _ready(observed)) & observed.live_pods.keys()
    is_left = _has_further_pod(observed) and not joined.issuperset(ranks)
    return int(is_left or any(pod.rank in ranks for pod in observed.outdated_pods))


def _has_further_pod(observed: ObservedJob) -> bool:
    job, allocation = observed.resource.job, observed.current_allocation
    return job is not None and allocation is not None and allocation.spares > job.spec.spare_replicas


def _is_one_by_one(observed: ObservedJob) -> bool:
    """Whether the job trains on while its pods are replaced one by one."""
    holds = any(replica.holds for replica in observed.view.replicas)
    fails = any(pod.template == observed.digest and _has_failed(pod) for pod in observed.pods)
    may_join_before = _may_have_spares(observed) and not _lacks_room(observed)
    return holds and not fails and (may_join_before or _can_spare_one(observed))


def next_pods(observed: ObservedJob, failed_placement: FailedPlacement | None) -> Iterator[Pod]:
    """Yield the pods of another template that are to be replaced now: those that do not run, and one more."""
    outdated = observed.outdated_pods
    waiting = [pod for pod in outdated if not pod.has_started]
    if not outdated and _has_further_pod(observed):
        outdated = [pod for _, pod in sorted(observed.live_pods.items())]
    if waiting or not outdated:
        yield from waiting
        return
    failed_at = failed_placement.until - failed_placement.pause if failed_placement is not None else -inf
    # What could not be placed may be the first pod of the new template in the place of an old one.
    without_spare = _lacks_room(observed) and _can_spare_one(observed) and failed_at < _began_at(observed)
    if _is_settled(observed) and (_has_spares(observed) or without_spare):
        yield outdated[-1]


def room_due(observed: ObservedJob) -> float:
    """Return until when pods of a changed template wait for room, in seconds since 1970."""
    return min(_room_timeouts(observed), default=inf) if observed.outdated_pods else inf


def _room_timeouts(observed: ObservedJob) -> list[float]:
    """Return until when each pod of the new template that has no room waits for it."""
    problems = ((pod, pod.problem) for pod in _new_pods(observed))
    return [
        pod.created_at + ROOM_TIMEOUT
        for pod, problem in problems
        if problem is not None and problem.reason in _WITHOUT_ROOM
    ]


def _began_at(observed: ObservedJob) -> float:
    """Return when the first pod of a changed template was created, in seconds since 1970."""
    return min((pod.created_at for pod in _new_pods(observed)), default=observed.now)


def _new_pods(observed: ObservedJob) -> list[Pod]:
    outdated = observed.outdated_pods
    return [pod for pod in observed.live_pods.values() if pod not in outdated]


def _may_have_spares(observed: ObservedJob) -> bool:
    job = observed.resource.job
    if job is None or job.spec.processes_per_replica is not None:
        # Spares of replicas of several processes were not tried.
        return False
    return job.spec.max_replicas + job.spec.spare_replicas < names.MAX_REPLICAS


def _lacks_room(observed: ObservedJob) -> bool:
    """Whether there is no room for another pod of the new template beside the others."""
    if not _may_have_spares(observed):
        return True
    allocation, refusal = observed.current_allocation, observed.refusal
    lacks_pods = allocation is not None and not observed.live_pods.keys() >= set(allocation.indices)
    # Without a pod to create, the refusal is that of an earlier time.
    if lacks_pods and refusal is not None and refusal.reason is Reason.QUOTA_EXCEEDED:
        return True
    return any(observed.now >= timeout for timeout in _room_timeouts(observed))


def _is_settled(observed: ObservedJob) -> bool:
    """Whether all replicas that the job is to have train together, and all other pods on nodes are ready.

    The agent of a pod that was deleted or killed counts as running until it has registered its end.
    """
    view, training, allocation = observed.view, observed.training, observed.current_allocation
    if training is None or allocation is None or view.desired != allocation:
        return False
    running = {
        replica.replica
        for replica in view.replicas
        if replica.state is ReplicaState.RUNNING and replica.generation == allocation.generation
    }
    live = observed.live_pods
    have_pods = all(rank in live and live[rank].has_started for rank in training.indices)
    placed = {rank for rank, pod in live.items() if pod.node is not None}
    are_ready = placed <= training.indices | _ready(observed)
    return have_pods and len(running) == allocation.replicas and running == training.indices and are_ready


def _has_spares(observed: ObservedJob) -> bool:
    """Whether all spares of the allocation wait, if it has any."""
    allocation = observed.current_allocation
    ready = _ready(observed) & observed.live_pods.keys()
    return allocation is not None and 0 < allocation.spares <= len(ready)


def _ready(observed: ObservedJob) -> set[int]:
    replicas = observed.view.replicas
    return {replica.replica for replica in replicas if replica.state is ReplicaState.WAITING}


def _can_spare_one(observed: ObservedJob) -> bool:
    """Whether the job trains on while one of its replicas is replaced."""
    job, allocation = observed.resource.job, observed.current_allocation
    if job is None or allocation is None:
        return False
    fewer = range(job.spec.min_replicas, allocation.replicas)
    return any(is_valid_replicas(job.declaration.bounds, count) for count in fewer)


def _has_failed(pod: Pod) -> bool:
    """Whether a pod has ended in a way that another one of its template would repeat."""
    end = pod.exit
    if end is None:
        return False
    return is_program_failure(end) or (end.of_worker and end.exit_code == EXIT_REFUSED)
