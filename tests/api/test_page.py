"""The page over HTTP: its files, the stream of jobs, generations and use of replicas."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from adascale_api.errors import UnavailableError
from adascale_api.service.job_feed import MAX_CLIENTS, Followers
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from api.client import TOKEN, Client, ServiceProcess, a_registration, a_report, wait_until
from api.events import Events


@pytest.fixture
def events(service: ServiceProcess) -> Iterator[Events]:
    opened = Events(service.port)
    yield opened
    opened.close()


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


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/..%2Fcli.py", "/page/__init__.py", "/page/"])
def test_no_other_file_is_served(client: Client, path: str) -> None:
    assert client.call("GET", path).status == 404


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
def test_fastapis_viewers_which_load_scripts_of_other_hosts_are_not_served(client: Client, path: str) -> None:
    assert client.call("GET", path).status == 404


# -- the stream of jobs ----------------------------------------------------------------------------------


def test_the_stream_has_all_jobs_and_then_those_that_change(client: Client, job: str, events: Events) -> None:
    train(client, job, 2)
    summary = events.of_job(job)
    while summary["state"] != "Running":
        summary = events.of_job(job)
    assert (summary["replicas"], summary["desired"], summary["latest"]) == (2, 2, None)
    client.post_gain(job, a_report(10, progress=400.0, goodput=20.0))
    summary = events.of_job(job)
    assert summary["latest"]["step"] == 10
    assert summary["seconds_left"] == pytest.approx(30.0)
    client.call("DELETE", f"/jobs/{job}")
    while job not in events.next()[1]["deleted"]:
        pass


def test_a_second_client_gets_all_jobs_first(
    service: ServiceProcess, client: Client, job: str, events: Events
) -> None:
    train(client, job, 1)
    events.of_job(job)
    second = Events(service.port)
    kind, data = second.next()
    second.close()
    assert kind == "all"
    assert job in {summary["id"] for summary in data["jobs"]}
    assert data["truncated"] is False


def test_the_stream_has_neither_addresses_nor_logs(client: Client, job: str, events: Events) -> None:
    client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1})
    client.register(job, a_registration(address="10.9.8.7"))
    failed = a_registration(replica_state=ReplicaState.FAILED, generation=1, log="secret text", exit_code=1)
    client.register(job, failed)
    text = json.dumps(events.of_job(job))
    assert "10.9.8.7" not in text
    assert "secret text" not in text


@pytest.mark.slow
def test_one_address_does_not_keep_others_from_the_stream(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, ExitStack() as stack:

        def follow(*options: str) -> Events:
            return stack.enter_context(closing(Events(service.port, *options)))

        opened = [follow() for _ in range(MAX_CLIENTS)]
        for each in opened:
            assert each.next()[0] == "all"
        refused = follow()
        assert refused.answer.status == 503
        reader = follow(TOKEN)
        assert reader.next()[0] == "all"
        other = follow("", "127.0.0.2")
        assert other.next()[0] == "all"
        with pytest.raises(StopIteration):
            opened[0].next()
        for each in opened:
            each.close()
        wait_until(lambda: follow().answer.status == 200, "room for another client")
        with Client(service.port) as client:
            client.put("/jobs/a", JobSpec(8, max_replicas=2).to_json())
        for each in (reader, other):
            assert each.of_job("default.a")["id"] == "default.a"


def test_the_places_of_followers_are_shared_fairly_by_address() -> None:
    followers = Followers(4)
    first, second, *_ = [followers.add("a") for _ in range(4)]
    with pytest.raises(UnavailableError):
        followers.add("a")
    followers.add("b")
    followers.add("b")
    assert [first.is_ended, second.is_ended] == [True, True]
    for address in ("a", "b"):
        with pytest.raises(UnavailableError):
            followers.add(address)
    third = followers.add("c")
    assert len(followers) == 4
    for each in (first, third):
        followers.remove(each)
    assert len(followers) == 3, "the place of the first was taken"
    followers.add("a")


def test_a_protected_page_has_no_data_without_a_token_and_its_stream_ends_with_the_service(
    tmp_path: Path,
) -> None:
    environ = {"ADASCALE_TOKEN": TOKEN, "ADASCALE_READ_TOKEN": "the-read-token"}
    with ServiceProcess(tmp_path, "--protect-reads", environ=environ) as service:
        with Client(service.port, None) as anyone:
            assert anyone.call("GET", "/").status == 200
            assert anyone.call("GET", "/page/main.js").status == 200
            for path in ("/events", "/usage", "/jobs/a/generations"):
                assert anyone.call("GET", path).status == 401
        stream = Events(service.port, "the-read-token")
        assert stream.next()[0] == "all"
        assert service.stop() == 0
        stream.close()
        assert "Traceback" not in service.log()


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
    first, second, third = view["generations"]
    assert first["started_at"] <= first["ended_at"] == second["started_at"] <= second["ended_at"]
    assert third["ended_at"] is None


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
