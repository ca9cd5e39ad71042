"""The Events that a new status gives rise to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adascale_controller.formatting import describe_limit, plural, progress_text
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod
from adascale_controller.operator.reconcile.job_phase import JobPhase
from adascale_controller.operator.reconcile.status import ScheduledJob, replica_limit_problem
from adascale_controller.operator.types.actions import Event, Status
from adascale_controller.operator.types.conditions import (
    ConditionType,
    JobCondition,
    condition_of,
    has_ended,
    is_true,
)
from adascale_core.messages.allocation import Allocation

MAX_MESSAGE = 1000
"""The maximum length of an Event's message, in characters; the API server's is 1024 bytes."""


def events_of(observed: ObservedJob, scheduled: ScheduledJob, status: Status) -> Iterator[Event]:
    """Yield the Events for the changes from a job's current status to its new status."""
    current, allocation = observed.resource.status, scheduled.allocation
    recorded, training = observed.resource.recorded_allocation, status["replicas"]
    if allocation is not None and recorded is not None and allocation.generation > recorded.generation:
        yield from _rescheduled(observed, scheduled, recorded, allocation)
    elif allocation is not None and recorded is None:
        yield Event("Started", f"Started on {plural(allocation.replicas, 'replica')}")
        if observed.single_node and observed.resource.valid_job.spec.max_replicas > 1 and observed.claim:
            yield Event(
                "SingleNode",
                f"PersistentVolumeClaim {observed.claim.name} is not ReadWriteMany, so all replicas run on "
                "one node; use a ReadWriteMany claim to run on several nodes",
            )
    trained = (current.get("attempts") or {}).get("trained", 0)
    if training and training != trained:
        if trained:
            yield Event("Rescaled", f"Rescaled {trained} -> {training}")
        else:
            yield Event("Running", f"Training on {plural(training, 'replica')}")
    if status["disruptions"] > current.get("disruptions", 0):
        if _lacks_only_extra_pods(observed):
            yield Event("ExtraPodsTaken", "Extra pods were taken; training continues on the other replicas")
        else:
            message = (
                "A replica was lost; training resumes with the state of the others, "
                "or from the last checkpoint if all were lost"
            )
            yield Event("ReplicaLost", message, warning=True)
    limit = status.get("localBatchLimit")
    if limit is not None and limit < current.get("localBatchLimit", limit + 1):
        yield Event("LocalBatchLimited", describe_limit(limit), warning=True)
    failures = scheduled.assessment.failures
    if failures.count.count > current.get("failures", 0) and not scheduled.assessment.ended:
        limit = observed.resource.valid_job.backoff_limit if observed.resource.job is not None else 0
        yield Event("ProgramFailed", failures.describe(limit)[:MAX_MESSAGE], warning=True)
    if status["observedGeneration"] != current.get("observedGeneration"):
        yield from _without_effect(observed, scheduled)
    yield from _changed_conditions(current, status)


def _lacks_only_extra_pods(observed: ObservedJob) -> bool:
    """Whether pods of the allocation are missing or start, and all of them are extra pods."""
    core, allocation = observed.core, observed.current_allocation
    if core is None or allocation is None:
        return False
    started = {rank for rank, pod in observed.live_pods.items() if pod.has_started}
    return min(set(range(allocation.replicas)) - started, default=-1) >= core


def container_runs_on(pod: Pod) -> Event:
    """Return the Event about a pod whose worker has ended while other containers run on."""
    others = pod.exit.others if pod.exit is not None else ()
    names = f"container {others[0]}" if len(others) == 1 else f"containers {', '.join(others)}"
    return Event(
        "SidecarRunsOn",
        f"The worker of pod {pod.name} has ended and {names} runs on, so the pod is ended. Use a native "
        "sidecar, an init container with restartPolicy Always, which ends with the worker",
        warning=True,
    )


def has_new_bounds(observed: ObservedJob) -> bool:
    """Whether the spec differs from the spec that is declared at the metrics service."""
    job = observed.resource.job
    declared = observed.view.spec
    return job is not None and declared is not None and declared != job.spec


def _rescheduled(
    observed: ObservedJob, scheduled: ScheduledJob, recorded: Allocation, allocation: Allocation
) -> Iterator[Event]:
    if scheduled.phase in {JobPhase.STOPPING, JobPhase.FAILED}:
        return
    if allocation.replicas != recorded.replicas:
        if recorded.replicas == 0:
            yield Event("Resumed", f"Resumed on {plural(allocation.replicas, 'replica')}")
        else:
            change = f"{recorded.replicas} -> {allocation.replicas}"
            yield Event("Rescaling", f"Rescaling {change}: {scheduled.decision.reason}")
    elif has_new_bounds(observed):
        yield Event("SpecChanged", "Applying the changed spec")


def _without_effect(observed: ObservedJob, scheduled: ScheduledJob) -> Iterator[Event]:
    """Yield an Event about what in an edited spec has no effect."""
    problem = (
        replica_limit_problem(observed.resource.valid_job) if scheduled.phase is JobPhase.RUNNABLE else None
    )
    if problem is not None:
        yield Event("ReplicaLimitTooLow", problem, warning=True)
    status, job = observed.resource.status, observed.resource.job
    steps, progress = job.spec.steps if job is not None else None, status.get("progress")
    if steps is None or progress is None or not is_true(status, ConditionType.COMPLETE):
        return
    # The text in the status is a share of the steps before.
    if progress < steps and progress_text(progress, steps) != status.get("progressText"):
        message = "A complete AdaScaleJob is not continued: to train further, delete it and apply it again"
        if observed.claim is not None and observed.claim.own:
            message += (
                f". Its checkpoints in PersistentVolumeClaim {observed.claim.name} are deleted with it, so "
                "training starts from scratch; with spec.checkpoint.claimName or url it would continue"
            )
        yield Event("NotContinued", message, warning=True)


_NORMAL = frozenset(
    {
        Reason.NODES_REQUESTED,
        Reason.PREEMPTING,
        Reason.SUSPENDED,
        Reason.SCALED_TO_ZERO,
        Reason.QUEUED,
        Reason.QUEUE_CHANGED,
        Reason.SCHEDULING_GATED,
        Reason.FINISHED,
        Reason.TEMPLATE_CHANGED,
        Reason.ACCELERATOR_CHANGED,
        Reason.SLOW_REPLICA_REPLACED,
    }
)
"""Reasons whose Events are not warnings."""
_RECORDED = (
    ConditionType.FAILED,
    ConditionType.COMPLETE,
    ConditionType.SUSPENDED,
    ConditionType.RUNNING,
    ConditionType.RESCALING,
    ConditionType.SLOW_REPLICA,
)
"""The conditions whose changes are recorded; of several that change to a reason at once, the first."""
_NOT_RECORDED = frozenset(
    {
        Reason.TRAINING,
        Reason.STARTING,
        Reason.REENTERING,
        Reason.PREPARING_REPLICAS,
        Reason.STABLE,
        Reason.RESUMED,
        Reason.CLEANING_UP,
        Reason.NO_REPLICA_SLOW,
    }
)


def _changed_conditions(current: Mapping[str, Any], status: Status) -> Iterator[Event]:
    recorded: set[str] = {*_NOT_RECORDED}
    for kind in _RECORDED:
        new, old = condition_of(status, kind), condition_of(current, kind)
        if new is None or new.reason in recorded or _is_same(new, old):
            continue
        if (kind, new.status) == (ConditionType.SUSPENDED, False):
            # The state is being saved.
            continue
        if kind is ConditionType.RUNNING and (new.reason == Reason.PROGRAM_FAILED or has_ended(status)):
            # The failure, or the end, has an Event of its own.
            continue
        recorded.add(new.reason)
        yield Event(new.reason, new.message[:MAX_MESSAGE], warning=new.reason not in _NORMAL)


def _is_same(new: JobCondition, old: JobCondition | None) -> bool:
    if old is None or (old.reason, old.status) != (new.reason, new.status):
        return False
    # The message on a slow replica stays while it is the same one.
    return new.type is not ConditionType.SLOW_REPLICA or old.message == new.message
