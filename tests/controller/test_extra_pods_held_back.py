"""What keeps extra pods from being made or from starting: PriorityClasses, suspension, quota, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.apply.cluster import ApiServerError
from adascale_controller.operator.observe.observed_job import JobRefusal, QueueView
from adascale_controller.operator.observe.pods import END_DEADLINE, Pod, PodExit, PodProblem
from adascale_controller.operator.reconcile.reconciler import ADMISSION_TIME
from adascale_controller.operator.runtime import lookup_fetcher
from adascale_controller.operator.runtime.admission_reader import RETRY_INTERVAL
from adascale_controller.operator.schedule import placement_backoff
from adascale_controller.operator.schedule.quota import quota_limit
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.conditions import Reason
from adascale_controller.operator.types.kubernetes import Resource, timestamp
from adascale_controller.operator.types.workload import (
    ELASTIC_JOB,
)
from adascale_core import names
from controller.conftest import SETTINGS, SPOT, WAITING, Cluster
from support.fake_cluster import FakeCluster
from support.observed_jobs import (
    NOW,
    SPEC,
    actions_for,
    failed_pod,
    indexed_job,
    job,
    observed,
    pod,
    view,
)
from support.world import GPU, GRACE_PERIOD

Object = dict[str, Any]


# -- PriorityClasses ---------------------------------------------------------------------------------------


def test_without_its_priority_class_a_job_trains_on_its_core_and_says_why(cluster: Cluster) -> None:
    del cluster.priorities["spot"]
    cluster.world.submit(opportunistic=SPOT)
    cluster.world.run_cycles(15)
    assert cluster.sizes == {"digits": 1}
    rescaling = cluster.world.condition("Rescaling")
    assert (rescaling["status"], rescaling["reason"]) == ("False", "ExtraPodsRejected")
    assert rescaling["message"] == (
        "No extra pods are made: the API server rejects extra pods: no PriorityClass with name spot was "
        "found. Create PriorityClass spot, or change spec.opportunistic.priorityClassName"
    )
    assert [event.reason for event in cluster.world.events].count("ExtraPodsRejected") == 1
    cluster.priorities["spot"] = -10
    cluster.world.now += RETRY_INTERVAL
    cluster.world.run_cycles(15)
    assert cluster.sizes == {"digits": 1, "digits-extra": 3}


def test_a_priority_that_is_not_lower_than_that_of_the_core_is_an_error(cluster: Cluster) -> None:
    cluster.priorities["spot"] = 100
    cluster.world.submit(opportunistic=SPOT)
    cluster.world.run_cycles(15)
    assert cluster.sizes == {"digits": 1}
    assert cluster.world.condition("Rescaling")["message"] == (
        "No extra pods are made: PriorityClass spot of extra pods has the priority 100, which is not lower "
        "than that of the other pods, 100: name a lower one in spec.opportunistic.priorityClassName, or a "
        "higher one in spec.template.spec.priorityClassName"
    )


def test_extra_pods_that_run_stay_when_their_priority_class_is_deleted(cluster: Cluster) -> None:
    cluster.world.submit(opportunistic=SPOT)
    cluster.world.run_cycles(15)
    running = set(cluster.extra_pods())
    del cluster.priorities["spot"]
    cluster.world.start_operator()
    cluster.world.run_cycles(15)
    assert cluster.world.condition("Rescaling")["reason"] == "ExtraPodsRejected"
    assert set(cluster.extra_pods()) == running
    assert cluster.world.status["replicas"] == 4


# -- others that act on the Jobs ---------------------------------------------------------------------------


def test_a_job_of_extra_pods_that_somebody_suspends_stays_suspended(cluster: Cluster) -> None:
    world = cluster.world
    world.submit(opportunistic=SPOT)
    world.run_cycles(15)
    extra = world.objects[Resource.JOBS]["digits-extra"]
    world.write(Resource.JOBS, {**extra, "spec": {**extra["spec"], "suspend": True}})
    world.run_cycles(15)
    assert world.objects[Resource.JOBS]["digits-extra"]["spec"]["suspend"]
    assert cluster.world.status["replicas"] == 1
    rescaling = cluster.world.condition("Rescaling")
    assert (rescaling["status"], rescaling["reason"]) == ("True", "ExtraPodsSuspended")
    assert rescaling["message"] == (
        "1 -> 4: Job digits-extra, which has the extra pods, is suspended, and not by the operator: set its "
        "spec.suspend to false. If Kueue manages jobs without a queue name here, set "
        "spec.opportunistic.queueName; training continues on 1 replica"
    )
    world.now += placement_backoff.TIMEOUT_TRAINING
    world.run_cycles(5)
    assert cluster.world.status["desiredReplicas"] == 1, "it keeps no nodes"
    held = world.objects[Resource.JOBS]["digits-extra"]
    assert held["spec"]["suspend"]
    world.write(Resource.JOBS, {**held, "spec": {**held["spec"], "suspend": False}})
    world.run_cycles(15)
    assert cluster.world.status["replicas"] == 4


def test_extra_pods_that_their_queue_does_not_admit_keep_no_nodes_and_train_once_it_does(
    cluster: Cluster,
) -> None:
    world = cluster.world
    world.submit(opportunistic={**SPOT, "queueName": "spare"})
    for _ in range(2):
        world.run_cycles(15)
        assert world.condition("Rescaling")["reason"] == "ExtraPodsSuspended"
        assert world.status["desiredReplicas"] == 4
        world.now += placement_backoff.TIMEOUT_TRAINING
        world.run_cycles(5)
        assert (world.status["replicas"], world.status["desiredReplicas"]) == (1, 1)
        assert "waits to be admitted in LocalQueue spare" in world.condition("Rescaling")["message"]
        waiting = world.objects[Resource.JOBS]["digits-extra"]
        world.now += placement_backoff.FIRST_PAUSE
    assert waiting["spec"]["suspend"]
    world.write(Resource.JOBS, {**waiting, "spec": {**waiting["spec"], "suspend": False}})
    world.run_cycles(5)
    assert world.status["replicas"] == 4
    assert world.objects[Resource.JOBS]["digits-extra"]["metadata"]["uid"] == waiting["metadata"]["uid"]


def test_extra_pods_that_are_admitted_though_nobody_wants_them_leave_their_queue() -> None:
    made = job((1, 1), opportunistic=SETTINGS)
    extra = indexed_job(3, uid="extra-uid", first=1, of="digits", queue="spare", started_at=NOW)
    admitted = observed(made, view((1, 1), (1, 1)), indexed_job(1), [pod(0)], extra_job=extra)
    assert not actions_for(admitted, 1).delete_extra_job
    assert actions_for(replace(admitted, now=NOW + ADMISSION_TIME), 1).delete_extra_job


@pytest.mark.parametrize(
    ("queue_name", "count", "trains", "extra", "queue", "limit"),
    [
        pytest.param(None, 2, 2, {"queue": None}, None, None, id="no queue"),
        pytest.param("spare", 0, 0, None, None, 1, id="starts on the core"),
        pytest.param("spare", 1, 1, None, None, 2, id="one step is asked for first"),
        pytest.param("spare", 2, 1, {}, QueueView(message="no quota"), 2, id="waits"),
        pytest.param("spare", 2, 2, {}, None, 2, id="not read yet"),
        pytest.param("spare", 2, 2, {}, QueueView(1, room=2), 4, id="what is reserved and what is left"),
        pytest.param("spare", 2, 2, {}, QueueView(1), 3, id="may not be read"),
        pytest.param("spare", 2, 2, {"is_elastic": False}, QueueView(1, room=0), None, id="not elastic"),
    ],
)
def test_the_quota_of_their_queue_is_capacity_for_extra_pods(
    queue_name: str | None,
    count: int,
    trains: int,
    extra: Object | None,
    queue: QueueView | None,
    limit: int | None,
) -> None:
    settings = replace(SETTINGS, queue_name=queue_name)
    made = job(
        (1, count) if count else None, opportunistic=settings, spec=replace(SPEC, local_bsz_bounds=(1, 16))
    )
    extra_job = None
    if extra is not None:
        marks = {"uid": "extra-uid", "first": 1, "of": "digits", "queue": "spare", "is_elastic": True}
        extra_job = indexed_job(count - 1, **{**marks, **extra})
    core = indexed_job(1) if count else None
    service = view((1, count), (1, trains)) if count else view()
    assert quota_limit(observed(made, service, core, extra_job=extra_job, extra_queue=queue)) == limit


def test_extra_pods_grow_within_the_quota_of_their_queue(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kueue with elastic slices, and quota for two extra pods."""
    world, quota = cluster.world, 2

    def extra_job() -> Object | None:
        return world.objects[Resource.JOBS].get("digits-extra")

    async def list_kueue(_: FakeCluster, plural: str, namespace: str | None = None) -> list[Object]:
        made = extra_job()
        if made is None:
            return []
        count = made["spec"]["parallelism"]
        if plural == "clusterqueues":
            used = [{"name": "spots", "resources": [{"name": GPU, "total": count}]}]
            flavors = [{"name": "spots", "resources": [{"name": GPU, "nominalQuota": quota}]}]
            spec = {"resourceGroups": [{"flavors": flavors}]}
            return [{"metadata": {"name": "spare"}, "spec": spec, "status": {"flavorsReservation": used}}]
        assigned = {"count": count, "flavors": {GPU: "spots"}, "resourceUsage": {GPU: count}}
        status = {
            "conditions": [{"type": "QuotaReserved", "status": "True"}],
            "admission": {"clusterQueue": "spare", "podSetAssignments": [assigned]},
        }
        owner = {"kind": "Job", "uid": made["metadata"]["uid"], "controller": True}
        meta = {"name": "w", "creationTimestamp": timestamp(world.now), "ownerReferences": [owner]}
        return [{"metadata": meta, "status": status}]

    monkeypatch.setattr(FakeCluster, "list_kueue", list_kueue)
    monkeypatch.setattr(lookup_fetcher, "QUEUE_INTERVAL", 0.0)
    counts = []
    world.submit(opportunistic={**SPOT, "queueName": "spare"})
    for _ in range(60):
        made = extra_job()
        if made is not None:
            assert made["spec"]["parallelism"] <= quota
            if made["spec"]["suspend"]:
                template = made["spec"]["template"]
                gates = {"schedulingGates": [{"name": ELASTIC_JOB}]}
                template = {**template, "spec": {**template["spec"], **gates}}
                world.write(
                    Resource.JOBS, {**made, "spec": {**made["spec"], "suspend": False, "template": template}}
                )
        world.run_cycles(1)
        assert world.job is not None
        counts.append(world.job.get("status", {}).get("replicas", 0))
    assert list(dict.fromkeys(counts)) == [0, 1, 2, 3]
    assert (cluster.world.status["disruptions"], cluster.world.status["extraReplicas"]) == (0, 2)


@pytest.mark.parametrize(
    ("placed", "limit"),
    [pytest.param(2, None, id="all placed train"), pytest.param(3, 3, id="one waits on its node")],
)
def test_gated_extra_pods_keep_no_nodes_for_long_and_may_wait_without(placed: int, limit: int | None) -> None:
    gated = PodProblem(Reason.SCHEDULING_GATED, "waiting for Kueue to reserve the quota of more replicas")
    pods = [pod(rank) for rank in range(placed)]
    pods += [pod(rank, node=None, phase="Pending", problem=gated) for rank in range(placed, 4)]
    extra = indexed_job(3, uid="extra-uid", first=1, of="digits", queue="spare", is_elastic=True)
    template = {"spec": {"containers": [{"name": "worker"}]}}
    made = replace(job((2, 4), opportunistic=SETTINGS), template=template)
    growing = observed(made, view((2, 4), (1, 2)), indexed_job(1), pods, extra_job=extra)
    scheduler = Scheduler()
    for moment in (NOW, NOW + placement_backoff.TIMEOUT_TRAINING):
        scheduler.update(replace(growing, now=moment))
    failed = scheduler.failed_placement(replace(growing, now=NOW + placement_backoff.TIMEOUT_TRAINING))
    expected = None if limit is None else (4, limit, Reason.SCHEDULING_GATED)
    assert (failed and (failed.count, failed.limit, failed.reason)) == expected


@pytest.mark.parametrize(("count", "is_deleted"), [(4, False), (2, True)])
def test_evicted_extra_pods_of_another_count_wait_in_another_job(count: int, is_deleted: bool) -> None:
    """Kueue never resumes an elastic Job that is resized while it is suspended."""
    extra = indexed_job(
        3, uid="extra-uid", first=1, of="digits", queue="spare", is_elastic=True, suspended=True
    )
    made = job((1, 4), opportunistic=SETTINGS)
    evicted = observed(made, view((1, 4), (1, 1)), indexed_job(1), [pod(0)], extra_job=extra)
    assert actions_for(evicted, count).delete_extra_job == is_deleted


@pytest.mark.parametrize(("extra", "shown"), [(True, [False, False, True]), (False, [True, True, True])])
def test_a_refused_indexed_job_is_the_problem_of_its_own_pods(extra: bool, shown: list[bool]) -> None:
    """Those of the others are missing for a moment: they are replaced, or wait for the Job before theirs."""
    refusal = JobRefusal(PodProblem(Reason.QUOTA_EXCEEDED, "exceeded quota: jobs"), extra)
    core = indexed_job(2) if extra else None
    made = job((1, 3), opportunistic=SETTINGS, spec=replace(SPEC, min_replicas=2))
    lacking = observed(made, view((1, 3)), core, (), refusal=refusal)
    problems = [lacking.placement_problem(range(rank, rank + 1)) for rank in range(3)]
    assert [problem == refusal.problem for problem in problems] == shown


def test_a_job_of_extra_pods_that_is_refused_keeps_nothing_else_from_being_done(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = cluster.world
    world.submit(opportunistic=SPOT)
    world.run_cycles(15)
    create = FakeCluster.create_indexed_job

    async def refuse(fake: FakeCluster, manifest: Object) -> Object:
        if manifest["metadata"]["name"] == "digits-extra":
            raise ApiServerError("forbidden", 403, "exceeded quota: jobs")
        return dict(await create(fake, manifest))

    monkeypatch.setattr(FakeCluster, "create_indexed_job", refuse)
    world.delete(Resource.JOBS, "digits-extra")
    for name in cluster.extra_pods():
        world.delete_pod(name)
    stuck = next(iter(world.agents))
    raw = world.objects[Resource.PODS][stuck]
    overdue = {**raw["metadata"], "deletionTimestamp": timestamp(world.now - GRACE_PERIOD)}
    world.write(Resource.PODS, {**raw, "metadata": overdue})
    world.deliver()
    world.cycle()
    assert f"delete pod {stuck}" in world.writes


def test_a_failed_job_keeps_its_pods_and_a_suspended_job_has_none(cluster: Cluster) -> None:
    world = cluster.world
    world.submit(opportunistic=SPOT, backoffLimit=0)
    world.run_cycles(15)
    world.edit(suspend=True)
    world.run_cycles(15)
    assert cluster.world.status["state"] == "Suspended"
    assert list(cluster.sizes) == ["digits"]
    world.edit(suspend=False)
    world.run_cycles(15)
    assert cluster.world.status["replicas"] == 4
    world.fail_program(cluster.extra_pods()[0])
    world.run_cycles(15)
    assert cluster.world.status["state"] == "Failed"
    assert world.objects[Resource.JOBS]["digits-extra"]["spec"]["suspend"]
    assert world.live_pods == []


def test_a_job_of_another_owner_keeps_the_name_and_is_named(cluster: Cluster) -> None:
    world = cluster.world
    other = {"name": "digits-extra", "labels": {names.LABEL_JOB: "digits-extra"}}
    owner = {"kind": names.KIND, "name": "digits-extra", "uid": "other"}
    world.objects[Resource.JOBS]["digits-extra"] = world.create(
        Resource.JOBS,
        {
            "metadata": {**other, "ownerReferences": [owner]},
            "spec": {"parallelism": 1, "suspend": True, "template": {}},
        },
    )
    world.submit(opportunistic=SPOT)
    world.deliver()
    world.cycle()
    running = cluster.world.condition("Running")
    assert running["reason"] == "NameConflict"
    assert running["message"] == (
        "Job digits-extra exists and belongs to AdaScaleJob digits-extra: rename one of the two AdaScaleJobs"
    )


def test_pods_that_find_no_node_do_not_outlive_the_program() -> None:
    made = job((1, 3), opportunistic=SETTINGS)
    extra = indexed_job(2, uid="extra-uid", first=1, of="digits")
    core = indexed_job(1, complete=True)
    waiting = [replace(WAITING, rank=rank) for rank in (1, 2)]
    ended = observed(made, view((1, 3), (1, 3), complete=True), core, waiting, extra_job=extra)
    assert actions_for(ended).delete_extra_job
    placed = replace(ended, pods=[pod(1), *waiting[1:]])
    assert not actions_for(placed).delete_extra_job, "its pods may be writing the program's last output"


@pytest.mark.parametrize(
    ("pods", "queue", "suspends", "deletes"),
    [
        # A pod that has failed, with its log, and the next one of its index, which finds no node.
        ([failed_pod(1), WAITING], None, True, False),
        ([failed_pod(1), WAITING], "spot", False, True),
        # It holds its devices, and has no output.
        ([replace(WAITING, node="node1")], None, False, True),
        # Another container runs on after its worker.
        ([pod(1, exit=PodExit(0, others=("proxy",)))], None, True, False),
        ([pod(1, exit=PodExit(0, others=("proxy",)))], "spot", False, True),
        ([pod(1)], None, False, False),
        ([pod(1, phase="Succeeded", exit=PodExit(0))], None, False, False),
    ],
)
def test_extra_pods_that_do_not_end_with_the_program_are_stopped(
    pods: list[Pod], queue: str | None, suspends: bool, deletes: bool
) -> None:
    extra = indexed_job(1, uid="extra-uid", first=1, of="digits", queue=queue)
    core = indexed_job(1, complete=True)
    ended = observed(job((1, 2), opportunistic=SETTINGS), view(complete=True), core, pods, extra_job=extra)
    actions = actions_for(ended)
    assert (actions.resize_extra_job == 0, actions.delete_extra_job) == (suspends, deletes)
    held = replace(ended, extra_job=replace(extra, suspended=True))
    assert not actions_for(held).resize_extra_job
    assert actions_for(held).delete_extra_job == deletes


@pytest.mark.parametrize(
    ("pods", "stops"),
    [([replace(WAITING, rank=0)], True), ([pod(0)], False), ([failed_pod(0), pod(1)], True)],
)
@pytest.mark.parametrize("queue", [None, "gpus"])
def test_a_core_pod_that_does_not_end_with_the_program_is_stopped(
    pods: list[Pod], stops: bool, queue: str | None
) -> None:
    extra = indexed_job(1, uid="extra-uid", first=1, of="digits", complete=True)
    core = indexed_job(1, queue=queue)
    ended = observed(job((1, 2), opportunistic=SETTINGS), view(complete=True), core, pods, extra_job=extra)
    actions = actions_for(ended)
    assert actions.status["state"] == "Complete"
    # Kueue would resume a Job that it has admitted.
    size = 0 if queue is None else 1
    assert actions.resize == (size if stops else None)
    assert actions.active_deadline_seconds == (END_DEADLINE if stops and queue is not None else None)
