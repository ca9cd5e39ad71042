"""A changed template: its pods join before those of the template before leave, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adascale_controller.job.placement_backoff import MAX_PAUSE
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.reconcile.job_phase import ROOM_TIMEOUT
from adascale_controller.operator.types.settings import QUEUE_NAME
from adascale_core.messages.allocation import ActiveAllocation
from controller.conftest import DecidedCount
from support.world import World

Object = dict[str, Any]


def trained() -> World:
    world = World()
    world.submit()
    world.run_cycles(20)
    return world


@pytest.fixture
def several(decided: DecidedCount) -> World:
    """A world whose job trains on three replicas."""
    decided.count = 3
    world = trained()
    assert len(world.agents) == 3
    return world


def edit(world: World, tag: int) -> None:
    world.edit(template={"spec": {"containers": [world.worker(tag)]}})


def running(world: World) -> tuple[str, str, str]:
    found = world.condition()
    return found["status"], found["reason"], found["message"]


def images(world: World) -> set[str]:
    return {raw["spec"]["containers"][0]["image"] for raw in world.live_pods}


def active(world: World) -> ActiveAllocation:
    """Return the active generation."""
    found = world.service.state.active
    assert found is not None
    return found


def replicas_while_replacing(world: World) -> tuple[list[int], set[str]]:
    """Return the replicas of each generation, and the messages of the condition Running."""
    generations, messages = set(), set()
    for _ in range(60):
        world.run_cycles(1)
        generations.add(active(world))
        messages.add(running(world)[2])
    ordered = sorted(generations, key=lambda each: each.generation)
    return [each.replicas for each in ordered], messages


@pytest.mark.parametrize("spec", [{}, {"minReplicas": 3}, {"spareReplicas": 1}])
def test_each_new_pod_joins_before_an_old_one_leaves(several: World, spec: Object) -> None:
    world = several
    world.edit(**spec)
    world.run_cycles()
    before, count = set(world.uids), len(world.live_pods)
    edit(world, 2)
    counts, messages = replicas_while_replacing(world)
    assert images(world) == {"trainer:2"}
    assert len(world.live_pods) == count
    assert not before & set(world.uids)
    # Each pod that leaves is a loss, and the spare takes its place at once.
    assert set(counts) == {3}
    left = "Training on 3 replicas; 1 pod of the template before is left, replaced one by one"
    assert left in messages
    assert world.status["failures"] == 0
    assert running(world)[:2] == ("True", "Training")
    edit(world, 3)
    assert set(replicas_while_replacing(world)[0]) == {3}
    assert images(world) == {"trainer:3"}


def test_no_second_pod_is_deleted_before_the_first_has_left(several: World) -> None:
    """The operator looks again before the pod that it has deleted has ended, and its agent has left."""
    world = several
    edit(world, 2)
    for _ in range(60):
        world.run_cycles(1)
        for _ in range(5):
            for name in list(world.agents):
                world.run_agent(name)
            world.deliver()
            world.cycle()
        leaving = [raw for raw in world.live_pods if "deletionTimestamp" in raw["metadata"]]
        assert len(leaving) <= 1
    assert images(world) == {"trainer:2"}
    assert active(world).replicas == 3


def test_a_pod_waits_for_room_for_its_own_time(several: World) -> None:
    """The time of an earlier pod of the same change does not count for one that finds no place at once."""
    world = several
    world.edit(minReplicas=3)
    world.run_cycles()
    edit(world, 2)
    first = active(world).indices
    while active(world).indices == first:
        world.run_cycles(1)
    world.now += ROOM_TIMEOUT - 3
    world.node_slots = 3
    world.run_cycles(2)
    assert active(world).replicas == 3
    world.node_slots = 100
    world.run_cycles(60)
    assert images(world) == {"trainer:2"}


def test_a_quota_that_was_used_up_before_the_change_does_not_count(several: World) -> None:
    world = several
    world.edit(minReplicas=3)

    def admit(pod: Object) -> Object:
        if len(world.live_pods) >= 3 and "generateName" not in pod["metadata"]:
            raise ApiServerError("pods is forbidden: exceeded quota: gpus", 403, "exceeded quota: gpus")
        return pod

    world.admit = admit
    world.edit(spareReplicas=1)
    world.run_cycles()
    world.edit(spareReplicas=0)
    world.run_cycles()
    world.admit = lambda pod: pod
    edit(world, 2)
    counts, _ = replicas_while_replacing(world)
    assert set(counts) == {3}
    assert images(world) == {"trainer:2"}


def test_without_room_for_one_more_pod_an_old_one_leaves_first(several: World) -> None:
    world = several
    world.node_slots = 3
    before = set(world.uids)
    edit(world, 2)
    world.run_cycles(20)
    assert before < set(world.uids)
    counts = []
    for _ in range(4):
        world.now += ROOM_TIMEOUT
        counts += replicas_while_replacing(world)[0]
    assert images(world) == {"trainer:2"}
    assert set(counts) == {2, 3}
    assert active(world).indices == {0, 1, 2}
    assert len(world.live_pods) == 3


@pytest.mark.parametrize("reason", ["exceeded quota: gpus", "violates PodSecurity"])
def test_a_pod_that_is_not_created_leaves_the_others_unless_a_quota_is_used_up(
    several: World, reason: str
) -> None:
    world = several
    before = set(world.uids)

    def admit(pod: Object) -> Object:
        if len(world.live_pods) >= 3 and "generateName" not in pod["metadata"]:
            raise ApiServerError(f"pods is forbidden: {reason}", 403, reason)
        return pod

    world.admit = admit
    edit(world, 2)
    world.run_cycles(90)
    replaced = "quota" in reason
    assert images(world) == {"trainer:2" if replaced else "trainer:1"}
    assert (set(world.uids) == before) is not replaced
    assert active(world).replicas == 3
    if not replaced:
        assert running(world)[:2] == ("True", "PodCreationFailed")


def test_replicas_of_several_processes_are_replaced_one_by_one_without_a_spare(several: World) -> None:
    world = several
    world.edit(processesPerReplica=2)
    world.run_cycles()
    edit(world, 2)
    counts, _ = replicas_while_replacing(world)
    assert images(world) == {"trainer:2"}
    assert set(counts) == {2, 3}


def test_training_continues_while_the_new_image_can_not_be_pulled() -> None:
    world = trained()
    world.missing_image = "trainer:2"
    pods = set(world.agents)
    edit(world, 2)
    world.now += ROOM_TIMEOUT
    world.run_cycles(30)
    assert set(world.agents) == pods
    status, reason, message = running(world)
    assert (status, reason) == ("True", "ImagePullFailed")
    assert message == (
        "Training on 1 replica; 1 pod of the template before is left, replaced one by one: container worker, "
        "image trainer:2: ErrImagePull: not found"
    )
    # The typo is corrected.
    edit(world, 3)
    world.run_cycles()
    assert images(world) == {"trainer:3"}


def test_an_edit_that_is_undone_replaces_nothing() -> None:
    world = trained()
    world.missing_image = "trainer:2"
    pods = set(world.agents)
    edit(world, 2)
    world.run_cycles(5)
    assert len(world.live_pods) == 2
    edit(world, 1)
    world.run_cycles()
    assert set(world.agents) == pods
    assert len(world.live_pods) == 1
    assert running(world)[:2] == ("True", "Training")


def test_a_job_that_does_not_train_gets_its_new_template_at_once() -> None:
    world = trained()
    (name,) = world.agents
    world.fail_program(name)
    edit(world, 2)
    world.deliver()
    world.cycle()
    world.run_cycles()
    assert images(world) == {"trainer:2"}


def test_a_queue_name_that_is_set_while_pods_are_replaced_replaces_all_pods(several: World) -> None:
    world = several
    before = set(world.uids)
    edit(world, 2)
    while len(before & set(world.uids)) == 3:
        world.run_cycles(1)
    world.enter_queue()
    world.run_cycles()
    assert not before & set(world.uids)
    assert {raw["metadata"]["labels"][QUEUE_NAME] for raw in world.live_pods} == {"team"}


@pytest.mark.parametrize("fail", [World.fail_program, World.refuse_replica])
def test_all_pods_are_replaced_if_those_of_the_new_template_can_not_join(
    several: World, fail: Callable[[World, str], None]
) -> None:
    world = several
    before, messages = set(world.uids), set()
    edit(world, 2)
    for _ in range(60):
        world.run_cycles(1)
        messages.add(running(world)[2])
        for uid in world.uids.keys() - before:
            if before & world.uids.keys() and world.uids[uid] in world.agents:
                fail(world, world.uids[uid])
    assert images(world) == {"trainer:2"}
    assert active(world).replicas == 3
    changed = "spec.template or spec.stepTimeoutSeconds has changed"
    assert f"{changed}: saving state, then replacing all pods" in messages


def test_all_pods_are_replaced_at_once_without_room_where_no_smaller_count_is_valid(several: World) -> None:
    world = several
    world.edit(minReplicas=3)
    world.node_slots = 3
    world.run_cycles()
    edit(world, 2)
    world.run_cycles(5)
    assert "trainer:1" in images(world)
    world.now += ROOM_TIMEOUT
    world.run_cycles()
    assert images(world) == {"trainer:2"}


def test_pods_stay_if_the_api_server_rejects_those_of_the_new_template(several: World) -> None:
    world = several
    before, reply = set(world.uids), "spec.initContainers[0].image: Required value"

    def admit(pod: Object) -> Object:
        if pod["spec"]["containers"][0]["image"] == "trainer:2":
            raise ApiServerError("invalid", 422, reply)
        return pod

    world.admit = admit
    edit(world, 2)
    world.run_cycles()
    assert set(world.uids) == before
    status, reason, message = running(world)
    assert (status, reason) == ("True", "InvalidSpec")
    assert reply in message
    edit(world, 3)
    world.run_cycles()
    assert images(world) == {"trainer:3"}


def test_no_second_pod_is_replaced_while_the_first_finds_no_place(several: World) -> None:
    world = several
    before = set(world.uids)
    edit(world, 2)
    world.node_slots = 3
    world.run_cycles(1)
    world.now += ROOM_TIMEOUT
    while len(before & set(world.uids)) == 3:
        world.run_cycles(1)
    world.node_slots = 2
    world.run_cycles(30)
    assert len(before & set(world.uids)) == 2
    world.node_slots = 100
    world.now += MAX_PAUSE
    world.run_cycles(90)
    assert images(world) == {"trainer:2"}
    assert active(world).replicas == 3
