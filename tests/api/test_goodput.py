"""Where the time of replicas went, as agents send it with their heartbeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.replica_seconds import Cause
from api.client import Client, ServiceProcess, a_heartbeat, a_registration, wait_until


def seconds(client: Client, path: str) -> dict[str, float]:
    """Return the seconds of an answer that are not 0."""
    return {cause: each for cause, each in client.get(path)["replica_seconds"].items() if each}


def counter(client: Client) -> dict[str, float]:
    """Return the counter for Prometheus, by cause."""
    lines = [line for line in client.call("GET", "/metrics").body.splitlines() if "replica_seconds" in line]
    samples = [line.partition('{cause="')[2].split('"} ') for line in lines if not line.startswith("#")]
    return {cause: float(number) for cause, number in samples}


def test_each_agent_counts_once_also_after_the_end_and_a_crash(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        first = a_heartbeat(0, seconds={"starting": 4.0})
        client.register("a", first)
        client.register("a", a_heartbeat(1, seconds={"starting": 3.0, "check": 0.5}))
        # A heartbeat alone is stored within seconds.
        client.register("a", a_heartbeat(0, seconds={"starting": 4.0, "useful": 6.0}))
        wait_until(lambda: client.get("/jobs/a/goodput")["history"], "the stored heartbeat")
        ended = {"starting": 4.0, "useful": 8.0, "efficiency_lost": 2.0}
        client.register(
            "a", a_heartbeat(0, replica_state=ReplicaState.TERMINATED, exit_code=75, seconds=ended)
        )
        # Another pod of the replica, whose agent has another name.
        client.register("a", a_heartbeat(0, instance="later.1", seconds={"starting": 1.0}))
        service.kill()
        service.start()
        expected = {"starting": 8.0, "check": 0.5, "useful": 8.0, "efficiency_lost": 2.0}
        assert seconds(client, "/jobs/a/goodput") == expected
        view = client.get("/jobs/a/goodput")
        assert view["useful_ratio"] == pytest.approx(8 / 18.5)
        assert view["history"][-1]["replica_seconds"]["starting"] >= 7.0
        client.register("b", a_heartbeat(0, seconds={"spare": 9.0}))
        page = client.get("/goodput?limit=1")
        assert [job["job"] for job in page["jobs"]] == ["default.a"]
        assert [job["job"] for job in client.get(f"/goodput?after={page['next']}")["jobs"]] == ["default.b"]
        # A counter does not fall when a job is deleted.
        before = counter(client)
        assert {cause: each for cause, each in before.items() if each} == {**expected, "spare": 9.0}
        assert client.call("DELETE", "/jobs/a").status == 204
        assert counter(client) == before
        assert seconds(client, "/goodput") == {**expected, "spare": 9.0}
        assert client.call("GET", "/jobs/a/goodput").status == 404


@pytest.mark.parametrize(
    "value",
    [{"sleeping": 1.0}, {"useful": -1.0}, {"useful": 1e13}, {"useful": "1"}, {"useful": None}, [1.0], 5],
)
def test_seconds_that_are_none_are_refused(client: Client, job: str, value: Any) -> None:
    body = {**a_registration(0).to_json(), "seconds": value}
    answer = client.call("PUT", f"/jobs/{job}/replicas/0", body)
    assert answer.status == 422
    assert answer.body["detail"][0]["field"].startswith("seconds"), answer.body
    assert client.call("GET", f"/jobs/{job}").status == 404


def test_every_cause_is_accepted(client: Client, job: str) -> None:
    sent = {str(cause): float(number) for number, cause in enumerate(Cause, 1)}
    client.register(job, a_heartbeat(0, seconds=sent))
    assert seconds(client, f"/jobs/{job}/goodput") == sent
