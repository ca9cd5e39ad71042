"""The actions for one job, from its observed state and its replica count, and when they are due."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Final

from adascale_controller.failing_counts import FailingCount
from adascale_controller.operator.observe.observed_job import IndexedJob, ObservedJob
from adascale_controller.operator.observe.pods import END_DEADLINE, Pod
from adascale_controller.operator.reconcile import template_rollout
from adascale_controller.operator.reconcile.events import container_runs_on, events_of, has_new_bounds
from adascale_controller.operator.reconcile.failures import LONG_LIFE, is_lost
from adascale_controller.operator.reconcile.job_phase import Assessment, JobPhase
from adascale_controller.operator.reconcile.status import ScheduledJob, is_urgent, own_fields, status_of
from adascale_controller.operator.types.actions import (
    Actions,
    CapacityRequest,
    Event,
    FailedPlacement,
    Status,
)
from adascale_controller.operator.types.conditions import Reason
from adascale_controller.operator.types.kubernetes import seconds
from adascale_core.batch.plans import valid_replicas
from adascale_core.decision.decide import Decision
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.views.jobs import JobView

TERMINATION_OVERDUE = 5.0
"""Seconds after its deletion deadline at which a pod is deleted by force."""
GATE_TIMEOUT: Final = 5.0
"""Seconds from the creation of a pod until its Job is changed for it the first time."""
MAX_GATE_PAUSE: Final = 600.0
"""Seconds between two such changes at most. They double, because others may gate the pod too."""
ADMISSION_TIME: Final = 10.0
"""Seconds for which extra pods that Kueue has just admitted are kept: the next decision counts them."""


def reconcile(
    observed: ObservedJob,
    assessment: Assessment,
    decision: Decision | None = None,
    failed_placement: FailedPlacement | None = None,
    failing_count: FailingCount | None = None,
    capacity_request: CapacityRequest | None = None,
) -> Actions:
    """Return the actions for one job."""
    if belongs_to_predecessor(observed):
        return _deregister_predecessor(observed, assessment)
    assessment = _with_accelerator(observed, assessment, decision)
    allocation = _allocation(observed, assessment, decision)
    accelerator = decision.accelerator if decision is not None else None
    scheduled = ScheduledJob(
        assessment,
        allocation,
        reason=decision.reason if decision is not None else "",
        changed=allocation != observed.resource.recorded_allocation,
        failed_placement=failed_placement,
        failing_count=failing_count,
        accelerator=accelerator,
        capacity_request=capacity_request,
        feasibility=decision.feasibility if decision is not None else None,
    )
    status = status_of(observed, scheduled)
    parallelism, extra = _sizes(observed, assessment, allocation)
    indexed_job, claim = observed.own_indexed_job, observed.claim
    runnable = assessment.phase is JobPhase.RUNNABLE
    queued = assessment.phase is JobPhase.QUEUED
    adopts = template_rollout.is_between_jobs(observed) and allocation is not None
    if adopts and allocation is not None:
        parallelism = allocation.indices.stop
    creates = observed.indexed_job is None and (runnable or queued or adopts) and bool(parallelism)
    # The Job controller has to delete pods with another owner: the garbage collector does not with the Job.
    deletes = (
        parallelism == 0
        and _is_deleted_to_stop(observed, assessment)
        and not any(pod.outlives_controller and pod.exit is None for pod in observed.own_pods)
    )
    deletes |= _queues_again(observed, assessment)
    deadline = _active_deadline(observed, assessment)
    hands_over = assessment.phase is JobPhase.BLOCKED and template_rollout.begins(observed)
    resizes = indexed_job is not None and not deletes and _differs(observed, parallelism, deadline)
    required = accelerator.type if accelerator is not None and accelerator.required else None
    if adopts:
        required = next((pod.accelerator for pod in observed.pods if pod.exit is None), None)
    return Actions(
        status=status,
        status_is_urgent=is_urgent(observed.resource.status, status),
        status_changed=own_fields(observed.resource.status) != status,
        declare=_declaration(observed, assessment),
        allocate=allocation if _is_due(observed, assessment, allocation) else None,
        create_claim=creates and claim is not None and claim.own and not claim.exists,
        create_indexed_job=parallelism if creates else None,
        accelerator=required,
        resize=parallelism if resizes else None,
        active_deadline_seconds=deadline,
        delete_indexed_job=indexed_job is not None and deletes,
        create_extra_job=extra if extra and runnable and _may_create_extra_job(observed) else None,
        resize_extra_job=(extra or 0) if _resizes_extra_job(observed, assessment, extra) else None,
        delete_extra_job=_deletes_extra_job(observed, assessment, extra),
        delete_pods=tuple(
            dict.fromkeys((*_overdue_pods(observed), *_deleted_ended_pods(observed), *_lost_pods(observed)))
        ),
        end_pods=tuple(_pods_without_worker(observed)),
        release_pods=tuple(_ended_pods_of_suspended(observed)),
        check_gates=tuple(job.uid for job, due in stale_gates(observed) if observed.now >= due),
        hand_over_pods=tuple(pod.name for pod in observed.live_pods.values()) if hands_over else (),
        adopts_pods=adopts,
        retire_pods=tuple(_retired_pods(observed, scheduled)),
        delete_job=_is_expired(observed, assessment, status),
        events=tuple(events_of(observed, scheduled, status)),
    )


def reconcile_undecided(observed: ObservedJob, assessment: Assessment) -> Actions | None:
    """Return the actions for a job that waits for its first decision; None if there are none.

    It stays as it is, but the metrics service may know it already.
    """
    declared = None if belongs_to_predecessor(observed) else _declaration(observed, assessment)
    if declared is None:
        return None
    status = own_fields(observed.resource.status)
    return Actions(status, status_is_urgent=False, status_changed=False, declare=declared)


def belongs_to_predecessor(observed: ObservedJob) -> bool:
    """Whether the job in the metrics service belongs to an earlier AdaScaleJob of the same name.

    A pod of that may register once more after it was deregistered. Its end would be a loss of the new job.
    """
    view = observed.service
    return (
        observed.resource.recorded_allocation is None
        and view is not None
        and (view.desired is not None or view.complete or bool(view.replicas))
    )


def _deregister_predecessor(observed: ObservedJob, assessment: Assessment) -> Actions:
    cleaning_up = Assessment(
        JobPhase.BLOCKED,
        assessment.failures,
        Reason.CLEANING_UP,
        "Waiting for an earlier job of this name to be removed from the metrics service",
    )
    status = status_of(replace(observed, service=JobView.empty()), ScheduledJob(cleaning_up, None))
    # Replicas that still run would report once more, to the new job.
    all_ended = all(pod.exit is not None for pod in observed.pods)
    return Actions(
        status,
        status_is_urgent=is_urgent(observed.resource.status, status),
        status_changed=own_fields(observed.resource.status) != status,
        deregister=all_ended,
    )


_REPLACING = frozenset({Reason.TEMPLATE_CHANGED, Reason.ACCELERATOR_CHANGED, Reason.QUEUE_CHANGED})
"""Reasons for which the Indexed Job is deleted once its replicas have left, and created again."""


def _is_deleted_to_stop(observed: ObservedJob, assessment: Assessment) -> bool:
    """Whether the Indexed Job is deleted, and not suspended, once its replicas have left.

    Kueue resumes a Job that it has admitted, whoever suspends it. One that is deleted gives its quota back.
    """
    may_continue = assessment.phase is JobPhase.STOPPING or _may_be_corrected(assessment)
    return assessment.reason in _REPLACING or (may_continue and observed.is_queued)


def _queues_again(observed: ObservedJob, assessment: Assessment) -> bool:
    """Whether the Indexed Job is deleted to wait in its queue with the smallest count again.

    Kueue admits one that was evicted and is resized then as two Workloads, and never resumes it.
    """
    indexed_job = observed.own_indexed_job
    if assessment.phase is not JobPhase.QUEUED or indexed_job is None or not indexed_job.is_elastic:
        return False
    has_left = observed.required_pods == 0 and all(pod.exit is not None for pod in observed.own_pods)
    return has_left and indexed_job.parallelism != _admission_count(observed)


def _may_be_corrected(assessment: Assessment) -> bool:
    """Whether a job has failed only until its spec is edited."""
    return assessment.phase is JobPhase.FAILED and assessment.reason is Reason.INVALID_SPEC


def _with_accelerator(observed: ObservedJob, assessment: Assessment, decision: Decision | None) -> Assessment:
    """Return the phase of a job: it stops if its pods can't run on the type of accelerator that it gets."""
    indexed_job, current = observed.own_indexed_job, observed.current_allocation
    if assessment.phase is not JobPhase.RUNNABLE or decision is None or decision.accelerator is None:
        return assessment
    jobs = [each for each in observed.own_indexed_jobs if not each.finished]
    if indexed_job is None or all(each.suits(decision.accelerator) for each in jobs):
        return assessment
    if indexed_job.queue is not None:
        # Kueue has chosen the flavor.
        return assessment
    if not decision.replicas and not (current is not None and current.replicas):
        return assessment
    message = f"Saving state, then continuing on accelerators of the type {decision.accelerator.type}"
    if decision.accelerator.type is None:
        message = "Saving state, then continuing on any nodes that can run the replicas"
    return replace(assessment, phase=JobPhase.STOPPING, reason=Reason.ACCELERATOR_CHANGED, message=message)


# -- the allocation ---------------------------------------------------------------------------------------


def _allocation(
    observed: ObservedJob, assessment: Assessment, decision: Decision | None
) -> Allocation | None:
    current = observed.current_allocation
    if assessment.phase is JobPhase.FAILED:
        return _allocation_of_failed(observed, current)
    if assessment.phase in {JobPhase.COMPLETE, JobPhase.BLOCKED}:
        return current
    count = 0
    if decision is not None and assessment.phase is JobPhase.RUNNABLE:
        # Kueue has admitted it, so its pods wait for nodes as those of any other Job.
        count = decision.replicas or (_admission_count(observed) if observed.is_queued else 0)
    job = observed.resource.job
    spares = job.spare_replicas if job is not None and count else 0
    if current is None:
        last = observed.service.last_generation if observed.service is not None else 0
        return Allocation(last + 1, count, spares=spares) if count else None
    if decision is not None and observed.service is not None and observed.service.complete:
        # The program has finished; its pods are about to end.
        count, spares = current.replicas, current.spares
    # A generation that the metrics service does not have yet applies the new bounds anyway.
    published = observed.service is not None and observed.service.desired == current
    is_same = (count, spares) == (current.replicas, current.spares) and not current.failed
    if not is_same or (count and published and has_new_bounds(observed)):
        return Allocation(current.generation + 1, count, spares=spares)
    return current


def _allocation_of_failed(observed: ObservedJob, current: Allocation | None) -> Allocation | None:
    """Return the allocation by which the metrics service shows that a job has failed.

    Its pods are stopped first, so that they stop even if the metrics service refuses the allocation.
    """
    indexed_job, view = observed.own_indexed_job, observed.service
    may_have_pods = indexed_job is not None and not (indexed_job.suspended or indexed_job.finished)
    if current is None or may_have_pods or view is None or view.desired is None:
        return current
    if view.complete or view.desired.failed:
        return current
    if current.replicas == 0 and current.generation > view.desired.generation:
        # It is in the status, and may be requested again.
        return replace(current, failed=True)
    return Allocation(current.generation + 1, 0, failed=True)


def _is_due(observed: ObservedJob, assessment: Assessment, allocation: Allocation | None) -> bool:
    """Whether to request an allocation.

    The request creates a job that the metrics service does not have, so an ended job that it has dropped
    stays dropped.
    """
    if allocation is None or observed.service is None or assessment.phase is JobPhase.COMPLETE:
        return False
    desired = observed.service.desired
    if assessment.phase is JobPhase.FAILED and (desired is None or not allocation.failed):
        return False
    return desired is None or allocation.generation > desired.generation


def _declaration(observed: ObservedJob, assessment: Assessment) -> JobSpec | None:
    job, view = observed.resource.job, observed.service
    runnable = assessment.phase is JobPhase.RUNNABLE
    if job is None or view is None or not runnable or view.spec == job.spec:
        return None
    return job.spec


# -- the Indexed Jobs -------------------------------------------------------------------------------------


def _sizes(
    observed: ObservedJob, assessment: Assessment, allocation: Allocation | None
) -> tuple[int | None, int | None]:
    """Return the parallelism of the Indexed Job and that of extra pods. None leaves one unchanged.

    A core stays as it is while there are extra pods: an edit of its size replaces all pods.
    """
    count = _pod_count(observed, assessment, allocation)
    indexed_job, extra = observed.own_indexed_job, observed.own_extra_job
    core = extra.first if extra is not None else observed.core
    if count is None or core is None:
        return count, None
    if extra is None and indexed_job is not None and indexed_job.end > core:
        # It was made when there were no extra pods, or a larger core, and has all pods until these have left.
        return count, None
    pods = count
    if assessment.phase is JobPhase.QUEUED:
        # Kueue has stopped the core. Extra pods save their state too before they leave.
        pods = max(count, min(observed.required_pods, observed.pod_count))
    return min(count, core), max(pods - core, 0)


def _pod_count(observed: ObservedJob, assessment: Assessment, allocation: Allocation | None) -> int | None:
    """Return the number of pods, 0 to suspend the Indexed Job. None leaves it unchanged."""
    if _is_ended_by_deadline(observed, assessment):
        indexed_job = observed.own_indexed_job
        return indexed_job.parallelism if indexed_job is not None else None
    if assessment.phase is JobPhase.FAILED:
        return 0
    if assessment.phase is JobPhase.COMPLETE:
        return 0 if _runs_on_after_end(observed) else None
    if assessment.phase is JobPhase.BLOCKED:
        return None
    if assessment.phase is JobPhase.QUEUED:
        indexed_job = observed.own_indexed_job
        is_elastic = indexed_job is not None and indexed_job.is_elastic
        return indexed_job.parallelism if indexed_job and is_elastic else _admission_count(observed)
    count, current = allocation.indices.stop if allocation is not None else 0, observed.pod_count
    # No pod is removed before its trainer has saved its state.
    return count if count >= current else max(count, min(observed.required_pods, current))


def _admission_count(observed: ObservedJob) -> int:
    """Return the parallelism with which the Indexed Job waits in its queue.

    The smallest count is admitted first, and Kueue admits growth later. Without elastic slices the count that
    it has stays: Kueue would take another one for another job.
    """
    indexed_job, spec = observed.own_indexed_job, observed.resource.valid_job.spec
    counts = valid_replicas(spec.bounds, spec.max_replicas)
    fixed = indexed_job is not None and not indexed_job.is_elastic
    if indexed_job is not None and fixed and indexed_job.parallelism in counts:
        return indexed_job.parallelism
    return next(count for count in counts if count >= spec.min_replicas)


def _is_ended_by_deadline(observed: ObservedJob, assessment: Assessment) -> bool:
    """Whether a queued Indexed Job is ended by a deadline: suspended, Kueue would resume it.

    Its pods stay with their logs, and Kueue gives its quota to others.
    """
    indexed_job = observed.own_indexed_job
    if _may_be_corrected(assessment):
        return False
    runs_on = assessment.phase is JobPhase.FAILED or _runs_on_after_end(observed)
    return assessment.ended and runs_on and indexed_job is not None and indexed_job.queue is not None


def _runs_on_after_end(observed: ObservedJob) -> bool:
    """Whether the Indexed Job does not end by itself though the program has finished.

    Other containers run on after the worker, or only an extra pod has finished it: the Job still waits for
    the success of one of its own pods.
    """
    if observed.finished_beside_others is not None:
        return True
    extra = observed.own_extra_job
    return extra is not None and extra.complete and not _is_ending(observed, extra=False)


def _is_ending(observed: ObservedJob, *, extra: bool) -> bool:
    """Whether a pod of an Indexed Job has finished the program, or runs and is about to end."""
    return any(
        pod.has_started and (pod.exit is None or pod.exit.exit_code == 0)
        for pod in observed.own_pods
        if _is_extra(observed, pod) is extra
    )


def _is_extra(observed: ObservedJob, pod: Pod) -> bool:
    return observed.own_extra_job is not None and pod.rank >= observed.own_extra_job.first


def _active_deadline(observed: ObservedJob, assessment: Assessment) -> int | None:
    """Return `activeDeadlineSeconds` of the spec, or the current deadline if the spec is invalid."""
    if _is_ended_by_deadline(observed, assessment):
        return END_DEADLINE
    if observed.resource.job is not None:
        return observed.resource.job.active_deadline_seconds
    indexed_job = observed.own_indexed_job
    return indexed_job.active_deadline_seconds if indexed_job is not None else None


def _differs(observed: ObservedJob, parallelism: int | None, deadline: int | None) -> bool:
    indexed_job = observed.own_indexed_job
    if indexed_job is None or parallelism is None or indexed_job.finished:
        return False
    # What others have suspended stays suspended.
    suspends = indexed_job.suspended != (parallelism == 0) and not observed.is_held
    resized = suspends or (parallelism > 0 and indexed_job.parallelism != parallelism)
    return resized or indexed_job.active_deadline_seconds != deadline


def _may_create_extra_job(observed: ObservedJob) -> bool:
    """Whether there is no Indexed Job of extra pods, and no pod of one that was deleted."""
    core = observed.core or 0
    return observed.extra_job is None and all(pod.rank < core for pod in observed.leaving)


def _resizes_extra_job(observed: ObservedJob, assessment: Assessment, size: int | None) -> bool:
    """Whether the Indexed Job of extra pods has another size; that of an ended job is suspended."""
    extra = observed.own_extra_job
    if extra is None or extra.finished:
        return False
    if assessment.ended:
        deletes = _deletes_extra_job(observed, assessment, size)
        return _stops_extra_job(observed, assessment) and not extra.suspended and not deletes
    return size is not None and size > 0 and size != extra.parallelism


def _deletes_extra_job(observed: ObservedJob, assessment: Assessment, size: int | None) -> bool:
    """Whether the Indexed Job of extra pods is deleted, because there are none or it has failed.

    Unlike one without pods, a deleted Job makes the Job controller forget how often it has replaced pods,
    after which it pauses, and Kueue the quota.
    """
    extra = observed.own_extra_job
    if extra is None or assessment.phase is JobPhase.BLOCKED:
        return False
    if assessment.ended:
        complete = assessment.phase is JobPhase.COMPLETE
        pods = [pod for pod in observed.own_pods if _is_extra(observed, pod)]
        has_no_output = complete and not any(pod.has_started for pod in pods)
        # Suspended, Kueue would resume it.
        is_useless = extra.queue is not None or has_no_output
        return is_useless and not extra.finished and _stops_extra_job(observed, assessment)
    if size == 0:
        # Whoever has suspended it finds it suspended. Kueue resumes it once there is quota.
        is_kept = extra.suspended or observed.now < _admitted_until(extra)
        return not is_kept or assessment.phase is not JobPhase.RUNNABLE or extra.failed is not None
    # See `_queues_again`.
    is_resized_in_queue = extra.suspended and extra.is_elastic and size not in (None, extra.parallelism)
    return is_resized_in_queue or extra.failed is not None


def _admitted_until(extra: IndexedJob) -> float:
    return -inf if extra.queue is None else extra.started_at + ADMISSION_TIME


def _stops_extra_job(observed: ObservedJob, assessment: Assessment) -> bool:
    """Whether the Indexed Job of extra pods does not end by itself though the job has ended.

    Its pods may be writing the program's last output. But those that have not started would wait forever.
    """
    if assessment.phase is JobPhase.FAILED or observed.finished_beside_others is not None:
        return True
    return not _is_ending(observed, extra=True)


# -- pods -------------------------------------------------------------------------------------------------


def _overdue_pods(observed: ObservedJob) -> Iterator[str]:
    """Yield pods that are being deleted and whose kubelet does not end them."""
    for pod in observed.pods:
        if pod.deletion_deadline is None or pod.has_ended:
            continue
        if observed.now > pod.deletion_deadline + TERMINATION_OVERDUE or pod.node in observed.lost_nodes:
            yield pod.name


def _deleted_ended_pods(observed: ObservedJob) -> Iterator[str]:
    """Yield pods that have ended and are being deleted, by a user or with their namespace.

    The Job controller keeps a failed pod until it has created the next pod of that index. Where the Job is
    suspended or the namespace accepts no pods, it never does, and neither would ever be deleted.
    """
    if observed.own_indexed_jobs:
        for pod in observed.own_pods:
            if pod.has_ended and pod.deletion_deadline is not None:
                yield pod.name


def _ended_pods_of_suspended(observed: ObservedJob) -> Iterator[str]:
    """Yield pods that have ended, of a suspended Job: it creates no pods that would release them.

    They stay, with their logs, and can be deleted where no operator runs.
    """
    for pod in observed.own_pods:
        indexed_job = observed.own_extra_job if _is_extra(observed, pod) else observed.own_indexed_job
        if indexed_job is not None and indexed_job.suspended and pod.tracked and pod.has_ended:
            yield pod.name


def _pods_without_worker(observed: ObservedJob) -> Iterator[tuple[str, Event]]:
    """Yield pods whose worker has ended while other containers run on: they keep a replica from its next pod.

    They are ended as by a deadline of their own, so that they stay with their logs, and the Job controller
    replaces them as any pod that has failed.
    """
    for pod in observed.own_pods:
        is_ending = pod.is_ending or pod.deletion_deadline is not None
        has_failed = pod.exit is not None and pod.exit.others and pod.exit.exit_code != 0
        if has_failed and not is_ending and observed.replaces(pod.rank):
            yield pod.name, container_runs_on(pod)


def _retired_pods(observed: ObservedJob, scheduled: ScheduledJob) -> Iterator[str]:
    """Yield the pod that one of a changed template replaces next."""
    if scheduled.phase is JobPhase.RUNNABLE and not scheduled.changed:
        pod = template_rollout.next_pod(observed, scheduled.failed_placement)
        if pod is not None:
            yield pod.name


def _lost_pods(observed: ObservedJob) -> Iterator[str]:
    """Yield lost pods, which the Job controller would replace only after a pause.

    The pause doubles with each pod that has not succeeded, and the Job controller counts them by the pods
    that exist.
    """
    newest: dict[int, Pod] = {}
    for pod in sorted(observed.own_pods, key=lambda pod: pod.created_at):
        newest[pod.rank] = pod
    for rank, pod in newest.items():
        if observed.replaces(rank) and is_lost(pod, observed.now):
            yield pod.name


# -- the end ----------------------------------------------------------------------------------------------


def _is_expired(observed: ObservedJob, assessment: Assessment, status: Status) -> bool:
    """Whether `ttlSecondsAfterFinished` has passed."""
    job = observed.resource.job
    ttl = job.ttl_seconds_after_finished if job is not None else None
    ended_at = seconds(status.get("completionTime"))
    return assessment.ended and ttl is not None and ended_at is not None and observed.now >= ended_at + ttl


def stale_gates(observed: ObservedJob) -> Iterator[tuple[IndexedJob, float]]:
    """Yield the Indexed Jobs with pods that stay gated though admitted, and when to change them.

    Kueue 0.17 removes the gates of the pods that it knows when the Job of an elastic workload changes. A pod
    that it does not know yet stays gated until the Job changes again: the operator changes an annotation.
    """
    views = ((observed.own_indexed_job, observed.queue), (observed.own_extra_job, observed.extra_queue))
    for indexed_job, view in views:
        if indexed_job is None or view is None or not indexed_job.is_elastic:
            continue
        admitted = range(indexed_job.first, indexed_job.first + min(view.admitted, len(indexed_job.ranks)))
        gated = [
            pod.created_at
            for pod in observed.live_pods.values()
            if pod.rank in admitted
            and pod.problem is not None
            and pod.problem.reason is Reason.SCHEDULING_GATED
        ]
        if gated:
            yield indexed_job, min(_due(created, indexed_job.gates_checked_at) for created in gated)


def _due(created: float, checked: float) -> float:
    pause = min(max(GATE_TIMEOUT, checked - created), MAX_GATE_PAUSE)
    return max(created, checked) + pause


def next_deadline(observed: ObservedJob, assessment: Assessment) -> float:
    """Return when `reconcile` may return other actions though nothing has changed, in seconds since 1970.

    Infinite if it never does. What is overdue is repeated until it is done, so a time may be in the past.
    """
    times = (
        *_overdue_times(observed),
        *_loss_times(observed),
        *_registration_times(observed),
        *(due for _, due in stale_gates(observed)),
        *_admission_times(observed),
        *_expiry_times(observed, assessment),
        *_target_times(observed, assessment),
    )
    return min(times, default=inf)


def _overdue_times(observed: ObservedJob) -> Iterator[float]:
    for pod in observed.pods:
        if pod.deletion_deadline is not None and not pod.has_ended:
            yield pod.deletion_deadline + TERMINATION_OVERDUE


def _loss_times(observed: ObservedJob) -> Iterator[float]:
    for pod in observed.own_pods:
        if not is_lost(pod, observed.now) and is_lost(pod, inf):
            yield pod.created_at + LONG_LIFE


def _registration_times(observed: ObservedJob) -> Iterator[float]:
    if observed.registrations_due is not None:
        yield observed.registrations_due


def _admission_times(observed: ObservedJob) -> Iterator[float]:
    extra = observed.own_extra_job
    if extra is not None and observed.now < _admitted_until(extra):
        yield _admitted_until(extra)


def _expiry_times(observed: ObservedJob, assessment: Assessment) -> Iterator[float]:
    job, ended_at = observed.resource.job, seconds(observed.resource.status.get("completionTime"))
    ttl = job.ttl_seconds_after_finished if job is not None else None
    if assessment.ended and ttl is not None and ended_at is not None:
        yield ended_at + ttl


def _target_times(observed: ObservedJob, assessment: Assessment) -> Iterator[float]:
    due = observed.resource.deadline
    if due is not None and due > observed.now and not assessment.ended:
        yield due
