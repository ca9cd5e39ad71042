"""A slow replica in the operator: the condition, its Event, and the node that is avoided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.types.avoided_node import FIRST_PAUSE, MAX_PAUSE, AvoidedNode
from adascale_controller.operator.types.conditions import ConditionType, condition_of
from adascale_controller.operator.types.kubernetes import Resource
from adascale_core.decision.decide import Decision, DecisionProblem
from adascale_core.messages.reports import GainReport
from adascale_core.names import ANNOTATION_AVOIDED_NODE, DEFAULT_ACCELERATOR_LABEL
from support.observed_jobs import (
    actions_for,
    condition,
    observed,
    report,
    training_job,
    with_status,
)
from support.world import GPU, World

SLOW = ConditionType.SLOW_REPLICA


def with_slow(job: ObservedJob, replica: int | None, factor: float | None = 1.25) -> ObservedJob:
    """Return a job whose latest report names a slow replica."""
    assert job.service is not None
    latest = replace(report(1, 2), slow_replica=replica, slow_factor=factor if replica is not None else None)
    return replace(job, service=replace(job.service, latest=latest))


def test_a_slow_replica_is_named_in_the_condition_and_in_one_event() -> None:
    job = training_job()
    assert condition_of(actions_for(job, 2).status, SLOW) is None
    actions = actions_for(with_slow(job, 1), 2)
    found = condition(actions, SLOW)
    pod = job.live_pods[1]
    assert (found.status, found.reason) == (True, "ReplicaSlow")
    assert found.message == (
        f"Replica 1 (pod {pod.name}, node {pod.node}) is slow: in each step it computes 1.25 times as long "
        "as the others, which wait for it"
    )
    (event,) = (each for each in actions.events if each.reason == "ReplicaSlow")
    assert (event.message, event.warning) == (found.message, True)
    # The factor changes with each report. That is no other status.
    later = actions_for(with_slow(with_status(job, actions), 1, 1.31), 2)
    assert condition(later, SLOW) == found
    assert not later.status_changed
    ended = actions_for(with_slow(with_status(job, actions), None), 2)
    assert (condition(ended, SLOW).status, condition(ended, SLOW).reason) == (False, "NoReplicaSlow")
    assert not [each for each in ended.events if "Slow" in each.reason]


def test_the_condition_stays_while_the_metrics_service_does_not_answer() -> None:
    before = with_status(training_job(), actions_for(with_slow(training_job(), 1), 2))
    silent = observed(before.resource, None, before.indexed_job)
    assert condition(actions_for(silent), SLOW).status


def test_a_node_is_avoided_for_twice_as_long_if_a_replica_is_slow_again_soon() -> None:
    first = AvoidedNode.begin("a", None, 1000.0)
    assert (first.until, first.pause) == (1000.0 + FIRST_PAUSE, FIRST_PAUSE)
    soon, later = first.until + 1, first.until + first.pause
    assert AvoidedNode.begin("b", first, soon).pause == 2 * FIRST_PAUSE
    assert AvoidedNode.begin("b", first, later).pause == FIRST_PAUSE
    assert AvoidedNode.begin("b", replace(first, pause=MAX_PAUSE), soon).pause == MAX_PAUSE
    assert AvoidedNode.read({"avoidedNode": first.to_json()}) == first


# -- a cluster -----------------------------------------------------------------------------------------------


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs get as many replicas as fit."""

    def decide(problem: DecisionProblem, _now: float) -> dict[str, Decision]:
        counts = {
            each.job.id: min(each.job.max_replicas, problem.bound.max_replicas(each.job.id))
            for each in problem.queue
        }
        limits = {each.job.id: each.job.limit for each in problem.queue}
        return {
            name: Decision(min(count, limits[name] or count), "by the test") for name, count in counts.items()
        }

    monkeypatch.setattr(DecisionProblem, "decide", decide)


def cluster(nodes: int) -> World:
    """Return a cluster whose nodes of one type have a place for one replica each."""
    world = World(types=["gpu"], node_slots=1)
    world.remove_node("gpu")
    for number in range(nodes):
        add_node(world, f"node-{number}")
    world.deliver()
    return world


def add_node(world: World, name: str) -> None:
    status = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "allocatable": {GPU: "1", "pods": "110"},
    }
    meta = {"name": name, "labels": {DEFAULT_ACCELERATOR_LABEL: "gpu"}}
    world.create(Resource.NODES, {"metadata": meta, "spec": {}, "status": status})


def training(nodes: int, replicas: int) -> World:
    """Return a cluster whose job trains on so many replicas, each on a node of its own."""
    world = cluster(nodes)
    world.submit(maxReplicas=replicas)
    world.run_cycles(30)
    assert len(places(world)) == replicas, places(world)
    return world


def places(world: World) -> dict[str, str]:
    """Return the node of each live pod, by the pod's name."""
    return {raw["metadata"]["name"]: raw["spec"].get("nodeName", "") for raw in world.live_pods}


def post(world: World, slow: int | None = None, factor: float = 1.2, gain: float | None = None) -> None:
    """Post a report of the active generation, in which larger batches are worth their size."""
    active = world.service.state.active
    assert active is not None
    count, step = active.replicas, int(world.now - 1.8e9)
    scale = 16.0 * count
    world.service.post(
        GainReport(
            *(active.generation, step, 10.0 * step, 0, count, 64, 1, scale, gain or scale / 2),
            *(0.5 if gain is not None else 1e-6, 1.0, 0.1, world.now),
            slow_replica=slow,
            slow_factor=factor if slow is not None else None,
        )
    )


def be_slow(world: World, replica: int, **changes: Any) -> None:
    """Report a slow replica for a minute."""
    for _ in range(6):
        post(world, replica, **changes)
        world.now += 10.0
        world.run_cycles(1)


def avoided(world: World) -> str | None:
    assert world.job is not None
    node = world.job["status"].get("avoidedNode")
    return node["name"] if node else None


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_replica_is_replaced_on_another_node_while_the_others_train(slow: int) -> None:
    world = training(4, 3)
    before = places(world)
    name = next(each for each in before if each.startswith(f"digits-{slow}-"))
    be_slow(world, slow)
    assert avoided(world) == before[name]
    world.run_cycles(40)
    after = places(world)
    assert name not in after
    assert before[name] not in after.values()
    assert len(after) == 3
    assert len(before.keys() & after.keys()) == 2, "the other pods stay"
    (event,) = (each for each in world.events if each.reason == "NodeAvoided")
    assert event.message == (
        f"Goodput is predicted to be higher without the slow replica on node {before[name]}: its pods there "
        "are replaced, and new pods avoid the node for 30 minutes"
    )
    explained = world.service.decision
    assert explained is not None
    assert f"its pods avoid node {before[name]} for a time, because a replica was slow there" in [
        limit.reason for limit in explained.limits
    ]
    # After that time, new pods may use the node again. The pods stay.
    assert world.indexed_job is not None
    assert world.indexed_job["metadata"]["annotations"][ANNOTATION_AVOIDED_NODE] == before[name]
    world.now += FIRST_PAUSE
    world.run_cycles(20)
    assert ANNOTATION_AVOIDED_NODE not in world.indexed_job["metadata"]["annotations"]
    assert places(world) == after


@pytest.mark.usefixtures("greedy")
def test_without_a_place_elsewhere_a_job_trains_on_fewer_only_if_that_is_faster() -> None:
    world = training(3, 3)
    before = places(world)
    be_slow(world, 1)
    world.run_cycles(20)
    assert (avoided(world), places(world)) == (None, before), "2 / 3 of the samples are less than 1 / 1.2"
    be_slow(world, 1, factor=2.0)
    slow = next(node for name, node in before.items() if name.startswith("digits-1-"))
    assert avoided(world) == slow
    world.run_cycles(60)
    # The pod of the slow replica waits for a place elsewhere, and the others train.
    others = sorted(node for node in before.values() if node != slow)
    assert sorted(places(world).values()) == ["", *others]
    assert world.job is not None
    assert (world.job["status"]["replicas"], world.job["status"]["state"]) == (2, "Running")
    add_node(world, "node-new")
    world.run_cycles(40)
    assert sorted(places(world).values()) == sorted([*others, "node-new"])
    assert world.job["status"]["replicas"] == 3


@pytest.mark.usefixtures("greedy")
def test_replicas_on_one_node_are_never_left_out() -> None:
    world = World(types=["gpu"])
    world.submit(maxReplicas=3)
    world.run_cycles(30)
    before = places(world)
    assert len(before) == 3
    be_slow(world, 1, factor=3.0)
    world.run_cycles(20)
    assert (avoided(world), places(world)) == (None, before)
