"""The status of an AdaScaleJob, and the Events that a new one gives rise to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from adascale_controller.formatting import capitalized, describe_limit, percent, plural, progress_text
from adascale_controller.job.phase import (
    A_LOSS,
    Assessment,
    JobPhase,
    deadline_target,
    describe_change,
    describe_completion,
    describe_feasibility,
    describe_loss,
    describe_start,
    describe_training,
    replica_limit_problem,
)
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, PodProblem
from adascale_controller.operator.reconcile.job_phase import END_CONDITIONS, changed_parts
from adascale_controller.operator.types.actions import Event, Schedule, Status
from adascale_controller.operator.types.kubernetes import (
    ConditionType,
    JobCondition,
    condition_of,
    has_ended,
    is_true,
    merged,
    seconds,
    timestamp,
)
from adascale_core import names
from adascale_core.decision.decide import Decision
from adascale_core.messages.allocation import Allocation
from adascale_core.views.job_summary import JobStateName

REPORTED_FIELDS = frozenset(
    {
        "batchSize",
        "localBatchSize",
        "accumulation",
        "gain",
        "efficiency",
        "efficiencyText",
        "progress",
        "progressText",
    }
)
"""Fields from the last report, which change in each step: written at intervals, all others at once."""
PREDICTIONS = frozenset({Reason.COUNT_SUFFICES, Reason.NO_COUNT_SUFFICES})
"""Reasons of conditions that may change with every decision. They are written with `REPORTED_FIELDS`."""

NOT_SCHEDULED = Schedule()


@dataclass(frozen=True)
class ScheduledJob:
    """The allocation of a job and its reasons."""

    assessment: Assessment
    allocation: Allocation | None
    schedule: Schedule = NOT_SCHEDULED
    changed: bool = False  # whether the allocation differs from the recorded allocation

    def start_problem(self, observed: ObservedJob, ranks: range, spares: int = 0) -> PodProblem | None:
        """Return why one of these ranks does not start, and what is done about it."""
        problem, request = observed.start_problem(ranks, spares), self.schedule.capacity_request
        if problem is None and request is not None and any(rank not in observed.live_pods for rank in ranks):
            # The pods are not made yet, and may be placed at once.
            return PodProblem(request.reason, request.message)
        if problem is None or request is None or problem.reason is not Reason.UNSCHEDULABLE:
            return problem
        return replace(problem, reason=request.reason, message=f"{request.message}: {problem.message}")

    @property
    def decision(self) -> Decision:
        """The decision; one without a reason if there is none."""
        return self.schedule.decision or Decision(0, "")

    @property
    def phase(self) -> JobPhase:
        """The phase of the job."""
        return self.assessment.phase


def status_of(observed: ObservedJob, scheduled: ScheduledJob) -> Status:
    """Return the new status of a job."""
    current = observed.resource.status
    allocation, ended = scheduled.allocation, scheduled.assessment.ended
    counts = _counts(observed, scheduled)
    # While the metrics service does not answer, the current status is the best information.
    training = observed.training_replicas if observed.service is not None else current.get("replicas", 0)
    if ended:
        training = 0
    conditions = _conditions(observed, scheduled, training, counts)
    status: Status = {
        "observedGeneration": observed.resource.generation,
        "state": str(_state(conditions, scheduled)),
        "replicas": training,
        "desiredReplicas": allocation.replicas if allocation and not ended else 0,
        "selector": f"{names.LABEL_JOB}={observed.resource.name}",
        **counts,
        **_reported(observed),
        "conditions": merged(
            current.get("conditions") or (), conditions, observed.resource.generation, observed.now
        ),
    }
    if observed.core is not None:
        extra = current.get("extraReplicas", 0)
        if observed.service is not None and observed.training is not None:
            extra = sum(index >= observed.core for index in observed.training.indices)
        status["extraReplicas"] = extra if training else 0
    if allocation is not None:
        status["allocation"] = {"generation": allocation.generation, "replicas": allocation.replicas}
        if allocation.spares:
            status["allocation"]["spares"] = allocation.spares
        if spares := _spares(observed, allocation):
            waiting = current.get("spareReplicas", 0)
            if observed.service is not None:
                waiting = min(observed.service.waiting_spares, spares)
            status["spareReplicas"] = waiting if training else 0
        if allocation.replicas or ended:
            # It counts for `activeDeadlineSeconds`, without the time in which the job was stopped.
            status["startTime"] = current.get("startTime") or timestamp(observed.now)
    if ended:
        status["completionTime"] = timestamp(_ended_at(observed, scheduled))
    limit = current.get("localBatchLimit")
    if observed.service is not None:
        limit = observed.service.local_bsz_limit_on(observed.accelerator)
    if limit is not None:
        status["localBatchLimit"] = limit
    accelerator = current.get("accelerator")
    if scheduled.decision.accelerator is not None:
        accelerator = scheduled.decision.accelerator.type
    if accelerator is not None and status["desiredReplicas"]:
        status["accelerator"] = accelerator
    if observed.claim is not None:
        status["claim"] = observed.claim.name
    return status


def _ended_at(observed: ObservedJob, scheduled: ScheduledJob) -> float:
    """Return when a job has ended, in seconds since 1970. The operator may look at it later."""
    recorded = seconds(observed.resource.status.get("completionTime"))
    if recorded is not None:
        return recorded
    finished = observed.finished_pod if scheduled.phase is JobPhase.COMPLETE else None
    ended_at = finished.exit.ended_at if finished is not None and finished.exit is not None else None
    return float(int(ended_at or observed.now))


def is_urgent(current: Mapping[str, Any], new: Status) -> bool:
    """Whether two statuses differ in more than reported fields, predictions and what others have added."""
    return _without_reports(current) != _without_reports(new)


def own_fields(status: Mapping[str, Any]) -> Status:
    """Return a status with the conditions that the operator writes. Others may have added more."""
    if "conditions" not in status:
        return dict(status)
    by_type = {raw["type"]: raw for raw in status["conditions"]}
    return {**status, "conditions": [by_type[kind] for kind in ConditionType if kind in by_type]}


def _without_reports(status: Mapping[str, Any]) -> Status:
    kept = {name: value for name, value in own_fields(status).items() if name not in REPORTED_FIELDS}
    if "conditions" in kept:
        kept["conditions"] = [each for each in kept["conditions"] if each["reason"] not in PREDICTIONS]
    return kept


def _counts(observed: ObservedJob, scheduled: ScheduledJob) -> Status:
    """Return the counters: rescales, disruptions, failures, and what they already include."""
    current = observed.resource.status
    attempts = current.get("attempts") or {}
    counted = attempts.get("reportedDisruptions", 0)
    disruptions = current.get("disruptions", 0)
    rescales = current.get("rescales", 0)
    trained = attempts.get("trained", 0)
    if observed.service is not None:
        reported = observed.service.disruptions
        if reported == counted - 1 and observed.service.failures:
            # A peer's loss was reported first and turned out to be caused by the program's failure.
            disruptions = max(disruptions - 1, 0)
        else:
            # A metrics service that lost its data counts from zero.
            disruptions += reported - counted if reported >= counted else reported
        counted = reported
        if observed.training_replicas and observed.training_replicas != trained:
            rescales += trained > 0
            trained = observed.training_replicas
    failures, failing = scheduled.assessment.failures.count, scheduled.schedule.failing_count
    recorded_failing = {}
    if failing is not None:
        recorded_failing = {"failingCount": {**asdict(failing), "template": observed.digest}}
    return {
        "rescales": rescales,
        "disruptions": disruptions,
        "failures": failures.count,
        "restarts": disruptions + failures.count,
        "attempts": {
            "reportedDisruptions": counted,
            "trained": trained,
            "failedGeneration": failures.generation,
            "falseStarts": failures.false_starts,
            **recorded_failing,
        },
    }


def _reported(observed: ObservedJob) -> Status:
    current = observed.resource.status
    report = observed.view.latest
    # The progress of a job that has ended does not change with its spec, but its last report may be late.
    if report is None or (has_ended(current) and current.get("progress") == int(report.progress)):
        return {name: value for name, value in current.items() if name in REPORTED_FIELDS}
    job = observed.resource.job
    steps = (job.declaration.steps if job is not None else None) or report.target
    return {
        "batchSize": report.replicas * report.local_bsz * report.accumulation,
        "localBatchSize": report.local_bsz,
        "accumulation": report.accumulation,
        "gain": _rounded(report.gain),
        "efficiency": _rounded(report.efficiency),
        "efficiencyText": percent(report.efficiency),
        "progress": int(report.progress),
        "progressText": progress_text(report.progress, steps),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


# -- conditions -----------------------------------------------------------------------------------------


def _conditions(
    observed: ObservedJob, scheduled: ScheduledJob, training: int, counts: Status
) -> list[JobCondition]:
    assessment = scheduled.assessment
    conditions = [
        _running(observed, scheduled, training, counts),
        _rescaling(observed, scheduled, training),
        _suspended(assessment, training, observed),
    ]
    for kind, phase, _ in END_CONDITIONS:
        if assessment.phase is phase:
            conditions.append(JobCondition(kind, True, assessment.reason, assessment.message))
    others = _deadline_feasible(observed, scheduled), _slow_replica(observed, scheduled)
    return [*conditions, *(each for each in others if each is not None)]


def _running(observed: ObservedJob, scheduled: ScheduledJob, training: int, counts: Status) -> JobCondition:
    assessment, allocation = scheduled.assessment, scheduled.allocation

    def condition(status: bool, reason: Reason | str, message: str) -> JobCondition:
        return JobCondition(ConditionType.RUNNING, status, reason, message)

    if assessment.ended:
        return condition(False, assessment.reason, assessment.message.split("\n")[0].rstrip(":"))
    if training:
        if assessment.phase is JobPhase.BLOCKED:
            return condition(True, assessment.reason, assessment.message)
        reason, message = describe_training(training, observed.view.stall)
        outdated = observed.outdated_pods
        if reason is Reason.STALLED:
            return condition(True, reason, message)
        if outdated:
            left = f"{plural(len(outdated), 'pod')} left to replace, one by one"
            message = f"{message}; {changed_parts(observed)} has changed: {left}"
            ranks = allocation.indices if allocation is not None else range(0)
            problem = scheduled.start_problem(observed, ranks)
            if problem is None:
                return condition(True, Reason.TEMPLATE_CHANGED, message)
            return condition(True, problem.reason, f"{message}: {problem.message}")
        return condition(True, reason, f"{message}{_describe_spares(observed, allocation)}")
    if assessment.phase is not JobPhase.RUNNABLE:
        return condition(False, assessment.reason, assessment.message)
    if allocation is None or allocation.replicas == 0:
        return condition(False, Reason.INSUFFICIENT_CAPACITY, scheduled.decision.reason)
    problem = scheduled.start_problem(observed, allocation.indices, allocation.spares)
    if problem is not None:
        return condition(False, problem.reason, problem.message)
    failures, has_trained = assessment.failures.count.count, bool(counts["attempts"]["trained"])
    job = observed.resource.valid_job
    found = describe_start(job, allocation.replicas, failures, has_trained=has_trained)
    return condition(False, *found)


def _describe_spares(observed: ObservedJob, allocation: Allocation | None) -> str:
    """Return how many spares wait, and why others do not; empty without spares."""
    spares = _spares(observed, allocation)
    if allocation is None or not spares or observed.service is None:
        return ""
    waiting = min(observed.service.waiting_spares, spares)
    problem = observed.start_problem(allocation.indices)
    found = f"; {waiting} of {plural(spares, 'spare')} {'waits' if waiting == 1 else 'wait'}"
    return found if waiting == spares or problem is None else f"{found}: {problem.message}"


def _spares(observed: ObservedJob, allocation: Allocation | None) -> int:
    """Return the number of spares, without the further pod while those of another template are replaced."""
    job = observed.resource.job
    return 0 if allocation is None or job is None else min(allocation.spares, job.spec.spare_replicas)


def _rescaling(observed: ObservedJob, scheduled: ScheduledJob, training: int) -> JobCondition:
    kind = ConditionType.RESCALING
    allocation, failed = scheduled.allocation, scheduled.schedule.failed_placement
    runnable = scheduled.phase is JobPhase.RUNNABLE
    if runnable and training and allocation is not None and allocation.replicas != training:
        change = f"{training} -> {allocation.replicas}"
        ranks = range(training, allocation.replicas) if not allocation.spares else allocation.indices
        problem = scheduled.start_problem(observed, ranks, allocation.spares)
        if problem is not None:
            continues = f"training continues on {plural(training, 'replica')}"
            return JobCondition(kind, True, problem.reason, f"{change}: {problem.message}; {continues}")
        current = condition_of(observed.resource.status, kind)
        if not scheduled.changed and current is not None and current.message.startswith(f"{change}:"):
            return JobCondition(kind, True, Reason.PREPARING_REPLICAS, current.message)
        message = f"{change}: {scheduled.decision.reason or 'preparing replicas'}"
        return JobCondition(kind, True, Reason.PREPARING_REPLICAS, message)
    if runnable and observed.extra_pods_problem is not None:
        message = f"No extra pods are made: {observed.extra_pods_problem}"
        return JobCondition(kind, False, Reason.EXTRA_PODS_REJECTED, message)
    failing = scheduled.schedule.failing_count
    if failing is not None and not scheduled.assessment.ended:
        message = f"T{str(failing)[1:]}; it gets {plural(failing.limit, 'replica')} at most"
        return JobCondition(kind, False, Reason.PROGRAM_FAILED, message)
    if failed is not None and not scheduled.assessment.ended:
        return JobCondition(kind, False, failed.reason, str(failed))
    message = (replica_limit_problem(observed.resource.valid_job) or "") if runnable else ""
    return JobCondition(kind, False, Reason.STABLE, message)


def _deadline_feasible(observed: ObservedJob, scheduled: ScheduledJob) -> JobCondition | None:
    """Return whether the deadline can be met; None without one, or as long as nothing is predicted."""
    kind, due = ConditionType.DEADLINE_FEASIBLE, observed.resource.deadline
    if due is None:
        return None
    job = observed.resource.valid_job
    if scheduled.assessment.ended:
        in_time = scheduled.phase is JobPhase.COMPLETE and _ended_at(observed, scheduled) <= due
        return JobCondition(kind, in_time, *describe_completion(job, in_time=in_time))
    outlook = describe_feasibility(
        job,
        scheduled.decision.feasibility,
        has_passed=observed.now >= due and not observed.program_finished,
        # Its smallest count may exceed its replicaLimit.
        limit=None if job.spec.replica_limit is None else max(job.spec.replica_limit, job.core_replicas),
    )
    if outlook is None:
        before = condition_of(observed.resource.status, kind)
        # A prediction for another target, or before the job was stopped, does not hold.
        holds = before is not None and f"{deadline_target(job)}, as predicted" in before.message
        return before if holds and scheduled.phase in {JobPhase.RUNNABLE, JobPhase.BLOCKED} else None
    reason, message = outlook
    return JobCondition(kind, reason is Reason.COUNT_SUFFICES, reason, message)


def _slow_replica(observed: ObservedJob, scheduled: ScheduledJob) -> JobCondition | None:
    """Return which replica the others wait for, or which one a spare has replaced; None if none was slow."""
    kind = ConditionType.SLOW_REPLICA
    before = condition_of(observed.resource.status, kind)
    if observed.service is None and not scheduled.assessment.ended:
        return before
    slow = observed.view.slow
    if slow is None or scheduled.assessment.ended:
        replacement = observed.view.slow_replacement
        if replacement is not None and not scheduled.assessment.ended:
            return JobCondition(kind, False, Reason.SLOW_REPLICA_REPLACED, capitalized(str(replacement)))
        return JobCondition(kind, False, Reason.NO_REPLICA_SLOW) if before is not None else None
    pod = observed.live_pods.get(slow.replica)
    place = "" if pod is None else f" (pod {pod.name}, node {pod.node})"
    message = capitalized(slow.describe(place))
    if before is not None and before.status and before.message.startswith(message.partition(":")[0]):
        # The factor changes a little with each report.
        return before
    return JobCondition(kind, True, Reason.REPLICA_SLOW, message)


def _suspended(assessment: Assessment, training: int, observed: ObservedJob) -> JobCondition:
    kind = ConditionType.SUSPENDED
    requested = assessment.phase is JobPhase.STOPPING and assessment.reason in {
        Reason.SUSPENDED,
        Reason.SCALED_TO_ZERO,
    }
    if requested and not training:
        return JobCondition(kind, True, assessment.reason, assessment.message)
    if requested:
        return JobCondition(kind, False, assessment.reason, "Saving state")
    current = condition_of(observed.resource.status, kind)
    resumed = current is not None and (current.status or current.reason == Reason.RESUMED)
    return JobCondition(kind, False, Reason.RESUMED if resumed else Reason.STABLE)


_STATES = {
    ConditionType.FAILED: JobStateName.FAILED,
    ConditionType.COMPLETE: JobStateName.COMPLETE,
    ConditionType.SUSPENDED: JobStateName.SUSPENDED,
}


def _state(conditions: list[JobCondition], scheduled: ScheduledJob) -> JobStateName:
    """Return the state that `kubectl get` shows."""
    true = {condition.type for condition in conditions if condition.status}
    for kind, state in _STATES.items():
        if kind in true:
            return state
    if ConditionType.RUNNING in true:
        return JobStateName.RESCALING if ConditionType.RESCALING in true else JobStateName.RUNNING
    allocation = scheduled.allocation
    if scheduled.phase is JobPhase.RUNNABLE and allocation is not None and allocation.replicas:
        return JobStateName.STARTING
    return JobStateName.PENDING


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
                f"{describe_loss(observed.view) or A_LOSS}; training resumes with the state of the others, "
                "or from the last checkpoint if all were lost"
            )
            yield Event("ReplicaLost", message, warning=True)
    limit = status.get("localBatchLimit")
    if limit is not None and limit < current.get("localBatchLimit", limit + 1):
        yield Event("LocalBatchLimited", describe_limit(limit), warning=True)
    failures = scheduled.assessment.failures
    if failures.count.count > current.get("failures", 0) and not scheduled.assessment.ended:
        limit = observed.resource.valid_job.spec.backoff_limit if observed.resource.job is not None else 0
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
    return job is not None and declared is not None and declared != job.declaration


def _rescheduled(
    observed: ObservedJob, scheduled: ScheduledJob, recorded: Allocation, allocation: Allocation
) -> Iterator[Event]:
    if scheduled.phase in {JobPhase.STOPPING, JobPhase.FAILED}:
        return
    if allocation.replicas != recorded.replicas:
        if recorded.replicas == 0:
            yield Event("Resumed", f"Resumed on {plural(allocation.replicas, 'replica')}")
        else:
            reason = scheduled.decision.reason
            yield Event("Rescaling", describe_change(recorded.replicas, allocation.replicas, reason))
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
    steps, progress = job.declaration.steps if job is not None else None, status.get("progress")
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
