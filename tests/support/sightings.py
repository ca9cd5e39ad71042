"""Builders of what the operator sees of a job, for tests of its rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from adascale_controller.job import CheckpointSettings, Job
from adascale_controller.operator.conditions import Condition, ConditionType, Reason, condition_of
from adascale_controller.operator.failures import count_failures
from adascale_controller.operator.pods import Ended, Pod, Problem
from adascale_controller.operator.resource import ElasticJob
from adascale_controller.operator.sighting import BatchJob, Claim, Sighting
from adascale_controller.operator.stage import stage_of
from adascale_controller.operator.steering import Course, steer
from adascale_controller.operator.trials import Refused
from adascale_core.decision import Decision
from adascale_core.messages import (
    ActiveAllocation,
    Allocation,
    GainReport,
    JobSpec,
    Registration,
    ReplicaState,
)
from adascale_core.termination_message import TerminationMessage
from adascale_core.views import JobView, ReplicaView

NOW = 1_800_000_000.0
DIGEST = "as-is"
SPEC = JobSpec(4, 64, (4, 16), 1, 8, 1000)


def job(
    recorded: tuple[int, int] | None = None, *, status: Mapping[str, Any] | None = None, **spec: Any
) -> ElasticJob:
    """An AdaScaleJob, with the allocation that its status tells of; `spec` are fields of `Job`."""
    told = dict(status or {})
    if recorded is not None:
        told["allocation"] = {"generation": recorded[0], "replicas": recorded[1]}
        told.setdefault("startTime", "2027-01-15T08:00:00Z")
    asked = Job(
        "team.digits", spec.pop("spec", SPEC), **{"checkpoint": CheckpointSettings(path="/data"), **spec}
    )
    return ElasticJob("team", "digits", "job-uid", 1, int(NOW) - 100, False, asked, status=told)


def batch(size: int, **more: Any) -> BatchJob:
    """The Job of the AdaScaleJob."""
    found = BatchJob("batch-uid", "job-uid", DIGEST, size, False, False, False, None)
    return replace(found, **more)


def pod(rank: int, **more: Any) -> Pod:
    """A pod that runs."""
    found = Pod(
        f"digits-{rank}", f"pod-{rank}", rank, "node1", "Running", NOW - 50, scheduled=True, running=True
    )
    return replace(found, **more)


def failed_pod(rank: int, generation: int = 0, *, created_at: float = NOW - 50, **more: Any) -> Pod:
    """A pod whose program has failed."""
    ended = Ended(3, words=TerminationMessage(generation, 3, "Traceback\nValueError: no"), **more)
    return pod(
        rank,
        uid=f"pod-{rank}-{created_at}",
        created_at=created_at,
        phase="Failed",
        running=False,
        ended=ended,
    )


def stuck_pod(rank: int, reason: Reason = Reason.UNSCHEDULABLE) -> Pod:
    """A pod that can't start."""
    problem = Problem(reason, f"{reason} it is")
    return pod(rank, node=None, scheduled=False, phase="Pending", running=False, problem=problem)


def told(rank: int, phase: ReplicaState = ReplicaState.RUNNING, generation: int = 1) -> Registration:
    """What the agent of a rank has told."""
    return Registration(rank, f"agent-{rank}", phase, generation, f"host-{rank}", 1000 + generation)


def report(generation: int = 1, replicas: int = 1, progress: float = 500.0, gain: float = 2.0) -> GainReport:
    """A report of what a step has gained."""
    return GainReport(generation, 10, progress, 0, replicas, 8, 1, 2.0 * replicas, gain, 1.0, 2.0, 0.1, 1.0)


def view(
    desired: tuple[int, int] | None = None,
    active: tuple[int, int] | None = None,
    *,
    running: Iterable[int] | None = None,
    **more: Any,
) -> JobView:
    """What the service knows; the ranks of what is active run, unless told otherwise."""
    at_work = ActiveAllocation(*active, "host-0", 1000) if active else None
    ranks = running if running is not None else range(active[1] if active else 0)
    return replace(
        replace(
            JobView.empty("team.digits"),
            spec=SPEC,
            version=1,
            desired=Allocation(*desired) if desired else None,
            active=at_work,
            replicas=tuple(
                ReplicaView.of(told(rank, generation=active[0] if active else 1), 0.0) for rank in ranks
            ),
        ),
        **more,
    )


def seen(
    of: ElasticJob | None = None,
    service: JobView | None = None,
    of_batch: BatchJob | None = None,
    pods: Sequence[Pod] | None = None,
    **more: Any,
) -> Sighting:
    """A sighting; the pods of the Job run, unless told otherwise."""
    present = of_batch.size if of_batch is not None and not of_batch.suspended else 0
    found = Sighting(
        job=of or job(),
        service=service,
        batch=of_batch,
        pods=tuple(pod(rank) for rank in range(present)) if pods is None else pods,
        claim=None,
        digest=DIGEST,
        refusal=None,
        lost_nodes=frozenset(),
        now=NOW,
    )
    return replace(found, **more)


def training(recorded: tuple[int, int] = (1, 2), **spec: Any) -> Sighting:
    """A job at work with what it was given."""
    return seen(job(recorded, **spec), view(recorded, recorded), batch(recorded[1]))


def own_claim(*, exists: bool = True, one_node: bool = False) -> Claim:
    """The claim that the operator makes."""
    return Claim("digits-checkpoints", own=True, exists=exists, one_node=one_node)


def course(
    sighting: Sighting, replicas: int | None = None, reason: str = "", refused: Refused | None = None
) -> Course:
    """What is done about a job, as a cycle finds it out; `replicas` as decided."""
    failures = count_failures(sighting)
    stage = stage_of(sighting, failures)
    decision = None if replicas is None else Decision(replicas, reason)
    return steer(sighting, stage, failures, decision, refused)


def written(sighting: Sighting, done: Course) -> Sighting:
    """The sighting with the status of a course written."""
    return replace(sighting, job=replace(sighting.job, status=done.status))


def condition(done: Course, kind: ConditionType) -> Condition:
    """A condition that a course's status has."""
    found = condition_of(done.status, kind)
    assert found is not None
    return found
