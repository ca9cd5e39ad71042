"""Builders of observed jobs, for tests of the operator's pure phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pydantic.alias_generators import to_camel

from adascale_controller.job.failing_counts import FailingCount
from adascale_controller.job.placement_backoff import FailedPlacement
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observed_job import CheckpointClaim, ObservedJob
from adascale_controller.operator.observe.pods import Pod, PodExit, PodProblem
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.reconcile.reconciler import reconcile
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.actions import Actions, Schedule, Stop
from adascale_controller.operator.types.kubernetes import ApiObject, ConditionType, JobCondition, condition_of
from adascale_controller.schema import Checkpoint
from adascale_core.decision.deadline import Feasibility
from adascale_core.decision.decide import Decision
from adascale_core.failures import TerminationMessage
from adascale_core.messages.allocation import ActiveAllocation, Allocation, Member
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.views.jobs import JobView, ReplicaView
from support.definitions import define

NOW = 1_800_000_000.0
DIGEST = "current-template"
SPEC = JobSpec(4, 64, (4, 16), 1, 8, 1000)


GPU = "nvidia.com/gpu"
ON_GPU: ApiObject = {"spec": {"containers": [{"name": "worker", "resources": {"limits": {GPU: "1"}}}]}}
"""A template whose pods request an accelerator."""
ON_CPU: ApiObject = {"spec": {"containers": [{"name": "worker"}]}}


def checkpoint_settings(**fields: Any) -> Checkpoint:
    """Return `spec.checkpoint`, of fields with their names in Python."""
    return Checkpoint.model_validate({to_camel(name): value for name, value in fields.items()})


def job(
    recorded: tuple[int, int] | None = None,
    *,
    name: str = "digits",
    namespace: str = "team",
    template: ApiObject | None = None,
    status: Mapping[str, Any] | None = None,
    **spec: Any,
) -> AdaScaleJob:
    """Return an AdaScaleJob with a recorded allocation (generation, replicas); `spec` are fields of `Job`."""
    current = dict(status or {})
    if recorded is not None:
        current["allocation"] = {"generation": recorded[0], "replicas": recorded[1]}
        current.setdefault("startTime", "2027-01-15T08:00:00Z")
    job_id = f"{namespace}.{name}"
    parsed = define(job_id, spec.pop("spec", SPEC), **{"checkpoint": Checkpoint(path="/data"), **spec})
    uid = "job-uid" if name == "digits" else job_id
    return AdaScaleJob(
        namespace, name, uid, 1, int(NOW) - 100, parsed, template=template or {}, status=current
    )


def node(name: str, gpus: int, labels: Mapping[str, str] = MappingProxyType({})) -> ApiObject:
    """Return a node that is ready, with this number of accelerators."""
    return {
        "metadata": {"name": name, "resourceVersion": str(gpus), "labels": dict(labels)},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "8", "pods": "110"} | ({GPU: str(gpus)} if gpus else {}),
        },
    }


def pod(rank: int, **changes: Any) -> Pod:
    """Return a running pod."""
    built = Pod(
        f"digits-{rank}",
        f"pod-{rank}",
        rank,
        "node1",
        "Running",
        NOW - 50,
        scheduled_at=NOW - 49,
        controller=("AdaScaleJob", "digits", "job-uid"),
        template=DIGEST,
    )
    return replace(built, **changes)


def failed_pod(rank: int, generation: int = 0, *, created_at: float = NOW - 50, **changes: Any) -> Pod:
    """Return a pod whose program has failed in a generation."""
    end = PodExit(3, termination=TerminationMessage(generation, 3, "Traceback\nValueError: no"), **changes)
    return pod(
        rank,
        uid=f"pod-{rank}-{created_at}",
        created_at=created_at,
        phase="Failed",
        exit=end,
    )


def finished_pod(rank: int, ended_at: float = NOW, **changes: Any) -> Pod:
    """Return a pod whose program has finished."""
    return pod(rank, phase="Succeeded", exit=PodExit(0, "Completed", ended_at=ended_at), **changes)


def pending_pod(rank: int) -> Pod:
    """Return a pod that can't be scheduled."""
    problem = PodProblem(Reason.UNSCHEDULABLE, "message of Unschedulable")
    return pod(rank, node=None, scheduled_at=None, phase="Pending", problem=problem)


def registration(rank: int, state: ReplicaState = ReplicaState.RUNNING, generation: int = 1) -> Registration:
    """Return the registration of a replica's agent."""
    return Registration(rank, f"agent-{rank}", state, generation, f"host-{rank}", 1000 + generation)


def replica(rank: int, state: ReplicaState = ReplicaState.RUNNING, generation: int = 1) -> ReplicaView:
    """Return a rank's replica as the metrics service shows it."""
    return ReplicaView.of(registration(rank, state, generation), 0.0)


def report(generation: int = 1, replicas: int = 1, progress: float = 500.0, gain: float = 2.0) -> GainReport:
    """Return the report of a step."""
    return GainReport(generation, 10, progress, 0, replicas, 8, 1, 2.0 * replicas, gain, 1.0, 2.0, 0.1, 1.0)


def view(
    desired: tuple[int, int] | None = None,
    active: tuple[int, int] | None = None,
    *,
    running: Iterable[int] | None = None,
    **changes: Any,
) -> JobView:
    """Return the job in the metrics service. The ranks of the active generation run by default."""
    generation = active[0] if active else 1
    ranks = running if running is not None else range(active[1] if active else 0)
    built = replace(
        JobView.empty("team.digits"),
        spec=SPEC,
        version=1,
        desired=Allocation(*desired) if desired else None,
        active=_active(*active) if active else None,
        replicas=tuple(replica(rank, generation=generation) for rank in ranks),
    )
    return replace(built, **changes)


def _active(generation: int, replicas: int) -> ActiveAllocation:
    """Return an active allocation whose members are the first replicas."""
    members = (registration(index, generation=generation) for index in range(replicas))
    return ActiveAllocation(
        generation,
        replicas,
        tuple(Member(each.replica, each.instance, each.address, each.port, holds=True) for each in members),
    )


def observed(
    job_: AdaScaleJob | None = None,
    service: JobView | None = None,
    pods: Sequence[Pod] | int = (),
    **changes: Any,
) -> ObservedJob:
    """Return an observed job, with these pods, or with this number of pods that run."""
    resource = job_ or job()
    built = ObservedJob(
        resource=resource,
        service=service,
        pods=tuple(map(pod, range(pods))) if isinstance(pods, int) else pods,
        claim=None,
        digest=DIGEST,
        refusal=None,
        lost_nodes=frozenset(),
        now=NOW,
    )
    return replace(built, **changes)


def new_job(name: str = "digits", **spec: Any) -> ObservedJob:
    """Return a job that the metrics service does not know yet; `spec` as for `job`."""
    made = job(name=name, **spec)
    return observed(made, JobView.empty(made.id))


def training_job(recorded: tuple[int, int] = (1, 2), **spec: Any) -> ObservedJob:
    """Return a job that trains with its recorded allocation."""
    return observed(job(recorded, **spec), view(recorded, recorded), recorded[1])


def own_claim(*, exists: bool = True) -> CheckpointClaim:
    """Return the claim that the operator creates."""
    return CheckpointClaim("digits-checkpoints", own=True, exists=exists, single_node=False)


def actions_for(
    observed_job: ObservedJob,
    replicas: int | None = None,
    failed_placement: FailedPlacement | None = None,
    failing_count: FailingCount | None = None,
    feasibility: Feasibility | None = None,
) -> Actions:
    """Return the actions for a job, as a cycle computes them; `replicas` is the decision."""
    decision = None if replicas is None else Decision(replicas, "", feasibility=feasibility)
    schedule = Schedule(decision, failed_placement, failing_count)
    return reconcile(observed_job, assess(observed_job), schedule)


def with_status(observed_job: ObservedJob, actions: Actions) -> ObservedJob:
    """Return the job with the status of the actions written."""
    return replace(observed_job, resource=replace(observed_job.resource, status=actions.status))


def condition(actions: Actions, kind: ConditionType) -> JobCondition:
    """Return a condition in the status of the actions."""
    found = condition_of(actions.status, kind)
    assert found is not None
    return found


FIELDS = ("deregister", "declare", "allocate", "delete_group", "delete_job")


def writes(actions: Actions) -> dict[str, object]:
    """Return the actions besides status and Events, without empty fields: of pods, ranks and names."""
    values: dict[str, object] = {name: getattr(actions, name) for name in FIELDS}
    values["create"] = [pod.rank for pod in actions.create_pods]
    for how in Stop:
        values[how.name.lower()] = [pod.name for pod in actions.stop_pods if pod.how is how]
    return {name: value for name, value in values.items() if value not in (None, False, [])}


def events(actions: Actions) -> list[str]:
    """Return the reasons of the Events."""
    return [event.reason for event in actions.events]


# -- decisions about them ------------------------------------------------------------


def decided(
    scheduler: Scheduler, *jobs: ObservedJob, nodes: Sequence[ApiObject] | None = None
) -> Mapping[str, Decision]:
    """Decide about these jobs, which are all that may run, and adopt the decisions."""
    scheduler.retain({job.resource.uid for job in jobs})
    scheduler.set_resources(nodes, ())
    for job in jobs:
        scheduler.update(job)
    result = scheduler.solve(scheduler.decision_input())
    scheduler.adopt(result, jobs[0].now if jobs else 0.0)
    return dict(result.solution.decisions)
