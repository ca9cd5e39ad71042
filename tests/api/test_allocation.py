"""Allocations and registrations over HTTP, and requests that wait for a change."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adascale_core.messages.allocation import AllocationView
from api.client import TOKEN, Client, ServiceProcess, a_registration, run_service


def allocate(client: Client, job: str, generation: int, replicas: int) -> dict[str, Any]:
    body = {"generation": generation, "replicas": replicas}
    view: dict[str, Any] = client.put(f"/jobs/{job}/allocation", body)
    return view


def test_an_allocation_becomes_active_once_its_replicas_are_ready(client: Client, job: str) -> None:
    assert allocate(client, job, 1, 2)["active"] is None
    assert client.register(job, a_registration(1))["active"] is None
    active = AllocationView.from_json(client.register(job, a_registration(0))).active
    assert active is not None
    assert (active.generation, active.replicas) == (1, 2)
    assert [(member.replica, member.port) for member in active.members] == [(0, 40000), (1, 40001)]


def test_a_stale_allocation_is_refused_with_the_current_generations(client: Client, job: str) -> None:
    now = allocate(client, job, 3, 2)
    answer = client.call("PUT", f"/jobs/{job}/allocation", {"generation": 2, "replicas": 4})
    assert answer.status == 409
    assert "generation 3 (2 replicas) is desired already" in answer.body["error"]
    assert answer.body["allocation"] == now


@pytest.mark.parametrize("token", [TOKEN, None])
def test_a_wait_as_agents_send_it_is_answered_as_any_other(
    service: ServiceProcess, client: Client, job: str, token: str | None
) -> None:
    allocate(client, job, 1, 1)
    version = client.register(job, a_registration())["version"]
    path = f"/jobs/{job}/allocation"
    with Client(service.port, token) as reader:
        known = (version, version - 1, version + 1)
        agents = [f"{path}?version={each}&wait={wait}" for each in known for wait in ("0", "0.05")]
        others = [path, f"{path}?version={version}", f"{path}?wait=0&version={version}"]
        answers = [reader.get(each) for each in (*agents, *others)]
        assert answers == [answers[0]] * len(answers)
        assert answers[0]["active"]["members"][0]["address"] == ("127.0.0.1" if token else "")
        for query in ("version=0&wait=61", "version=0&wait=nan", "version=-1&wait=1", "version=0&wait="):
            assert reader.call("GET", f"{path}?{query}").status == 422, query
        assert reader.call("GET", "/jobs/no..job/allocation?version=0&wait=0").status == 422
        assert reader.call("GET", "/jobs/missing-job/allocation?version=0&wait=0").status == 404


def test_a_failed_job_is_shown_as_failed(client: Client, job: str) -> None:
    allocate(client, job, 1, 1)
    desired = {"generation": 2, "replicas": 0, "spares": 0, "failed": True}
    assert client.put(f"/jobs/{job}/allocation", desired)["desired"] == desired
    assert client.get(f"/jobs/{job}")["desired"] == desired
    assert allocate(client, job, 3, 1)["desired"] == {
        "generation": 3,
        "replicas": 1,
        "spares": 0,
        "failed": False,
    }


@pytest.mark.parametrize("change", ["allocation", "replica", "deletion"])
def test_a_change_wakes_all_waiting_requests(service: ServiceProcess, job: str, change: str) -> None:
    with Client(service.port) as client, ThreadPoolExecutor(8) as threads:
        version = allocate(client, job, 1, 1)["version"]
        waiting: list[Future[Any]] = [
            threads.submit(wait_in_thread, service.port, job, version) for _ in range(8)
        ]
        # A request that arrives after the change is answered at once, so the test need not wait here.
        if change == "allocation":
            allocate(client, job, 2, 1)
        elif change == "replica":
            client.register(job, a_registration(0))
        else:
            client.call("DELETE", f"/jobs/{job}")
        answers = [request.result(30) for request in waiting]
    assert {answer.status for answer in answers} == ({404} if change == "deletion" else {200})
    if change != "deletion":
        assert all(answer.body["version"] > version for answer in answers)


def wait_in_thread(port: int, job: str, version: int) -> Any:
    with Client(port) as client:
        return client.call("GET", f"/jobs/{job}/allocation?version={version}&wait=60")


def test_a_second_service_on_the_same_file_is_refused(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path):
        url = f"sqlite:///{tmp_path / 'service.db'}"
        refused = run_service("--port", "0", "--database", url, ADASCALE_TOKEN=TOKEN)
    assert refused.returncode == 2
    assert "is used by another metrics service" in refused.stderr
    assert "Traceback" not in refused.stderr
