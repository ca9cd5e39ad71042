"""The actions for one job, from its observed state and its replica count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from adascale_controller.failing_counts import FailingCount
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod
from adascale_controller.operator.reconcile.events import events_of, has_new_bounds
from adascale_controller.operator.reconcile.failures import is_lost
from adascale_controller.operator.reconcile.job_phase import Assessment, JobPhase
from adascale_controller.operator.reconcile.status import ScheduledJob, has_changed, own_fields, status_of
from adascale_controller.operator.types.actions import Actions, FailedPlacement, Status
from adascale_controller.operator.types.conditions import Reason
from adascale_controller.operator.types.kubernetes import seconds
from adascale_core.decision.decide import Decision
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.views.jobs import JobView

TERMINATION_OVERDUE = 5.0
"""Seconds after its deletion deadline at which a pod is deleted by force."""


def reconcile(
    observed: ObservedJob,
    assessment: Assessment,
    decision: Decision | None = None,
    failed_placement: FailedPlacement | None = None,
    failing_count: FailingCount | None = None,
) -> Actions:
    """Return the actions for one job.

    Args:
        observed: the job.
        assessment: its phase.
        decision: its replica count. None if the job may not run.
        failed_placement: a larger count that could not be placed.
        failing_count: a larger count on which the program fails at once.
    """
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
    )
    status = status_of(observed, scheduled)
    parallelism = _parallelism(observed, assessment, allocation)
    indexed_job, claim = observed.own_indexed_job, observed.claim
    runnable = assessment.phase is JobPhase.RUNNABLE
    creates = observed.indexed_job is None and runnable and bool(parallelism)
    replaces_template = assessment.reason in _REPLACING and parallelism == 0
    deadline = _active_deadline(observed)
    resizes = indexed_job is not None and not replaces_template and _differs(observed, parallelism, deadline)
    return Actions(
        status=status,
        status_changed=has_changed(observed.resource.status, status),
        telemetry_changed=own_fields(observed.resource.status) != status,
        declare=_declaration(observed, assessment),
        allocate=allocation if _is_due(observed, assessment, allocation) else None,
        create_claim=creates and claim is not None and claim.own and not claim.exists,
        create_indexed_job=parallelism if creates else None,
        accelerator=accelerator.type if accelerator is not None and accelerator.required else None,
        resize=parallelism if resizes else None,
        active_deadline_seconds=deadline,
        delete_indexed_job=indexed_job is not None and replaces_template,
        delete_pods=tuple(
            dict.fromkeys((*_overdue_pods(observed), *_deleted_ended_pods(observed), *_lost_pods(observed)))
        ),
        release_pods=tuple(_ended_pods_of_suspended(observed)),
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
    return Actions(status, status_changed=False, telemetry_changed=False, declare=declared)


def belongs_to_predecessor(observed: ObservedJob) -> bool:
    """Whether the job in the metrics service belongs to an earlier AdaScaleJob of the same name."""
    view = observed.service
    return (
        observed.resource.recorded_allocation is None
        and view is not None
        and (view.desired is not None or view.complete)
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
        status_changed=has_changed(observed.resource.status, status),
        telemetry_changed=own_fields(observed.resource.status) != status,
        deregister=all_ended,
    )


_REPLACING = frozenset({Reason.TEMPLATE_CHANGED, Reason.ACCELERATOR_CHANGED})
"""Reasons for which the Indexed Job is deleted once its replicas have left, and created again."""


def _with_accelerator(observed: ObservedJob, assessment: Assessment, decision: Decision | None) -> Assessment:
    """Return the phase of a job: it stops if its pods can't run on the type of accelerator that it gets."""
    indexed_job, current = observed.own_indexed_job, observed.current_allocation
    if assessment.phase is not JobPhase.RUNNABLE or decision is None or decision.accelerator is None:
        return assessment
    if indexed_job is None or indexed_job.finished or indexed_job.suits(decision.accelerator):
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
    count = decision.replicas if decision is not None and assessment.phase is JobPhase.RUNNABLE else 0
    if current is None:
        last = observed.service.last_generation if observed.service is not None else 0
        return Allocation(last + 1, count) if count else None
    if decision is not None and observed.service is not None and observed.service.complete:
        # The program has finished; its pods are about to end.
        count = current.replicas
    # A generation that the metrics service does not have yet applies the new bounds anyway.
    published = observed.service is not None and observed.service.desired == current
    if count != current.replicas or current.failed or (count and published and has_new_bounds(observed)):
        return Allocation(current.generation + 1, count)
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


# -- the Indexed Job --------------------------------------------------------------------------------------


def _parallelism(observed: ObservedJob, assessment: Assessment, allocation: Allocation | None) -> int | None:
    """Return the parallelism of the Indexed Job, 0 to suspend it. None leaves it unchanged."""
    if assessment.phase is JobPhase.FAILED:
        return 0
    if assessment.phase in {JobPhase.COMPLETE, JobPhase.BLOCKED}:
        return None
    count = allocation.replicas if allocation is not None else 0
    indexed_job = observed.own_indexed_job
    current = indexed_job.parallelism if indexed_job is not None and not indexed_job.suspended else 0
    # No pod is removed before its trainer has saved its state.
    return count if count >= current else max(count, min(observed.required_pods, current))


def _active_deadline(observed: ObservedJob) -> int | None:
    """Return `activeDeadlineSeconds` of the spec, or the current deadline if the spec is invalid."""
    if observed.resource.job is not None:
        return observed.resource.job.active_deadline_seconds
    indexed_job = observed.own_indexed_job
    return indexed_job.active_deadline_seconds if indexed_job is not None else None


def _differs(observed: ObservedJob, parallelism: int | None, deadline: int | None) -> bool:
    indexed_job = observed.own_indexed_job
    if indexed_job is None or parallelism is None or indexed_job.finished:
        return False
    resized = indexed_job.suspended != (parallelism == 0) or (
        parallelism > 0 and indexed_job.parallelism != parallelism
    )
    return resized or indexed_job.active_deadline_seconds != deadline


# -- pods -------------------------------------------------------------------------------------------------


def _overdue_pods(observed: ObservedJob) -> Iterator[str]:
    """Yield pods that are being deleted and whose kubelet does not end them."""
    for pod in observed.pods:
        if pod.deletion_deadline is None or pod.exit is not None:
            continue
        if observed.now > pod.deletion_deadline + TERMINATION_OVERDUE or pod.node in observed.lost_nodes:
            yield pod.name


def _deleted_ended_pods(observed: ObservedJob) -> Iterator[str]:
    """Yield pods that have ended and are being deleted, by a user or with their namespace.

    The Job controller keeps a failed pod until it has created the next pod of that index. It never does
    where the Job is suspended, or where the namespace is being deleted and accepts no pods: neither the pod
    nor the namespace would ever be deleted.
    """
    if observed.own_indexed_job is not None:
        for pod in observed.own_pods:
            if pod.exit is not None and pod.deletion_deadline is not None:
                yield pod.name


def _ended_pods_of_suspended(observed: ObservedJob) -> Iterator[str]:
    """Yield pods that have ended, of a suspended Job: it creates no pods that would release them.

    They stay, with their logs, and can be deleted where no operator runs.
    """
    indexed_job = observed.own_indexed_job
    if indexed_job is not None and indexed_job.suspended:
        for pod in observed.own_pods:
            if pod.tracked and pod.exit is not None:
                yield pod.name


def _lost_pods(observed: ObservedJob) -> Iterator[str]:
    """Yield lost pods, which the Job controller would replace only after a pause.

    The pause doubles with each pod that has not succeeded, and the Job controller counts them by the pods
    that exist.
    """
    indexed_job = observed.own_indexed_job
    if indexed_job is None or indexed_job.suspended or indexed_job.finished:
        return
    newest: dict[int, Pod] = {}
    for pod in sorted(observed.own_pods, key=lambda pod: pod.created_at):
        newest[pod.rank] = pod
    for rank, pod in newest.items():
        if 0 <= rank < indexed_job.parallelism and is_lost(pod, observed.now):
            yield pod.name


# -- the end ----------------------------------------------------------------------------------------------


def _is_expired(observed: ObservedJob, assessment: Assessment, status: Status) -> bool:
    """Whether `ttlSecondsAfterFinished` has passed."""
    job = observed.resource.job
    ttl = job.ttl_seconds_after_finished if job is not None else None
    ended_at = seconds(status.get("completionTime"))
    return assessment.ended and ttl is not None and ended_at is not None and observed.now >= ended_at + ttl
