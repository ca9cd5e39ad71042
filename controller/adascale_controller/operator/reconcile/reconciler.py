"""The actions for one job, from its observed state and its replica count, and when they are due."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from adascale_controller.job.failures import deadline
from adascale_controller.job.phase import Assessment, JobPhase
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod
from adascale_controller.operator.reconcile.job_phase import (
    is_lost,
    next_pods,
    replaced_at,
    replacement_spares,
    room_due,
)
from adascale_controller.operator.reconcile.status import (
    ScheduledJob,
    container_runs_on,
    events_of,
    has_new_bounds,
    is_urgent,
    own_fields,
    status_of,
)
from adascale_controller.operator.types.actions import (
    Actions,
    NewPod,
    Schedule,
    Status,
    StatusChange,
    Stop,
    StoppedPod,
)
from adascale_controller.operator.types.kubernetes import seconds
from adascale_core.decision.decide import Decision
from adascale_core.decision.type_choice import Accelerator
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.views.jobs import JobView

TERMINATION_OVERDUE = 5.0
"""Seconds after its deletion deadline at which a pod is deleted by force."""
END_TIMEOUT: Final = 10.0
"""Seconds that replicas have to end by themselves after the program has finished."""


def reconcile(
    observed: ObservedJob,
    assessment: Assessment,
    schedule: Schedule,
) -> Actions:
    """Return the actions for one job."""
    if belongs_to_predecessor(observed):
        return _deregister_predecessor(observed, assessment)
    decision, status = schedule.decision, own_fields(observed.resource.status)
    if decision is None and assessment.phase is JobPhase.RUNNABLE:
        # It stays as it is until its first decision, but the metrics service may know it already.
        return Actions(status, StatusChange.NONE, declare=_declaration(observed, assessment))
    assessment = _with_accelerator(observed, assessment, decision)
    allocation = _allocation(observed, assessment, decision)
    accelerator = decision.accelerator if decision is not None else None
    is_changed = allocation != observed.resource.recorded_allocation
    scheduled = ScheduledJob(assessment, allocation, schedule, is_changed)
    status = status_of(observed, scheduled)
    required = accelerator.type if accelerator is not None and accelerator.required else observed.accelerator
    stops = {each.uid: each for each in _stopped_pods(observed, scheduled, status)}
    return Actions(
        status=status,
        status_change=_status_change(observed, status),
        declare=_declaration(observed, assessment),
        allocate=allocation if _is_due(observed, assessment, allocation) else None,
        create_pods=tuple(_new_pods(observed, assessment, allocation, required)),
        stop_pods=tuple(stops.values()),
        delete_group=_gives_group_up(observed, assessment, allocation),
        delete_job=_is_expired(observed, assessment, status),
        events=tuple(events_of(observed, scheduled, status)),
    )


def _status_change(observed: ObservedJob, status: Status) -> StatusChange:
    if is_urgent(observed.resource.status, status):
        return StatusChange.URGENT
    return StatusChange.NONE if own_fields(observed.resource.status) == status else StatusChange.REPORTED


def belongs_to_predecessor(observed: ObservedJob) -> bool:
    """Whether the job in the metrics service belongs to an earlier AdaScaleJob of the same name.

    A pod of that may register once more after it was deregistered. Its end would be a loss of the new job.
    The first pods of a queued job may register before it has an allocation.
    """
    view, has_pods = observed.view, any(pod.has_started for pod in observed.pods)
    return observed.resource.recorded_allocation is None and (
        view.desired is not None or view.complete or (bool(view.replicas) and not has_pods)
    )


def _deregister_predecessor(observed: ObservedJob, assessment: Assessment) -> Actions:
    cleaning_up = Assessment(
        assessment.failures,
        JobPhase.BLOCKED,
        Reason.CLEANING_UP,
        "Waiting for an earlier job of this name to be removed from the metrics service",
    )
    status = status_of(replace(observed, service=JobView.empty()), ScheduledJob(cleaning_up, None))
    # Replicas that still run would report once more, to the new job.
    all_ended = not observed.others and all(pod.exit is not None for pod in observed.pods)
    return Actions(status, _status_change(observed, status), deregister=all_ended)


def _with_accelerator(observed: ObservedJob, assessment: Assessment, decision: Decision | None) -> Assessment:
    """Return the phase of a job: it stops if its pods can't run on the type of accelerator that it gets."""
    current, live = observed.current_allocation, observed.live_pods.values()
    if assessment.phase is not JobPhase.RUNNABLE or decision is None or decision.accelerator is None:
        return assessment
    if observed.is_queued or all(_suits(pod, decision.accelerator) for pod in live):
        # Kueue chooses the flavor.
        return assessment
    if not decision.replicas and not (current is not None and current.replicas):
        return assessment
    message = f"Saving state, then continuing on accelerators of the type {decision.accelerator.type}"
    if decision.accelerator.type is None:
        message = "Saving state, then continuing on any nodes that can run the replicas"
    return replace(assessment, phase=JobPhase.STOPPING, reason=Reason.ACCELERATOR_CHANGED, message=message)


def _suits(pod: Pod, accelerator: Accelerator) -> bool:
    """Whether a pod can run on this type of accelerator, and on no other if that is required."""
    return pod.accelerator == accelerator.type or (pod.accelerator is None and not accelerator.required)


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
        # Kueue has admitted it, so its pods wait for nodes as any others.
        count = decision.replicas or (observed.group_size if observed.is_queued else 0)
    job = observed.resource.job
    spares = job.spec.spare_replicas if job is not None and count else 0
    spares += replacement_spares(observed, range(count + spares))
    if current is None:
        return Allocation(observed.view.last_generation + 1, count, spares=spares) if count else None
    if decision is not None and observed.view.complete:
        # The program has finished; its pods are about to end.
        count, spares = current.replicas, current.spares
    # A generation that the metrics service does not have yet applies the new bounds anyway.
    published = observed.view.desired == current
    is_same = (count, spares) == (current.replicas, current.spares) and not current.failed
    if not is_same or (count and published and has_new_bounds(observed)):
        return Allocation(current.generation + 1, count, spares=spares)
    return current


def _allocation_of_failed(observed: ObservedJob, current: Allocation | None) -> Allocation | None:
    """Return the allocation by which the metrics service shows that a job has failed.

    Its pods are stopped first, so that they stop even if the metrics service refuses the allocation.
    """
    view = observed.view
    if current is None or observed.live_pods or view.desired is None:
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
    if job is None or view is None or not runnable or view.spec == job.declaration:
        return None
    return job.declaration


# -- pods -------------------------------------------------------------------------------------------------

_WITHOUT_NEW_PODS: Final = frozenset({Reason.CLEANING_UP, Reason.NAME_CONFLICT, Reason.VOLUME_NOT_FOUND})
"""Reasons of a blocked job for which no pods are created."""


def _pod_count(observed: ObservedJob, assessment: Assessment, allocation: Allocation | None) -> int:
    """Return for how many ranks, counted from 0, a job is to have pods."""
    if assessment.ended or (assessment.phase is JobPhase.BLOCKED and assessment.reason in _WITHOUT_NEW_PODS):
        return 0
    if assessment.phase is JobPhase.QUEUED:
        return observed.group_size
    return allocation.indices.stop if allocation is not None else 0


def _by_rank(observed: ObservedJob) -> Mapping[int, Sequence[Pod]]:
    """Return the pods of each rank, in the order of their attempts."""
    found: dict[int, list[Pod]] = {}
    for pod in sorted(observed.pods, key=lambda pod: pod.attempt):
        found.setdefault(pod.rank, []).append(pod)
    return found


def _missing(observed: ObservedJob, count: int) -> Iterator[tuple[int, int, float]]:
    """Yield the ranks without a pod, with the number of the next attempt, and when it may be made."""
    pods = _by_rank(observed)
    for rank in range(count):
        present = pods.get(rank, ())
        if all(pod.is_over for pod in present):
            yield rank, present[-1].attempt + 1 if present else 0, replaced_at(present, observed.now)


def _new_pods(
    observed: ObservedJob, assessment: Assessment, allocation: Allocation | None, accelerator: str | None
) -> Iterator[NewPod]:
    """Yield the pods to create: one for each rank, once the last one has ended."""
    job, core, group = observed.resource, observed.core, observed.group_size
    if job.job is None:
        return
    for rank, attempt, due in _missing(observed, _pod_count(observed, assessment, allocation)):
        extra = core is not None and rank >= core
        if due <= observed.now:
            queued, grouped = job.queue_of(extra=extra) is not None, rank < group and group > 1
            yield NewPod(
                rank,
                attempt,
                extra=extra,
                group_size=group if grouped and queued else 0,
                gang=observed.gang if grouped and not queued else None,
                accelerator=accelerator,
                scheduling=observed.flavor if queued else {},
            )


def _stopped_pods(observed: ObservedJob, scheduled: ScheduledJob, status: Status) -> Iterator[StoppedPod]:
    """Yield the pods to stop. Of two for the same pod, the last one counts."""
    assessment = scheduled.assessment
    stops = _ends(observed, scheduled, status) if assessment.ended else _leaving(observed, scheduled)
    yield from (StoppedPod(pod.name, pod.uid, how) for pod, how in stops)
    for pod in observed.pods:
        # They keep a replica from its next pod.
        if pod.exit is not None and pod.exit.others and not pod.is_ending and pod.deletion_deadline is None:
            yield StoppedPod(pod.name, pod.uid, Stop.END, container_runs_on(pod))
    for pod in (*observed.pods, *observed.others):
        if pod.deletion_deadline is not None and not pod.is_over:
            is_overdue = observed.now > pod.deletion_deadline + TERMINATION_OVERDUE
            if is_overdue or pod.node in observed.lost_nodes:
                yield StoppedPod(pod.name, pod.uid, Stop.FORCE)


def _leaving(observed: ObservedJob, scheduled: ScheduledJob) -> Iterator[tuple[Pod, Stop]]:
    """Yield the pods of a job that goes on, or is stopped, which are deleted."""
    assessment, allocation = scheduled.assessment, scheduled.allocation
    if assessment.phase is not JobPhase.BLOCKED:
        # No pod is removed before its trainer has saved its state.
        count = max(_pod_count(observed, assessment, allocation), observed.required_pods)
        yield from ((pod, Stop.DELETE) for rank, pod in observed.live_pods.items() if rank >= count)
    if assessment.phase is JobPhase.RUNNABLE and not scheduled.changed:
        for pod in next_pods(observed, scheduled.schedule.failed_placement):
            yield pod, Stop.DELETE
    for pods in _by_rank(observed).values():
        present = [pod for pod in pods if not pod.is_over]
        if not present or not present[0].has_started:
            continue
        for pod in present[1:]:
            # Another operator has made it at the same time.
            yield pod, Stop.DELETE
        for pod in pods:
            # What the program has failed in is not lost: it stays, with its logs.
            if is_lost(pod, observed.now) and pod.deletion_deadline is None:
                yield pod, Stop.DELETE


def _ends(observed: ObservedJob, scheduled: ScheduledJob, status: Status) -> Iterator[tuple[Pod, Stop]]:
    """Yield the pods of an ended job to stop. Those that have started stay, with their logs."""
    waits = scheduled.phase is JobPhase.COMPLETE and observed.now < _ended_by(status)
    for pod in observed.live_pods.values():
        if not pod.has_started:
            yield pod, Stop.DELETE
        elif not waits and not pod.is_ending:
            yield pod, Stop.END


def _ended_by(status: Status) -> float:
    return (seconds(status.get("completionTime")) or 0.0) + END_TIMEOUT


def _gives_group_up(observed: ObservedJob, assessment: Assessment, allocation: Allocation | None) -> bool:
    """Whether to delete the Workload of the group: Kueue would wait for the next pods of it."""
    is_stopped = allocation is None or allocation.replicas == 0
    stops = assessment.phase is JobPhase.STOPPING and is_stopped and observed.required_pods == 0
    return (assessment.ended or stops) and any(pod.group_size and pod.held_group for pod in observed.pods)


# -- the end ----------------------------------------------------------------------------------------------


def _is_expired(observed: ObservedJob, assessment: Assessment, status: Status) -> bool:
    """Whether `ttlSecondsAfterFinished` has passed."""
    job = observed.resource.job
    ttl = job.spec.ttl_seconds_after_finished if job is not None else None
    ended_at = seconds(status.get("completionTime"))
    return assessment.ended and ttl is not None and ended_at is not None and observed.now >= ended_at + ttl


def next_deadline(observed: ObservedJob, assessment: Assessment) -> float:
    """Return when `reconcile` may return other actions though nothing has changed, in seconds since 1970.

    Infinite if it never does. What is overdue is repeated until it is done, so a time may be in the past.
    """
    return min(_times(observed, assessment), default=inf)


def _times(observed: ObservedJob, assessment: Assessment) -> Iterator[float]:
    for pod in (*observed.pods, *observed.others):
        if pod.deletion_deadline is not None and not pod.is_over:
            yield pod.deletion_deadline + TERMINATION_OVERDUE
    if observed.registrations_due is not None:
        yield observed.registrations_due
    if assessment.ended:
        job, ended_at = observed.resource.job, seconds(observed.resource.status.get("completionTime"))
        if ended_at is not None:
            if observed.now < ended_at + END_TIMEOUT:
                yield ended_at + END_TIMEOUT
            if job is not None and job.spec.ttl_seconds_after_finished is not None:
                yield ended_at + job.spec.ttl_seconds_after_finished
        return
    missing = _missing(observed, _pod_count(observed, assessment, observed.current_allocation))
    yield from (due for _, _, due in missing if due > observed.now)
    job, started_at = observed.resource.job, seconds(observed.resource.status.get("startTime"))
    ends_at = deadline(job, started_at) if job is not None else None
    for due in (ends_at, observed.resource.deadline, room_due(observed)):
        if due is not None and due > observed.now:
            yield due
