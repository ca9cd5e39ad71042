"""A changed template: its pods join before those of the template before leave, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adascale_controller.job.placement_backoff import MAX_PAUSE
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.reconcile.job_phase import ROOM_TIMEOUT
from adascale_controller.operator.types.settings import QUEUE_NAME
from adascale_core.failures import EXIT_REFUSED, TerminationMessage
from adascale_core.messages.allocation import ActiveAllocation
from controller.conftest import DecidedCount
from support.fake_cluster import FakeCluster

Object = dict[str, Any]
CHANGED = "spec.template or spec.stepTimeoutSeconds has changed: 1 pod left to replace, one by one"


def trained() -> FakeCluster:
    cluster = FakeCluster()
    cluster.submit()
    cluster.run_cycles(20)
    return cluster


@pytest.fixture
def several(decided: DecidedCount) -> FakeCluster:
    """A cluster whose job trains on three replicas."""
    decided.count = 3
    cluster = trained()
    assert len(cluster.agents) == 3
    return cluster


def edit(cluster: FakeCluster, tag: int) -> None:
    cluster.edit(template={"spec": {"containers": [cluster.worker(tag)]}})


def running(cluster: FakeCluster) -> tuple[str, str, str]:
    found = cluster.condition()
    return found["status"], found["reason"], found["message"]


def images(cluster: FakeCluster) -> set[str]:
    return {raw["spec"]["containers"][0]["image"] for raw in cluster.live_pods}


def active(cluster: FakeCluster) -> ActiveAllocation:
    """Return the active generation."""
    found = cluster.service.state.active
    assert found is not None
    return found


def replicas_while_replacing(cluster: FakeCluster) -> tuple[list[int], set[str]]:
    """Return the replicas of each generation, and the messages of the condition Running."""
    generations, messages = set(), set()
    for _ in range(60):
        cluster.run_cycles(1)
        generations.add(active(cluster))
        messages.add(running(cluster)[2])
    ordered = sorted(generations, key=lambda each: each.generation)
    return [each.replicas for each in ordered], messages


@pytest.mark.parametrize("spec", [{}, {"minReplicas": 3}, {"spareReplicas": 1}])
def test_each_new_pod_joins_before_an_old_one_leaves(several: FakeCluster, spec: Object) -> None:
    cluster = several
    cluster.edit(**spec)
    cluster.run_cycles()
    before, count = set(cluster.uids), len(cluster.live_pods)
    edit(cluster, 2)
    counts, messages = replicas_while_replacing(cluster)
    assert images(cluster) == {"trainer:2"}
    assert len(cluster.live_pods) == count
    assert not before & set(cluster.uids)
    # Each pod that leaves is a loss, and the spare takes its place at once.
    assert set(counts) == {3}
    left = f"Training on 3 replicas; {CHANGED}"
    assert left in messages
    assert cluster.status["failures"] == 0
    assert running(cluster)[:2] == ("True", "Training")
    edit(cluster, 3)
    assert set(replicas_while_replacing(cluster)[0]) == {3}
    assert images(cluster) == {"trainer:3"}


def test_no_second_pod_is_deleted_before_the_first_has_left(several: FakeCluster) -> None:
    """The operator looks again before the pod that it has deleted has ended, and its agent has left."""
    cluster = several
    edit(cluster, 2)
    for _ in range(60):
        cluster.run_cycles(1)
        for _ in range(5):
            for name in list(cluster.agents):
                cluster.run_agent(name)
            cluster.deliver()
            cluster.cycle()
        leaving = [raw for raw in cluster.live_pods if "deletionTimestamp" in raw["metadata"]]
        assert len(leaving) <= 1
    assert images(cluster) == {"trainer:2"}
    assert active(cluster).replicas == 3


def test_a_pod_waits_for_room_for_its_own_time(several: FakeCluster) -> None:
    """The time of an earlier pod of the same change does not count for one that finds no place at once."""
    cluster = several
    cluster.edit(minReplicas=3)
    cluster.run_cycles()
    edit(cluster, 2)
    first = active(cluster).indices
    while active(cluster).indices == first:
        cluster.run_cycles(1)
    cluster.now += ROOM_TIMEOUT - 3
    cluster.node_slots = 3
    cluster.run_cycles(2)
    assert active(cluster).replicas == 3
    cluster.node_slots = 100
    cluster.run_cycles(60)
    assert images(cluster) == {"trainer:2"}


def test_a_quota_that_was_used_up_before_the_change_does_not_count(several: FakeCluster) -> None:
    cluster = several
    cluster.edit(minReplicas=3)

    def admit(pod: Object) -> Object:
        if len(cluster.live_pods) >= 3 and "generateName" not in pod["metadata"]:
            raise ApiServerError("pods is forbidden: exceeded quota: gpus", 403, "exceeded quota: gpus")
        return pod

    cluster.admit = admit
    cluster.edit(spareReplicas=1)
    cluster.run_cycles()
    cluster.edit(spareReplicas=0)
    cluster.run_cycles()
    cluster.admit = lambda pod: pod
    edit(cluster, 2)
    counts, _ = replicas_while_replacing(cluster)
    assert set(counts) == {3}
    assert images(cluster) == {"trainer:2"}


def test_without_room_for_one_more_pod_an_old_one_leaves_first(several: FakeCluster) -> None:
    cluster = several
    cluster.node_slots = 3
    before = set(cluster.uids)
    edit(cluster, 2)
    cluster.run_cycles(20)
    assert before < set(cluster.uids)
    counts = []
    for _ in range(4):
        cluster.now += ROOM_TIMEOUT
        counts += replicas_while_replacing(cluster)[0]
    assert images(cluster) == {"trainer:2"}
    assert set(counts) == {2, 3}
    assert active(cluster).indices == {0, 1, 2}
    assert len(cluster.live_pods) == 3


@pytest.mark.parametrize("reason", ["exceeded quota: gpus", "violates PodSecurity"])
def test_a_pod_that_is_not_created_leaves_the_others_unless_a_quota_is_used_up(
    several: FakeCluster, reason: str
) -> None:
    cluster = several
    before = set(cluster.uids)

    def admit(pod: Object) -> Object:
        if len(cluster.live_pods) >= 3 and "generateName" not in pod["metadata"]:
            raise ApiServerError(f"pods is forbidden: {reason}", 403, reason)
        return pod

    cluster.admit = admit
    edit(cluster, 2)
    cluster.run_cycles(90)
    replaced = "quota" in reason
    assert images(cluster) == {"trainer:2" if replaced else "trainer:1"}
    assert (set(cluster.uids) == before) is not replaced
    assert active(cluster).replicas == 3
    if not replaced:
        assert running(cluster)[:2] == ("True", "PodCreationFailed")


def test_replicas_of_several_processes_are_replaced_one_by_one_without_a_spare(
    several: FakeCluster,
) -> None:
    cluster = several
    cluster.edit(processesPerReplica=2)
    cluster.run_cycles()
    edit(cluster, 2)
    counts, _ = replicas_while_replacing(cluster)
    assert images(cluster) == {"trainer:2"}
    assert set(counts) == {2, 3}


def test_training_continues_while_the_new_image_can_not_be_pulled() -> None:
    cluster = trained()
    cluster.missing_image = "trainer:2"
    pods = set(cluster.agents)
    edit(cluster, 2)
    cluster.now += ROOM_TIMEOUT
    cluster.run_cycles(30)
    assert set(cluster.agents) == pods
    status, reason, message = running(cluster)
    assert (status, reason) == ("True", "ImagePullFailed")
    assert message == (
        f"Training on 1 replica; {CHANGED}: container worker, image trainer:2: ErrImagePull: not found"
    )
    # The typo is corrected.
    edit(cluster, 3)
    cluster.run_cycles()
    assert images(cluster) == {"trainer:3"}


def test_an_edit_that_is_undone_replaces_nothing() -> None:
    cluster = trained()
    cluster.missing_image = "trainer:2"
    pods = set(cluster.agents)
    edit(cluster, 2)
    cluster.run_cycles(5)
    assert len(cluster.live_pods) == 2
    edit(cluster, 1)
    cluster.run_cycles()
    assert set(cluster.agents) == pods
    assert len(cluster.live_pods) == 1
    assert running(cluster)[:2] == ("True", "Training")


def test_a_job_that_does_not_train_gets_its_new_template_at_once() -> None:
    cluster = trained()
    (name,) = cluster.agents
    cluster.fail_program(name)
    edit(cluster, 2)
    cluster.deliver()
    cluster.cycle()
    cluster.run_cycles()
    assert images(cluster) == {"trainer:2"}


def test_a_queue_name_that_is_set_while_pods_are_replaced_replaces_all_pods(several: FakeCluster) -> None:
    cluster = several
    before = set(cluster.uids)
    edit(cluster, 2)
    while len(before & set(cluster.uids)) == 3:
        cluster.run_cycles(1)
    cluster.enter_queue()
    cluster.run_cycles()
    assert not before & set(cluster.uids)
    assert {raw["metadata"]["labels"][QUEUE_NAME] for raw in cluster.live_pods} == {"team"}


def refuse_replica(cluster: FakeCluster, name: str) -> None:
    """Have the metrics service refuse a replica of another version: its agent gives up."""
    message = TerminationMessage(0, EXIT_REFUSED, "replica has adascale 2, but others have 1").to_text()
    cluster.end_pod(name, {"exitCode": EXIT_REFUSED, "reason": "Error", "message": message})


@pytest.mark.parametrize("fail", [FakeCluster.fail_program, refuse_replica])
def test_all_pods_are_replaced_if_those_of_the_new_template_can_not_join(
    several: FakeCluster, fail: Callable[[FakeCluster, str], None]
) -> None:
    cluster = several
    before, messages = set(cluster.uids), set()
    edit(cluster, 2)
    for _ in range(60):
        cluster.run_cycles(1)
        messages.add(running(cluster)[2])
        for uid in cluster.uids.keys() - before:
            if before & cluster.uids.keys() and cluster.uids[uid] in cluster.agents:
                fail(cluster, cluster.uids[uid])
    assert images(cluster) == {"trainer:2"}
    assert active(cluster).replicas == 3
    changed = "spec.template or spec.stepTimeoutSeconds has changed"
    assert f"{changed}: saving state, then replacing all pods" in messages


def test_all_pods_are_replaced_at_once_without_room_where_no_smaller_count_is_valid(
    several: FakeCluster,
) -> None:
    cluster = several
    cluster.edit(minReplicas=3)
    cluster.node_slots = 3
    cluster.run_cycles()
    edit(cluster, 2)
    cluster.run_cycles(5)
    assert "trainer:1" in images(cluster)
    cluster.now += ROOM_TIMEOUT
    cluster.run_cycles()
    assert images(cluster) == {"trainer:2"}


def test_pods_stay_if_the_api_server_rejects_those_of_the_new_template(several: FakeCluster) -> None:
    cluster = several
    before, reply = set(cluster.uids), "spec.initContainers[0].image: Required value"

    def admit(pod: Object) -> Object:
        if pod["spec"]["containers"][0]["image"] == "trainer:2":
            raise ApiServerError("invalid", 422, reply)
        return pod

    cluster.admit = admit
    edit(cluster, 2)
    cluster.run_cycles()
    assert set(cluster.uids) == before
    status, reason, message = running(cluster)
    assert (status, reason) == ("True", "InvalidSpec")
    assert reply in message
    edit(cluster, 3)
    cluster.run_cycles()
    assert images(cluster) == {"trainer:3"}


def test_no_second_pod_is_replaced_while_the_first_finds_no_place(several: FakeCluster) -> None:
    cluster = several
    before = set(cluster.uids)
    edit(cluster, 2)
    cluster.node_slots = 3
    cluster.run_cycles(1)
    cluster.now += ROOM_TIMEOUT
    while len(before & set(cluster.uids)) == 3:
        cluster.run_cycles(1)
    cluster.node_slots = 2
    cluster.run_cycles(30)
    assert len(before & set(cluster.uids)) == 2
    cluster.node_slots = 100
    cluster.now += MAX_PAUSE
    cluster.run_cycles(90)
    assert images(cluster) == {"trainer:2"}
    assert active(cluster).replicas == 3
