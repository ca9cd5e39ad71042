"""The page over HTTP: its files, the summaries of jobs, generations and use of replicas."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from adascale_api.service.summaries import Documents, make_summaries
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.views.job_summary import JobStateName, JobSummary
from api.client import TOKEN, Client, ServiceProcess, a_registration, a_report, wait_until


def train(client: Client, job: str, replicas: int) -> None:
    """Take a job into its first generation."""
    client.put(f"/jobs/{job}", JobSpec(8, 640, (4, 16), 1, 40, 1000).to_json())
    client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": replicas})
    for rank in range(replicas):
        client.register(job, a_registration(rank))
    for rank in range(replicas):
        client.register(job, running(rank, 1, replicas))


def running(rank: int, generation: int, replicas: int, **changed: Any) -> Any:
    state = changed.pop("replica_state", ReplicaState.RUNNING)
    return a_registration(
        *(rank, state),
        generation=generation,
        assigned=generation,
        stepped=generation,
        replicas=replicas,
        **changed,
    )


# -- files -----------------------------------------------------------------------------------------------


def test_every_file_that_the_page_names_is_served(client: Client) -> None:
    found, open_names = {""}, [""]
    while open_names:
        name = open_names.pop()
        answer = client.call("GET", f"/{name}")
        assert answer.status == 200, name
        names = re.findall(r"(?:(?:href|src)=\"|from \"\./)([\w./]+)\"", str(answer.body))
        for each in names:
            path = urljoin(f"/{name}", each).removeprefix("/")
            if path not in found:
                found.add(path)
                open_names.append(path)
    assert {"page/main.js", "page/style.css", "page/chart.js", "page/icon.svg"} <= found


def test_the_page_runs_and_loads_nothing_but_its_own_files(client: Client) -> None:
    for path in ("/", "/page/main.js", "/page/style.css"):
        headers = client.call("GET", path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    assert not re.search(
        r"<script(?! type=\"module\" src=)|style=|\son\w+=", str(client.call("GET", "/").body)
    )


def test_an_unchanged_file_is_not_sent_again(client: Client) -> None:
    first = client.call("GET", "/page/chart.js")
    again = client.call("GET", "/page/chart.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, "")


def test_requests_of_files_are_measured_as_one_route(client: Client) -> None:
    client.call("GET", "/page/chart.js")
    counted = 'adascale_request_duration_seconds_count{method="GET",route="/page/{name}",status="200"}'
    assert counted in client.call("GET", "/metrics").body


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/..%2Fcli.py", "/page/__init__.py", "/page/", "/page"]
)
def test_no_other_file_is_served(client: Client, path: str) -> None:
    assert client.call("GET", path).status == 404


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
def test_fastapis_viewers_which_load_scripts_of_other_hosts_are_not_served(client: Client, path: str) -> None:
    assert client.call("GET", path).status == 404


# -- the summaries of jobs -------------------------------------------------------------------------------


def test_a_summary_follows_its_job(client: Client, job: str) -> None:
    train(client, job, 2)
    summary = client.summary(job, lambda summary: summary["state"] == "Running")
    assert (summary["replicas"], summary["desired"], summary["latest"]) == (2, 2, None)
    client.post_gain(job, a_report(10, progress=400.0, goodput=20.0))
    summary = client.summary(job, lambda summary: summary["latest"])
    assert summary["latest"]["step"] == 10
    assert summary["seconds_left"] == pytest.approx(30.0)
    client.call("DELETE", f"/jobs/{job}")
    wait_until(lambda: job not in client.summaries(), "the deletion")


def test_summaries_that_a_client_has_are_not_sent_again(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, Client(service.port, None) as page:
        first = page.call("GET", "/summaries")
        assert first.body == {"jobs": [], "truncated": False, "interval": 2.0}
        etag = {"If-None-Match": first.headers["etag"]}
        assert page.call("GET", "/summaries", headers=etag).status == 304
        with Client(service.port) as client:
            client.post_gain("a", a_report())
        wait_until(lambda: page.call("GET", "/summaries", headers=etag).status == 200, "a change")


def test_clients_that_ask_together_share_a_read() -> None:
    reads = 0

    async def read() -> list[JobSummary]:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        if reads == 1:
            raise ZeroDivisionError
        return []

    async def ask() -> None:
        documents, make = Documents(), partial(make_summaries, read)
        for result in await asyncio.gather(
            *(documents.get("all", make) for _ in range(9)), return_exceptions=True
        ):
            assert isinstance(result, ZeroDivisionError)
        first, *others = await asyncio.gather(*(documents.get("all", make) for _ in range(9)))
        assert all(other is first for other in others)

    asyncio.run(ask())
    assert reads == 2, "an error is tried again"


def test_the_summaries_have_neither_addresses_nor_logs(client: Client, job: str) -> None:
    client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1})
    client.register(job, a_registration(address="10.9.8.7"))
    failed = a_registration(replica_state=ReplicaState.FAILED, generation=1, log="secret text", exit_code=1)
    client.register(job, failed)
    text = json.dumps(client.summary(job, lambda summary: summary["state"] == "Failed"))
    assert "10.9.8.7" not in text
    assert "secret text" not in text


def test_a_protected_page_has_no_data_without_a_token(tmp_path: Path) -> None:
    environ = {"ADASCALE_TOKEN": TOKEN, "ADASCALE_READ_TOKEN": "the-read-token"}
    with ServiceProcess(tmp_path, "--protect-reads", environ=environ) as service:
        with Client(service.port, None) as anyone:
            assert anyone.call("GET", "/").status == 200
            assert anyone.call("GET", "/page/main.js").status == 200
            for path in ("/summaries", "/usage", "/jobs/a/generations"):
                assert anyone.call("GET", path).status == 401
        with Client(service.port, "the-read-token") as reader:
            assert reader.summaries() == {}
        assert service.stop() == 0
        assert "Traceback" not in service.log()


def test_the_page_has_the_states_of_jobs(client: Client) -> None:
    script = client.call("GET", "/page/jobs_view.js")
    states = re.search(r"const STATES = (\[.*\]);", str(script.body))
    assert states is not None
    assert sorted(json.loads(states[1])) == sorted(JobStateName)


# -- generations and use ---------------------------------------------------------------------------------


def test_generations_are_recorded_with_what_began_them(client: Client, job: str) -> None:
    train(client, job, 2)
    client.put(f"/jobs/{job}/allocation", {"generation": 2, "replicas": 1})
    client.register(job, running(0, 2, 1))
    lost = running(0, 2, 1, replica_state=ReplicaState.LOST)
    client.register(job, lost)
    client.register(job, a_registration(0, instance="agent-0.2"))
    view = client.get(f"/jobs/{job}/generations")
    assert view["job"] == job
    shown = [(each["generation"], each["replicas"], each["cause"]) for each in view["generations"]]
    assert shown == [(1, 2, "start"), (2, 1, "change"), (3, 1, "disruption")]
    reasons = [each["reason"] for each in view["generations"]]
    assert reasons == ["started", "replicas changed", "a replica was lost"]
    first, second, third = view["generations"]
    assert first["started_at"] <= first["ended_at"] == second["started_at"] <= second["ended_at"]
    assert third["ended_at"] is None


def test_a_job_is_compared_with_one_replica_by_its_step_times(client: Client, job: str) -> None:
    client.put(
        f"/jobs/{job}", JobSpec(8, max_batch_size=64, local_bsz_bounds=(4, 16), max_replicas=2).to_json()
    )
    train(client, job, 2)
    assert client.get(f"/jobs/{job}/generations")["comparison"] is None
    end = client.get(f"/jobs/{job}/generations")["generations"][0]["started_at"] + 30
    measured = {"replicas": 2, "local_bsz": 16, "accumulation": 1, "scale": 4.0, "step_time": 1.0}
    reports = [a_report(step, **measured, sync_time=0.2, time=end, progress=90.0) for step in range(28, 31)]
    client.post_gain(job, *reports)
    comparison = client.get(f"/jobs/{job}/generations")["comparison"]
    assert (comparison["steps"], comparison["single_steps"]) == (30, 90)
    assert comparison["seconds"] == pytest.approx(30)
    low, high = comparison["single_seconds"]
    # 0.8 s for 16 samples without communication: half of it is taken as fixed, half as proportional.
    assert low < 90 * 0.6 < high < 1.2 * low


def test_a_complete_job_has_no_active_generation(client: Client, job: str) -> None:
    train(client, job, 1)
    client.register(job, running(0, 1, 1, replica_state=ReplicaState.FINISHED))
    (only,) = client.get(f"/jobs/{job}/generations")["generations"]
    assert only["ended_at"] is not None


def test_the_use_of_replicas_is_that_of_the_generations(client: Client, job: str) -> None:
    train(client, job, 40)  # more than any other job of these tests

    def used() -> list[float]:
        view = client.get("/usage?seconds=60&points=600")
        assert len(view["others"]) == 600
        assert view["interval"] == pytest.approx(0.1)
        return next((each["replicas"] for each in view["largest"] if each["name"] == job), [0.0])

    wait_until(lambda: max(used()) > 0, "an interval with replicas")
    assert max(used()) <= 40
    by_namespace = client.get("/usage?seconds=60&by=namespace")
    assert "tests" in [each["name"] for each in by_namespace["largest"]]
    assert client.call("GET", "/usage?by=color").status == 422
