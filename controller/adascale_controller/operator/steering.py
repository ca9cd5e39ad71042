"""What to do about one job, from what is seen of it and what is decided: a pure function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adascale_controller.formatting import plural
from adascale_controller.operator.conditions import Condition, ConditionType, Reason, condition_of
from adascale_controller.operator.pods import Pod, is_lost
from adascale_controller.operator.resource import seconds
from adascale_controller.operator.sighting import Sighting
from adascale_controller.operator.stage import Kind, Stage, last_failure
from adascale_controller.operator.status import Outlook, Status, status_of
from adascale_controller.operator.trials import Refused
from adascale_core.decision import Decision
from adascale_core.failure_count import FailureCount
from adascale_core.messages import Allocation, JobSpec
from adascale_core.views import JobView

OVERDUE = 5.0
"""Seconds after which a pod whose time to end is over is deleted by force."""


@dataclass(frozen=True)
class Event:
    """Something to tell the user, as Kubernetes' events do."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Course:
    """What to do about a job. All of it may be done again without harm.

    Args:
        status: to write, where it differs from what there is.
        forget: whether the service is to forget an earlier job of this name.
        declare: the spec to declare at the service.
        want: the allocation to want there.
        make_claim: whether to make the claim for its state.
        create: the size of the Job to make.
        resize: the size that its Job is to have, and with it the deadline; 0: suspended.
        remove_batch: whether to delete its Job.
        remove_pods: pods to delete by force, with what the Job controller keeps them for.
        release_pods: pods that stay, to take from them what the Job controller keeps them for.
        remove_job: whether to delete the AdaScaleJob itself.
        events: what to tell.
    """

    status: Status
    forget: bool = False
    declare: JobSpec | None = None
    want: Allocation | None = None
    make_claim: bool = False
    create: int | None = None
    resize: int | None = None
    remove_batch: bool = False
    remove_pods: tuple[str, ...] = ()
    release_pods: tuple[str, ...] = ()
    remove_job: bool = False
    events: tuple[Event, ...] = ()


def steer(
    seen: Sighting,
    stage: Stage,
    failures: FailureCount,
    decision: Decision | None = None,
    refused: Refused | None = None,
) -> Course:
    """What to do about a job.

    Args:
        seen: the job.
        stage: what it is up to.
        failures: of its program.
        decision: its replica count, where it may run.
        refused: a count that could not be placed, if one holds.
    """
    if is_predecessors(seen):
        waiting = Stage(Kind.WAIT, Reason.CLEANING_UP, "an earlier job of this name is being forgotten")
        unknown = replace(seen, service=JobView.empty())
        # Replicas that are still ending would report once more, to what is then the new job.
        alone = all(pod.ended is not None for pod in seen.pods)
        return Course(status_of(unknown, Outlook(waiting, failures, None)), forget=alone)
    want = _allocation(seen, stage, decision)
    outlook = Outlook(
        stage,
        failures,
        want,
        reason=decision.reason if decision is not None else "",
        decided=want != seen.job.recorded,
        refused=refused,
    )
    status = status_of(seen, outlook)
    size = _size(seen, stage, want)
    batch = seen.own_batch
    creates = batch is None and seen.batch is None and stage.kind is Kind.RUN and bool(size)
    remakes = stage.reason is Reason.TEMPLATE_CHANGED and size == 0
    service = seen.service
    return Course(
        status=status,
        declare=_declaration(seen, stage),
        want=want if _is_news(want, service.desired if service else None) and service is not None else None,
        make_claim=bool(creates and seen.claim is not None and seen.claim.own and not seen.claim.exists),
        create=size if creates else None,
        resize=size if batch is not None and not remakes and _differs(seen, size) else None,
        remove_batch=batch is not None and remakes,
        remove_pods=tuple(dict.fromkeys((*_abandoned(seen), *_kept(seen), *_in_the_way(seen)))),
        release_pods=tuple(_at_rest(seen)),
        remove_job=_is_expired(seen, stage, status),
        events=tuple(_events(seen, outlook, status)),
    )


def is_predecessors(seen: Sighting) -> bool:
    """Whether what the service knows is of an earlier job of this name."""
    view = seen.service
    return seen.job.recorded is None and view is not None and (view.desired is not None or view.complete)


def has_new_bounds(seen: Sighting) -> bool:
    """Whether the spec is no longer what the service was told."""
    job = seen.job.job
    return job is not None and seen.service is not None and seen.service.spec not in (None, job.spec)


def _allocation(seen: Sighting, stage: Stage, decision: Decision | None) -> Allocation | None:
    standing = seen.standing
    if stage.ended or stage.kind is Kind.WAIT:
        return standing
    count = decision.replicas if decision is not None and stage.kind is Kind.RUN else 0
    if standing is None:
        return Allocation(1, count) if count else None
    # A generation that the service has not been told of yet will take up the new bounds anyway.
    told = seen.service is not None and seen.service.desired == standing
    if count != standing.replicas or (count and told and has_new_bounds(seen)):
        return Allocation(standing.generation + 1, count)
    return standing


def _is_news(want: Allocation | None, desired: Allocation | None) -> bool:
    return want is not None and (desired is None or want.generation > desired.generation)


def _declaration(seen: Sighting, stage: Stage) -> JobSpec | None:
    job, view = seen.job.job, seen.service
    if job is None or view is None or stage.kind is not Kind.RUN or view.spec == job.spec:
        return None
    return job.spec


def _size(seen: Sighting, stage: Stage, want: Allocation | None) -> int | None:
    """How many pods there are to be; none: as many as there are."""
    if stage.kind is Kind.FAILED:
        return 0
    if stage.kind in {Kind.COMPLETE, Kind.WAIT}:
        return None
    count = want.replicas if want is not None else 0
    batch = seen.own_batch
    present = batch.size if batch is not None and not batch.suspended else 0
    # Nobody goes before state is saved.
    return count if count >= present else max(count, min(seen.held, present))


def _differs(seen: Sighting, size: int | None) -> bool:
    batch = seen.own_batch
    if batch is None or size is None or batch.finished:
        return False
    deadline = seen.job.job.active_deadline_seconds if seen.job.job is not None else batch.deadline
    resized = batch.suspended != (size == 0) or (size > 0 and batch.size != size)
    return resized or batch.deadline != deadline


def _abandoned(seen: Sighting) -> Iterator[str]:
    """Pods that are to end, and that nobody is there to end."""
    for pod in seen.pods:
        if pod.deleting_since is None or pod.ended is not None:
            continue
        if seen.now > pod.deleting_since + OVERDUE or pod.node in seen.lost_nodes:
            yield pod.name


def _kept(seen: Sighting) -> Iterator[str]:
    """Pods that have ended and were deleted, by a user or with their namespace, and yet are there.

    The Job controller keeps a pod that has failed until it has made the next one of its index. That never
    comes where the Job is suspended, or where the namespace is being deleted and takes no new pods: neither
    the pod nor the namespace would ever go.
    """
    if seen.own_batch is not None:
        yield from (
            pod.name for pod in seen.own_pods if pod.ended is not None and pod.deleting_since is not None
        )


def _at_rest(seen: Sighting) -> Iterator[str]:
    """Pods that have ended, of a Job that makes none after them: their logs stay, but nobody is to be needed
    for their end, also where no operator runs."""
    batch = seen.own_batch
    if batch is not None and batch.suspended:
        yield from (pod.name for pod in seen.own_pods if pod.kept and pod.ended is not None)


def _in_the_way(seen: Sighting) -> Iterator[str]:
    """Pods that were lost, and that the Job controller would only replace after a pause.

    It pauses, each time longer, after every pod that has not succeeded, and knows by those pods how often.
    """
    batch = seen.own_batch
    if batch is None or batch.suspended or batch.finished:
        return
    newest: dict[int, Pod] = {}
    for pod in sorted(seen.own_pods, key=lambda one: one.created_at):
        newest[pod.rank] = pod
    for rank, pod in newest.items():
        if 0 <= rank < batch.size and is_lost(pod, seen.now):
            yield pod.name


def _is_expired(seen: Sighting, stage: Stage, status: Status) -> bool:
    job = seen.job.job
    ttl = job.ttl_seconds_after_finished if job is not None else None
    ended = seconds(status.get("completionTime"))
    return stage.ended and ttl is not None and ended is not None and seen.now >= ended + ttl


# -- events ---------------------------------------------------------------------------------------------


def _events(seen: Sighting, outlook: Outlook, status: Status) -> Iterator[Event]:
    """What is new, in words."""
    before, stage, want = seen.job.status, outlook.stage, outlook.want
    recorded, training = seen.job.recorded, status["replicas"]
    if want is not None and recorded is not None and want.generation > recorded.generation:
        yield from _decided(seen, outlook, recorded, want)
    elif want is not None and recorded is None:
        yield Event("Started", f"Starts on {plural(want.replicas, 'replica')}")
        if seen.one_node and seen.job.valid.spec.max_replicas > 1 and seen.claim is not None:
            yield Event(
                "OneNode",
                f"Claim {seen.claim.name} can be mounted on one node only, so all replicas share a node; "
                "for more, use a claim that is ReadWriteMany",
            )
    trained = (before.get("attempts") or {}).get("trained", 0)
    if training and training != trained:
        change = (
            f"Rescaled {trained} -> {training}" if trained else f"Trains on {plural(training, 'replica')}"
        )
        yield Event("Rescaled" if trained else "Running", change)
    lost = status["disruptions"] - before.get("disruptions", 0)
    if lost > 0:
        yield Event("ReplicaLost", "A replica is gone; all re-enter from the last checkpoint", warning=True)
    if outlook.failures.count > before.get("failures", 0) and not stage.ended:
        limit = seen.job.valid.backoff_limit if seen.job.job is not None else 0
        what = f"Failure {outlook.failures.count} of the program, backoffLimit is {limit}"
        yield Event("ProgramFailed", f"{what}. {last_failure(seen)}"[:1000], warning=True)
    yield from _told_by_conditions(before, status)


def _decided(seen: Sighting, outlook: Outlook, recorded: Allocation, want: Allocation) -> Iterator[Event]:
    if outlook.stage.kind is Kind.STOP:
        return
    if want.replicas != recorded.replicas:
        change = f"{recorded.replicas} -> {want.replicas}"
        if recorded.replicas == 0:
            yield Event("Resumed", f"Goes on on {plural(want.replicas, 'replica')}")
        else:
            yield Event("Rescaling", f"Rescaling {change}: {outlook.reason}")
    elif has_new_bounds(seen):
        yield Event("SpecChanged", "Re-enters to take up the changed spec")


_NORMAL = frozenset({Reason.SUSPENDED, Reason.SCALED_TO_ZERO, Reason.FINISHED, Reason.TEMPLATE_CHANGED})
_TOLD = {
    ConditionType.RUNNING: frozenset(
        {
            Reason.WAITING_FOR_ROOM,
            Reason.TEMPLATE_CHANGED,
            Reason.METRICS_SERVICE_UNAVAILABLE,
            Reason.NAME_TAKEN,
            Reason.UNSCHEDULABLE,
            Reason.VOLUME_NOT_FOUND,
            Reason.VOLUME_NOT_BOUND,
            Reason.IMAGE_NOT_PULLED,
            Reason.CONTAINER_NOT_CREATED,
            Reason.QUOTA_EXCEEDED,
            Reason.PODS_REFUSED,
            Reason.INVALID_SPEC,
        }
    ),
    ConditionType.RESCALING: frozenset(
        {
            Reason.UNSCHEDULABLE,
            Reason.VOLUME_NOT_BOUND,
            Reason.IMAGE_NOT_PULLED,
            Reason.CONTAINER_NOT_CREATED,
            Reason.QUOTA_EXCEEDED,
            Reason.PODS_REFUSED,
        }
    ),
    ConditionType.SUSPENDED: frozenset({Reason.SUSPENDED, Reason.SCALED_TO_ZERO}),
    ConditionType.COMPLETE: frozenset({Reason.FINISHED}),
    ConditionType.FAILED: frozenset(Reason),
}
"""Reasons that are told of when a condition comes to have them."""


def _told_by_conditions(before: Mapping[str, Any], status: Status) -> Iterator[Event]:
    for kind, reasons in _TOLD.items():
        now, then = condition_of(status, kind), condition_of(before, kind)
        if now is None or now.reason not in reasons or _same(now, then):
            continue
        if kind in {ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED} and not now.status:
            continue
        if kind is ConditionType.RUNNING and condition_of(status, ConditionType.FAILED):
            continue
        yield Event(now.reason, now.message[:1000], warning=now.reason not in _NORMAL)


def _same(now: Condition, then: Condition | None) -> bool:
    return then is not None and (then.reason, then.status) == (now.reason, now.status)
