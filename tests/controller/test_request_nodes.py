"""Nodes from an autoscaler: replicas that do not fit are requested, bounded in time and number."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.schedule import pod_memory, scheduler
from adascale_controller.operator.schedule.scheduler import POSTPONED_INTERVAL, Scheduler
from adascale_controller.operator.types.kubernetes import Resource
from adascale_controller.schedule import capacity_requests
from adascale_core import names
from adascale_core.messages.reports import GainReport, StepTime
from support.fake_api_server import GPU
from support.fake_cluster import FakeCluster
from support.observed_jobs import NOW, ON_GPU, SPEC, decided, new_job, node, pod

Object = dict[str, Any]


class Autoscaler:
    """Adds a node of one GPU for each pod that can't be scheduled, up to a number of nodes."""

    def __init__(self, cluster: FakeCluster, most: int) -> None:
        self._cluster = cluster
        self._most = most
        for name in list(cluster.objects[Resource.NODES]):
            cluster.remove_node(name)

    @property
    def nodes(self) -> int:
        return len(self._cluster.objects[Resource.NODES])

    def run(self, cycles: int = 10) -> None:
        for _ in range(cycles):
            pending = [raw for raw in self._cluster.live_pods if "nodeName" not in raw["spec"]]
            unschedulable = [raw for raw in pending if raw["status"].get("conditions")]
            if unschedulable and self.nodes < self._most:
                self._add(f"node{self.nodes}")
            self._cluster.run_cycles(1)

    def _add(self, name: str) -> None:
        meta = {"name": name, "labels": {names.DEFAULT_ACCELERATOR_LABEL: "a100"}}
        status = {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {GPU: "1", "pods": "110"},
        }
        self._cluster.add(Resource.NODES, {"metadata": meta, "spec": {}, "status": status})


def report(cluster: FakeCluster, replicas: int) -> None:
    """Report a step that shows that more replicas are worth much."""
    active = cluster.service.state.view(1).active
    assert active is not None
    sizes = (4, 16)
    cluster.service.step_times = tuple(
        StepTime(replicas, size, 1, 0.01 + 0.01 * size, accelerator="a100") for size in sizes
    )
    scale = float(replicas)
    cluster.service.post(
        GainReport(
            *(active.generation, 9, 9.0, 0, replicas, 4, 1, scale, scale),
            grad_sqr=1.0,
            grad_var=1000.0,
            step_time=0.05,
            time=cluster.now,
            accelerator="a100",
        )
    )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A cluster whose operator requests nodes, and measures durations on the cluster's clock."""
    made = FakeCluster(types=["a100"], node_slots=1, request_nodes=True)
    clock = SimpleNamespace(monotonic=lambda: made.now, thread_time=time.thread_time, time=time.time)
    for module in (scheduler, pod_memory):
        monkeypatch.setattr(module, "time", clock)
    return made


def test_without_the_option_nothing_is_requested() -> None:
    cluster = FakeCluster(types=["a100"], node_slots=1)
    autoscaler = Autoscaler(cluster, most=3)
    cluster.submit()
    autoscaler.run()
    assert (autoscaler.nodes, cluster.live_pods) == (0, [])
    assert cluster.condition()["reason"] == "InsufficientCapacity"


@pytest.mark.parametrize("by_job", [True, False])
def test_the_smallest_count_is_requested_where_a_pool_has_no_nodes(by_job: bool) -> None:
    cluster = FakeCluster(types=["a100"], node_slots=1, request_nodes=not by_job)
    autoscaler = Autoscaler(cluster, most=2)
    cluster.submit(minReplicas=2, requestNodes=True if by_job else None)
    cluster.run_cycles(5)
    assert cluster.condition()["reason"] == "NodesRequested"
    assert cluster.condition()["message"].startswith(
        "2 replicas do not fit, and are requested so that an autoscaler adds nodes, for 10 min 0 s at most: "
    )
    autoscaler.run(20)
    assert autoscaler.nodes == 2
    assert cluster.condition()["reason"] == "Training"


def test_a_job_may_refuse_what_the_operator_allows() -> None:
    cluster = FakeCluster(types=["a100"], node_slots=1, request_nodes=True)
    autoscaler = Autoscaler(cluster, most=2)
    cluster.submit(requestNodes=False)
    autoscaler.run()
    assert autoscaler.nodes == 0


def test_a_request_without_success_is_given_up_and_repeated_after_a_pause_that_doubles() -> None:
    cluster = FakeCluster(types=["a100"], node_slots=1, request_nodes=True)
    autoscaler = Autoscaler(cluster, most=0)
    cluster.submit()
    for pause in ("5 min 0 s", "10 min 0 s"):
        autoscaler.run(5)
        assert len(cluster.live_pods) == 1
        cluster.now += capacity_requests.NODES.timeout
        autoscaler.run(5)
        assert cluster.live_pods == []
        assert f"the next request is {pause} later" in cluster.condition()["message"]
        autoscaler.run(5)
        assert cluster.writes == []
        cluster.now += 2 * capacity_requests.FIRST_REQUEST_PAUSE


def test_a_job_that_would_use_more_replicas_requests_one_step_of_growth_at_a_time(
    cluster: FakeCluster,
) -> None:
    autoscaler = Autoscaler(cluster, most=2)
    cluster.submit(maxReplicas=8)
    autoscaler.run(20)
    assert cluster.condition()["reason"] == "Training"
    report(cluster, 1)
    cluster.run_cycles(8)
    assert cluster.condition("Rescaling")["reason"] == "NodesRequested"
    assert cluster.condition()["message"] == "Training on 1 replica"
    assert len(cluster.live_pods) == 2
    autoscaler.run(10)
    assert autoscaler.nodes == 2
    assert cluster.condition()["message"] == "Training on 2 replicas"
    report(cluster, 2)
    autoscaler.run(60)
    assert cluster.condition("Rescaling")["reason"] == "NodesRequested"
    assert cluster.condition()["message"] == "Training on 2 replicas"
    pods = len(cluster.live_pods)
    assert pods > 2
    cluster.now += capacity_requests.NODES.timeout
    autoscaler.run(10)
    assert len(cluster.live_pods) == 2, "it is given up, and training went on"
    assert cluster.condition()["message"] == "Training on 2 replicas"


def test_no_nodes_are_requested_while_pods_that_fit_are_on_none() -> None:
    """Kubernetes may place those of the request first, and then the job that fits waits in its place."""

    def pair(*, placed: int) -> list[ObservedJob]:
        jobs = [new_job(name, spec=replace(SPEC, min_replicas=2), template=ON_GPU) for name in ("a", "b")]
        return [replace(jobs[0], pods=[pod(0), pod(1)][:placed]), jobs[1]]

    scheduler = Scheduler(request_nodes=True)
    for placed in (0, 1):
        decided(scheduler, *pair(placed=placed), nodes=[node("node1", 3)])
        fits, waits = (scheduler.decision(f"team.{name}") for name in ("a", "b"))
        assert fits is not None
        assert waits is not None
        assert (fits.replicas, waits.replicas) == (2, 0)
        assert scheduler.next_due(pair(placed=placed)[1]) == NOW + POSTPONED_INTERVAL
    scheduler.update(pair(placed=2)[0])
    requests = scheduler.decision("team.b")
    assert requests is not None
    assert requests.replicas == 2
    assert "are requested so that an autoscaler adds nodes" in requests.reason
