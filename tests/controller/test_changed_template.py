"""A changed template: a pod of it has to start before the old pods are stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adascale_controller.job.placement_backoff import MAX_PAUSE
from adascale_controller.operator.apply.cluster import ApiServerError
from adascale_controller.operator.runtime import admission_reader
from adascale_controller.operator.types.actions import StoppedPod
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.operator.types.settings import QUEUE_NAME
from adascale_core.messages.allocation import ActiveAllocation
from controller.conftest import DecidedCount
from support.fake_cluster import FakeCluster
from support.world import World

Object = dict[str, Any]
WAITING: Object = {"reason": "ErrImagePull", "message": 'failed to pull "trainer:typo": not found'}


def trained() -> World:
    world = World()
    world.submit()
    world.run_cycles(20)
    return world


def edit(world: World, tag: int) -> None:
    world.edit(template={"spec": {"containers": [world.worker(tag)]}})


def running(world: World) -> tuple[str, str, str]:
    found = world.condition()
    return found["status"], found["reason"], found["message"]


def images(world: World) -> set[str]:
    return {raw["spec"]["containers"][0]["image"] for raw in world.live_pods}


def pending(waiting: Object) -> Object:
    return {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{"name": "worker", "image": "trainer:2", "state": {"waiting": waiting}}],
    }


def test_pods_are_replaced_once_a_pod_of_the_new_template_has_started() -> None:
    world = trained()
    edit(world, 2)
    world.run_cycles()
    assert images(world) == {"trainer:2"}
    assert running(world)[:2] == ("True", "Training")
    assert world.checks == {}


def test_training_continues_while_the_new_image_can_not_be_pulled() -> None:
    world = trained()
    world.check_status = pending(WAITING)
    pods = set(world.agents)
    edit(world, 2)
    world.run_cycles(30)
    assert set(world.agents) == pods
    status, reason, message = running(world)
    assert (status, reason) == ("True", "ImagePullFailed")
    assert message == (
        "spec.template or spec.stepTimeoutSeconds has changed. The present pods continue to train until "
        "a pod of the new template has started: container worker, image trainer:2: ErrImagePull: "
        'failed to pull "trainer:typo": not found'
    )
    (check,) = world.checks.values()
    # The typo is corrected.
    world.check_status = {"phase": "Succeeded"}
    edit(world, 3)
    world.run_cycles()
    assert images(world) == {"trainer:3"}
    assert check["metadata"]["name"] not in world.checks


def test_an_edit_that_is_undone_replaces_nothing() -> None:
    world = trained()
    world.check_status = pending(WAITING)
    pods = set(world.agents)
    edit(world, 2)
    world.run_cycles(5)
    assert len(world.checks) == 1
    edit(world, 1)
    world.run_cycles()
    assert set(world.agents) == pods
    assert running(world)[:2] == ("True", "Training")
    assert world.checks == {}, "the pod that could not start"


def test_a_check_ends_with_the_job_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = trained()
    world.check_status = pending(WAITING)
    edit(world, 2)
    world.run_cycles(5)
    stop, refusals = FakeCluster.stop_pod, [500]

    async def refuse_once(fake: FakeCluster, namespace: str, pod: StoppedPod) -> bool:
        if refusals and "check" in pod.name:
            raise ApiServerError("internal error", refusals.pop())
        return await stop(fake, namespace, pod)

    monkeypatch.setattr(FakeCluster, "stop_pod", refuse_once)
    world.edit(suspend=True)
    world.run_cycles()
    assert (world.checks, refusals) == ({}, [])


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


def test_an_image_without_the_agent_stops_nothing() -> None:
    world = trained()
    ended = {"exitCode": 128, "reason": "StartError", "message": 'exec: "adascale-agent": not found'}
    world.check_status = {
        "phase": "Failed",
        "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}],
    }
    pods = set(world.agents)
    edit(world, 2)
    world.run_cycles(30)
    assert set(world.agents) == pods
    assert running(world)[1] == "ContainerStartFailed"
    assert running(world)[2].endswith('its agent does not start: exec: "adascale-agent": not found')


@pytest.mark.parametrize("seconds", [0, admission_reader.UNSCHEDULABLE_TIMEOUT])
def test_a_check_that_finds_no_node_does_not_last(seconds: float) -> None:
    world = trained()
    full = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    world.check_status = {"phase": "Pending", "conditions": [full]}
    edit(world, 2)
    world.run_cycles(10)
    assert images(world) == {"trainer:1"}
    world.now += seconds
    world.run_cycles(30)
    assert images(world) == {"trainer:2" if seconds else "trainer:1"}


def test_where_a_policy_rejects_the_check_the_pods_are_replaced_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = FakeCluster.create_pod

    async def refuse(fake: FakeCluster, manifest: ApiObject) -> ApiObject | None:
        if "check" in manifest["metadata"]["name"]:
            raise ApiServerError("forbidden", 403)
        return await create(fake, manifest)

    monkeypatch.setattr(FakeCluster, "create_pod", refuse)
    world = trained()
    edit(world, 2)
    world.run_cycles()
    assert images(world) == {"trainer:2"}


def test_a_job_that_does_not_train_gets_its_new_template_at_once() -> None:
    world = trained()
    (name,) = world.agents
    world.fail_program(name)
    world.check_status = pending(WAITING)
    edit(world, 2)
    world.deliver()
    world.cycle()
    world.run_cycles()
    assert images(world) == {"trainer:2"}


def test_the_pod_requests_nothing_and_is_no_replica() -> None:
    world = World(types=["a100"])
    world.submit()
    world.run_cycles()
    world.check_status = pending(WAITING)
    edit(world, 2)
    world.run_cycles(5)
    (check,) = world.checks.values()
    (container,) = check["spec"]["containers"]
    assert container["command"] == ["adascale-agent", "--help"]
    assert "resources" not in container
    assert "adascale.dev/job" not in check["metadata"]["labels"]
    assert check["metadata"]["ownerReferences"][0]["kind"] == "AdaScaleJob"


# -- pod by pod --------------------------------------------------------------------------------------------


@pytest.fixture
def several(decided: DecidedCount) -> World:
    """A world whose job trains on three replicas."""
    decided.count = 3
    world = trained()
    assert len(world.agents) == 3
    return world


def active(world: World) -> ActiveAllocation:
    """Return the active generation."""
    found = world.service.state.active
    assert found is not None
    return found


def test_pods_are_replaced_one_by_one_while_the_others_train(several: World) -> None:
    world = several
    before, generations, messages = set(world.uids), set(), set()
    edit(world, 2)
    for _ in range(60):
        world.run_cycles(1)
        generations.add(active(world))
        messages.add(running(world)[2])
    assert images(world) == {"trainer:2"}
    assert len(world.live_pods) == 3
    assert not before & set(world.uids)
    # Each pod is a loss, and then a planned change. A generation of all three is active before the next.
    counts = [each.replicas for each in sorted(generations, key=lambda each: each.generation)]
    assert counts == [3, 2, 3, 2, 3, 2, 3]
    assert "Training on 3 replicas; 1 pod of the template before is left, replaced one by one" in messages
    assert world.status["failures"] == 0
    assert running(world)[:2] == ("True", "Training")
    edit(world, 3)
    world.run_cycles()
    assert images(world) == {"trainer:3"}
    assert active(world).replicas == 3


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


def test_all_pods_are_replaced_at_once_where_no_smaller_count_is_valid(several: World) -> None:
    world = several
    world.edit(minReplicas=3)
    world.run_cycles()
    edit(world, 2)
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
