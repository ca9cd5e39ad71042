"""Priorities: pods of lower priority count as free, and jobs of lower priority give up replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.observe.observed_job import Admission, ObservedJob
from adascale_controller.operator.schedule.scheduler import MAX_HOLD, Scheduler
from adascale_controller.operator.types.kubernetes import Resource
from adascale_controller.schedule import capacity_requests
from adascale_core.decision.decide import Decision
from support.fake_cluster import FakeCluster
from support.observed_jobs import GPU, NOW, ON_GPU, SPEC, decided, job, new_job, node, observed, pod, view

Object = dict[str, Any]


def other_pod(priority: int) -> Object:
    """Return a pod of somebody else, which takes the whole node."""
    containers = [{"name": "a", "resources": {"limits": {GPU: "100"}}}]
    return {
        "metadata": {"name": "other", "namespace": "team"},
        "spec": {"nodeName": "a100", "containers": containers, "priority": priority},
        "status": {"phase": "Running"},
    }


def crowded(taken_by: int, **admitted: Any) -> FakeCluster:
    """Return a cluster whose only node is taken by a pod of a priority; pods get fields at admission."""
    cluster = FakeCluster(
        types=["a100"], node_slots=1, admit=lambda pod: {**pod, "spec": pod["spec"] | admitted}
    )
    cluster.add(Resource.PODS, other_pod(taken_by))
    cluster.submit()
    return cluster


# -- pods of others ----------------------------------------------------------------------------------------


def test_the_smallest_count_is_requested_where_pods_of_lower_priority_can_be_preempted() -> None:
    cluster = crowded(0, priority=1000)
    cluster.run_cycles(5)
    assert len(cluster.live_pods) == 1, "the scheduler needs a pending pod to preempt for"
    assert cluster.condition()["reason"] == "Preempting"
    assert cluster.condition()["message"].startswith(
        "1 replica does not fit, and is requested so that pods of lower priority are preempted, for 5 min 0 s"
    )
    cluster.remove(Resource.PODS, "other")
    cluster.run_cycles(5)
    assert cluster.condition()["reason"] == "Training"


def test_a_request_is_recorded_whose_pods_are_placed_at_once() -> None:
    cluster = crowded(0, priority=1000)
    for _ in range(5):
        if not cluster.live_pods:
            cluster.run_cycles(1)
    assert cluster.condition()["reason"] == "Preempting"
    cluster.remove(Resource.PODS, "other")
    cluster.run_cycles(5)
    assert cluster.condition()["reason"] == "Training"
    assert "Preempting" in [event.reason for event in cluster.events]


@pytest.mark.parametrize(
    ("priority", "admitted"),
    [
        (1000, {"priority": 1000}),
        (2000, {"priority": 1000}),
        (0, {}),
        (0, {"priority": 1000, "preemptionPolicy": "Never"}),
    ],
)
def test_pods_that_can_not_be_preempted_are_not_free(priority: int, admitted: Object) -> None:
    cluster = crowded(priority, **admitted)
    cluster.run_cycles(5)
    assert cluster.live_pods == []
    assert cluster.condition()["reason"] == "InsufficientCapacity"


def test_a_preemption_that_does_not_happen_is_given_up_and_not_requested_again_at_once() -> None:
    cluster = crowded(0, priority=1000)
    cluster.run_cycles(5)
    cluster.now += capacity_requests.PREEMPTION.timeout
    cluster.run_cycles(5)
    assert cluster.live_pods == []
    assert (
        "were not placed within 5 min 0 s; the next request is 5 min 0 s later"
        in cluster.condition()["message"]
    )
    cluster.now += capacity_requests.FIRST_REQUEST_PAUSE
    cluster.run_cycles(5)
    assert len(cluster.live_pods) == 1


# -- AdaScaleJobs among each other --------------------------------------------------------------------------


def low(*ranks: int) -> ObservedJob:
    """Return a job without priority that trains on two replicas, of which these have a pod."""
    return observed(job((1, 2), template=ON_GPU), view((1, 2), (1, 2)), [pod(rank) for rank in ranks])


def high(priority: int, now: float = NOW) -> ObservedJob:
    """Return a later job of a priority that needs both GPUs."""
    made = new_job("high", spec=replace(SPEC, min_replicas=2), template=ON_GPU)
    resource = replace(made.resource, created_at=made.resource.created_at + 50)
    admission = Admission({**ON_GPU["spec"], "priority": priority})
    return replace(made, resource=resource, admission=admission, now=now)


def decide(scheduler: Scheduler, *jobs: ObservedJob) -> list[Decision | None]:
    decided(scheduler, *jobs, nodes=[node("node1", 2)])
    return [scheduler.decision(each.resource.id) for each in jobs]


def test_a_job_of_higher_priority_takes_the_replicas_of_a_lower_one_once_these_have_left() -> None:
    scheduler = Scheduler()
    lower, higher = decide(scheduler, low(0, 1), high(1000))
    assert lower is not None
    assert lower.replicas == 0
    assert higher == Decision(
        0,
        "Waiting for replicas of team.digits, which has a lower priority, to save their state and leave",
        waiting=True,
        accelerator=higher.accelerator if higher else None,
    )
    assert scheduler.next_due(high(1000)) == NOW + 1
    scheduler.update(low())
    after = scheduler.decision("team.high")
    assert after is not None
    assert after.replicas == 2


def test_it_does_not_wait_for_ever_for_replicas_that_do_not_leave() -> None:
    scheduler = Scheduler()
    decide(scheduler, low(0, 1), high(1000))
    scheduler.update(high(1000, NOW + MAX_HOLD + 1))
    after = scheduler.decision("team.high")
    assert after is not None
    assert after.replicas == 2


def test_a_later_job_of_equal_priority_waits() -> None:
    lower, higher = decide(Scheduler(), low(0, 1), high(0))
    assert lower is not None
    assert higher is not None
    assert (lower.replicas, higher.replicas) == (2, 0)
