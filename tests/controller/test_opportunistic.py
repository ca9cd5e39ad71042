"""Replicas beyond the smallest count run in an Indexed Job of their own, of a lower priority."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.job_definition import JobDefinition, OpportunisticSettings
from adascale_controller.local.local_command import resolve_command
from adascale_controller.operator.apply.indexed_job import indexed_job_manifest
from adascale_controller.operator.observe.observed_job import Admission, ObservedJob
from adascale_controller.operator.observe.pods import read_pod
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.conditions import ConditionType
from adascale_controller.operator.types.kubernetes import COMPLETION_INDEX, Resource
from adascale_controller.operator.types.workload import (
    ELASTIC_JOB,
    QUEUE_NAME,
    PodSettings,
    Workload,
    template_digest,
)
from adascale_controller.validation import validate_document
from adascale_core import names
from adascale_core.messages.job_spec import JobSpec
from adascale_core.views.decision import LimitKind, LimitView
from controller.conftest import QUEUED, SETTINGS, SPOT, Cluster
from support.observed_jobs import (
    NOW,
    SPEC,
    actions_for,
    condition,
    indexed_job,
    job,
    observed,
    pod,
    view,
)
from support.world import GPU

Object = dict[str, Any]


# -- the two Indexed Jobs ----------------------------------------------------------------------------------


def test_extra_pods_have_their_own_job_priority_indices_and_queue() -> None:
    template = {
        "spec": {
            "containers": [{"name": "worker", "image": "trainer:1"}],
            "priorityClassName": "high",
            "preemptionPolicy": "Never",
        }
    }
    spec = JobSpec(4, 256, (4, 64), 2, 8)
    settings = replace(SETTINGS, queue_name="team-queue")
    made_of = Workload(
        "digits",
        "team",
        "b7d1",
        JobDefinition("team.digits", spec, opportunistic=settings, active_deadline_seconds=60),
        template,
        5,
        PodSettings("http://api"),
    )
    core = indexed_job_manifest(made_of, 2, suspend=False, single_node=False)
    extra = indexed_job_manifest(made_of, 3, suspend=False, single_node=False, extra=True)
    assert (core["metadata"]["name"], extra["metadata"]["name"]) == ("digits", "digits-extra")
    assert (core["spec"]["activeDeadlineSeconds"], extra["spec"].get("activeDeadlineSeconds")) == (60, None)
    assert QUEUE_NAME not in core["metadata"]["labels"]
    assert extra["metadata"]["labels"][QUEUE_NAME] == "team-queue"
    assert extra["metadata"]["annotations"][ELASTIC_JOB] == "true"
    for made, first, priority in ((core, "0", "high"), (extra, "2", "spot")):
        pod_spec = made["spec"]["template"]["spec"]
        (container,) = pod_spec["containers"]
        environment = {each["name"]: each.get("value") for each in container["env"]}
        assert environment[names.ENV_FIRST_REPLICA] == first
        assert pod_spec["priorityClassName"] == priority
    assert core["spec"]["template"]["spec"]["preemptionPolicy"] == "Never"
    assert "preemptionPolicy" not in extra["spec"]["template"]["spec"]


def test_the_rank_of_an_extra_pod_is_counted_after_the_core() -> None:
    marks = {COMPLETION_INDEX: "1", names.ANNOTATION_FIRST_REPLICA: "2"}
    meta = {"name": "digits-extra-1", "uid": "a", "annotations": marks}
    assert read_pod({"metadata": meta, "spec": {"containers": [{"name": "worker"}]}}).rank == 3


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"spec": replace(SPEC, max_replicas=6)}, True),
        ({"spec": replace(SPEC, min_replicas=2)}, False),
        ({"opportunistic": OpportunisticSettings("other")}, False),
        ({"opportunistic": None}, False),
    ],
)
def test_an_edit_of_the_core_or_of_its_class_replaces_all_pods(changes: Object, same: bool) -> None:
    before = JobDefinition("team.digits", SPEC, opportunistic=SETTINGS)

    def digest(made: JobDefinition) -> str:
        workload = Workload("digits", "team", "b7d1", made, {"spec": {}}, 5, PodSettings("http://api"))
        return template_digest(workload, single_node=False)

    assert (digest(before) == digest(replace(before, **changes))) is same


def test_a_job_grows_by_extra_pods_and_gives_them_back(cluster: Cluster) -> None:
    cluster.world.submit(minReplicas=2, opportunistic=SPOT)
    cluster.world.run_cycles(15)
    assert cluster.sizes == {"digits": 2, "digits-extra": 2}
    assert (cluster.world.status["replicas"], cluster.world.status["extraReplicas"]) == (4, 2)
    core = {raw["metadata"]["uid"] for raw in cluster.world.live_pods if raw["spec"]["priority"] == 100}
    cluster.decide(3)
    assert cluster.sizes == {"digits": 2, "digits-extra": 1}
    cluster.decide(2)
    assert cluster.sizes == {"digits": 2}
    assert (cluster.world.status["replicas"], cluster.world.status["extraReplicas"]) == (2, 0)
    assert {raw["metadata"]["uid"] for raw in cluster.world.live_pods} == core
    cluster.decide(4)
    assert cluster.sizes == {"digits": 2, "digits-extra": 2}
    assert (cluster.world.status["disruptions"], cluster.world.status["failures"]) == (0, 0)


# -- losses ------------------------------------------------------------------------------------------------


def test_extra_pods_that_are_taken_leave_the_core_as_it_is(cluster: Cluster) -> None:
    world = cluster.world
    world.submit(opportunistic=SPOT)
    world.run_cycles(15)
    world.node_slots = 1
    for name in cluster.extra_pods():
        world.terminate_pod(name)
    world.run_cycles(5)
    assert cluster.sizes["digits"] == 1
    assert cluster.world.status["replicas"] == 1
    reasons = [event.reason for event in world.events]
    assert "ExtraPodsTaken" in reasons
    assert "ReplicaLost" not in reasons
    cluster.decide(1)
    assert cluster.sizes == {"digits": 1}
    world.node_slots = 4
    cluster.decide(4)
    assert (cluster.world.status["replicas"], cluster.world.status["failures"]) == (4, 0)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_lost_core_pod_is_replaced_while_extra_pods_train(cluster: Cluster, restarts: bool) -> None:
    world = cluster.world
    world.submit(opportunistic=SPOT)
    world.run_cycles(15)
    extra = set(cluster.extra_pods())
    world.evict_pod(next(name for name in world.agents if name not in extra))
    if restarts:
        world.start_operator()
    world.run_cycles(15)
    assert cluster.world.status["replicas"] == 4
    assert set(cluster.extra_pods()) == extra
    assert [event.reason for event in world.events].count("ReplicaLost") == 1


def test_a_core_whose_job_is_deleted_is_made_again_beside_the_extra_pods(cluster: Cluster) -> None:
    world = cluster.world
    world.submit(opportunistic=SPOT)
    world.run_cycles(15)
    extra = set(cluster.extra_pods())
    world.delete(Resource.JOBS, "digits")
    world.run_cycles(15)
    assert cluster.sizes == {"digits": 1, "digits-extra": 3}
    assert set(cluster.extra_pods()) == extra


def test_no_pod_is_removed_before_its_trainer_has_left_when_extra_pods_are_introduced() -> None:
    made = job((2, 0), opportunistic=SETTINGS)
    before = indexed_job(3, digest="without-extra-pods")
    stopping = observed(made, view((2, 0), (1, 3)), before)
    actions = actions_for(stopping)
    assert (actions.resize, actions.create_extra_job, actions.delete_indexed_job) == (None, None, False)
    left = replace(stopping, service=view((2, 0)))
    assert actions_for(left).delete_indexed_job


def test_extra_pods_save_their_state_when_the_core_is_evicted_from_its_queue() -> None:
    made = replace(job((2, 0), opportunistic=SETTINGS), queueing=QUEUED)
    held = indexed_job(
        1, suspended=True, suspended_by_operator=False, queue="gpus", queue_request=QUEUED.request
    )
    extra = indexed_job(2, uid="extra-uid", first=1, of="digits")
    pods = [pod(rank) for rank in (1, 2)]
    leaving = observed(made, view((2, 0), (1, 3), running=(1, 2)), held, pods, extra_job=extra)
    actions = actions_for(leaving)
    assert (actions.delete_extra_job, actions.resize_extra_job) == (False, None)
    assert actions_for(replace(leaving, service=view((2, 0)))).delete_extra_job


def test_no_two_pods_have_the_index_of_a_replica_after_a_job_was_deleted() -> None:
    """As `kubectl delete job` does: the Job is gone at once, and its pods save their state."""
    core, extra = indexed_job(1), indexed_job(2, uid="extra-uid", first=1, of="digits")
    made, service = job((1, 3), opportunistic=SETTINGS), view((1, 3), (1, 3))
    without_extra = observed(made, service, core, [pod(0)], leaving=[pod(1), pod(2)])
    assert actions_for(without_extra, 3).create_extra_job is None
    assert actions_for(replace(without_extra, leaving=()), 3).create_extra_job == 2
    without_core = observed(made, service, None, [pod(1), pod(2)], extra_job=extra, leaving=[pod(0)])
    actions = actions_for(without_core, 3)
    assert (actions.create_indexed_job, actions.delete_extra_job) == (None, False)
    running = condition(actions, ConditionType.RUNNING)
    assert running.message.startswith("Waiting for 1 pod of an earlier Job digits to end (digits-0)")
    assert actions_for(replace(without_core, leaving=[pod(5)]), 3).create_indexed_job == 1


def test_pods_of_a_deleted_job_are_known_until_they_end(cluster: Cluster) -> None:
    world = cluster.world
    world.submit(opportunistic=SPOT)
    world.run_cycles(15)
    before = set(cluster.extra_pods())
    world.delete(Resource.JOBS, "digits-extra")
    world.deliver()
    world.cycle()
    assert cluster.sizes == {"digits": 1}, "the pods of the Job before have not ended"
    world.run_cycles(15)
    assert cluster.sizes == {"digits": 1, "digits-extra": 3}
    assert not before & set(cluster.extra_pods())


def test_extra_pods_that_are_introduced_while_pods_change_their_job_replace_all(cluster: Cluster) -> None:
    world = cluster.world
    world.submit()
    world.run_cycles(15)
    world.edit(template={"spec": {"containers": [world.worker(2)]}})
    while "deletionTimestamp" not in world.objects[Resource.JOBS]["digits"]["metadata"]:
        world.run_cycles(1)
    world.edit(opportunistic=SPOT)
    world.run_cycles()
    assert cluster.sizes == {"digits": 1, "digits-extra": 3}
    assert {raw["spec"]["containers"][0]["image"] for raw in world.live_pods} == {"trainer:2"}
    assert cluster.world.status["replicas"] == 4


def test_no_job_adopts_the_pods_of_two(cluster: Cluster) -> None:
    """As after `kubectl delete jobs --cascade=orphan`."""
    world = cluster.world
    world.submit(opportunistic=SPOT)
    world.run_cycles(15)
    for name in ("digits", "digits-extra"):
        world.delete(Resource.JOBS, name)
    for raw in list(world.objects[Resource.PODS].values()):
        assert world.job is not None
        owner = {"kind": names.KIND, "uid": world.job["metadata"]["uid"]}
        world.write(Resource.PODS, {**raw, "metadata": {**raw["metadata"], "ownerReferences": [owner]}})
    world.run_cycles(3)
    assert cluster.sizes == {}
    assert cluster.world.condition("Running")["reason"] == "CleaningUp"


# -- the decision ------------------------------------------------------------------------------------------


def test_a_job_waits_for_the_extra_pods_of_a_job_whose_core_has_a_higher_priority() -> None:
    template = {"spec": {"containers": [{"name": "worker", "resources": {"limits": {GPU: "1"}}}]}}
    node = {
        "metadata": {"name": "node1", "resourceVersion": "1"},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {GPU: "2", "pods": "9"},
        },
    }

    def admitted(priority: int, extra: int | None = None) -> Admission:
        return Admission({**template["spec"], "priority": priority}, extra_priority=extra)

    def opportunistic(*ranks: int) -> ObservedJob:
        made = replace(job((1, 2), opportunistic=SETTINGS), template=template)
        jobs = {"extra_job": indexed_job(1, uid="extra-uid", first=1, of="digits")}
        return observed(
            made,
            view((1, 2), (1, 2)),
            indexed_job(1),
            [pod(rank) for rank in ranks],
            admission=admitted(1000, -10),
            **jobs,
        )

    later = replace(job(spec=replace(SPEC, max_replicas=1)), name="later", uid="later", template=template)
    later = replace(later, job=replace(later.valid_job, id=later.id), created_at=int(NOW) + 1)
    scheduler = Scheduler()
    scheduler.set_resources([node], ())
    for each in (opportunistic(0, 1), observed(later, admission=admitted(500))):
        scheduler.update(each)
    scheduler.adopt(scheduler.solve(scheduler.decision_input()), NOW)
    first, second = (scheduler.decision(f"team.{name}") for name in ("digits", "later"))
    assert first is not None
    assert second is not None
    assert first.replicas == 1, "the smallest count of a job comes before the extra pods of another"
    assert second.reason.startswith("Waiting for replicas of team.digits, which has a lower priority")
    explained = next(each for each in scheduler.explain() if each.job == "team.digits")
    assert explained.limits[-1] == LimitView(
        LimitKind.PRIORITY,
        "beyond 1 replica it has extra pods, of PriorityClass spot, which pods of higher priority may take "
        "at any time",
    )
    scheduler.update(opportunistic(0))
    after = scheduler.decision("team.later")
    assert after is not None
    assert after.replicas == 1


# -- fields ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "opportunistic", "message"),
    [
        ("a" * 52, {"priorityClassName": "spot", "queueName": "team"}, None),
        (
            "a" * 53,
            SPOT,
            "metadata.name: must have at most 52 characters with spec.opportunistic, since the Job of the "
            f"extra pods is named {'a' * 53}-extra, got 53",
        ),
        ("a" * 53, None, None),
        ("a", {}, "spec.opportunistic.priorityClassName: is required"),
        (
            "a",
            {"priorityClassName": "Spot"},
            "spec.opportunistic.priorityClassName: must match ",
        ),
        (
            "a",
            {**SPOT, "queue": "team"},
            "spec.opportunistic.queue: unknown field; did you mean queueName?",
        ),
    ],
)
def test_fields_are_checked(name: str, opportunistic: Object | None, message: str | None) -> None:
    content = {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "batchSize": 4,
            "maxReplicas": 2,
            "opportunistic": opportunistic,
            "template": {"spec": {"containers": [{"name": "worker", "image": "trainer:1"}]}},
        },
    }
    found = validate_document(content)
    errors = "; ".join(map(str, found)) if isinstance(found, list) else None
    if message is None:
        assert errors is None
    else:
        assert errors is not None
        assert errors.startswith(message)


def test_one_machine_says_that_it_has_no_extra_pods(tmp_path: Any) -> None:
    made = JobDefinition("default.digits", SPEC, command=("python", "-V"), opportunistic=SETTINGS)
    command = resolve_command(made, tmp_path, {}, threads=1)
    assert command.ignored == ("spec.opportunistic, since there are extra pods on a cluster only",)
