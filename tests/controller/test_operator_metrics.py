"""The operator's own metrics."""

from __future__ import annotations

import urllib.request

import pytest

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.runtime import control_loop
from support.fake_cluster import FakeCluster
from support.operator_metrics import serve
from support.world import World


def value(world: World, name: str) -> float:
    """Return the value of a series, named with its labels."""
    lines = world.metrics.text().decode().splitlines()
    (found,) = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name]
    return float(found)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(control_loop, "PAUSE", 0.01)
    world = World()
    world.submit()
    world.deliver()
    return world


def test_the_metrics_show_jobs_cycles_and_allocations(world: World) -> None:
    assert value(world, 'adascale_operator_jobs{phase="runnable"}') == 0
    world.run(0.3)
    assert value(world, 'adascale_operator_jobs{phase="runnable"}') == 1
    assert value(world, 'adascale_operator_allocations_total{change="grow"}') == 1
    assert value(world, "adascale_operator_waiting_jobs") == 0
    assert value(world, "adascale_operator_pending_jobs") == 0
    assert value(world, "adascale_operator_cycle_duration_seconds_count") >= 1
    assert value(world, "adascale_operator_cycle_cpu_seconds_total") > 0
    assert value(world, "adascale_operator_job_errors_total") == 0
    assert "digits" not in world.metrics.text().decode(), "no series per job"


def test_errors_of_jobs_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ApiServerError("no answer")

    monkeypatch.setattr(FakeCluster, "apply_status", fail)
    world.run(0.3)
    assert value(world, "adascale_operator_job_errors_total") >= 1


def test_requests_to_the_api_server_are_counted_by_status(world: World) -> None:
    world.metrics.count_api_request("PATCH", 429)
    world.metrics.count_api_request("PATCH", None)
    for status in ("429", "none"):
        assert value(world, f'adascale_operator_api_requests_total{{method="PATCH",status="{status}"}}') == 1


def test_the_metrics_are_served_beside_the_probe(world: World) -> None:
    with serve(world.metrics) as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert b"adascale_operator_leader 0.0" in answer.read()
