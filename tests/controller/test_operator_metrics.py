"""The operator's own metrics."""

from __future__ import annotations

import urllib.request

import pytest

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.runtime import control_loop
from support.fake_api_server import FakeApiServer
from support.fake_cluster import FakeCluster
from support.operator_metrics import serve, show_a_started_job


def value(cluster: FakeCluster, name: str) -> float:
    """Return the value of a series, named with its labels."""
    lines = cluster.metrics.text().decode().splitlines()
    (found,) = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name]
    return float(found)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(control_loop, "PAUSE", 0.01)
    cluster = FakeCluster()
    cluster.submit()
    cluster.deliver()
    return cluster


def test_the_metrics_show_jobs_cycles_and_allocations(cluster: FakeCluster) -> None:
    assert value(cluster, 'adascale_operator_jobs{phase="runnable"}') == 0
    cluster.run_until(lambda: show_a_started_job(cluster.metrics))
    assert value(cluster, 'adascale_operator_jobs{phase="runnable"}') == 1
    assert value(cluster, 'adascale_operator_allocations_total{change="grow"}') == 1
    assert value(cluster, "adascale_operator_waiting_jobs") == 0
    assert value(cluster, "adascale_operator_pending_jobs") == 0
    assert value(cluster, "adascale_operator_cycle_duration_seconds_count") >= 1
    assert value(cluster, "adascale_operator_cycle_cpu_seconds_total") > 0
    assert value(cluster, "adascale_operator_job_errors_total") == 0
    assert "digits" not in cluster.metrics.text().decode(), "no series per job"


def test_errors_of_jobs_are_counted(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ApiServerError("no answer")

    monkeypatch.setattr(FakeApiServer, "apply_status", fail)
    cluster.run_until(lambda: value(cluster, "adascale_operator_job_errors_total") >= 1)


def test_requests_to_the_api_server_are_counted_by_status(cluster: FakeCluster) -> None:
    cluster.metrics.count_api_request("PATCH", 429)
    cluster.metrics.count_api_request("PATCH", None)
    for status in ("429", "none"):
        assert (
            value(cluster, f'adascale_operator_api_requests_total{{method="PATCH",status="{status}"}}') == 1
        )


def test_the_metrics_are_served_beside_the_probe(cluster: FakeCluster) -> None:
    with serve(cluster.metrics) as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert b"adascale_operator_leader 0.0" in answer.read()
