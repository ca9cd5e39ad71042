"""The runs of state folders, live and ended, as `adascale ui` shows them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adascale_api import cli
from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.service.run_services import MAX_OPEN, RunServices
from adascale_core.errors import AdaScaleError
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.views.job_summary import JobStateName, RunEntry, RunView
from api.client import TOKEN, Client, ServiceProcess, a_registration, a_report, wait_until

READ_TOKEN = "the-read-token-of-these-tests"
ENVIRON = {"ADASCALE_TOKEN": TOKEN, "ADASCALE_READ_TOKEN": READ_TOKEN}
JOB = "default.digits"
NOW = time.time()


def train(folder: Path, progress: float = 2.0) -> None:
    """Leave the database of a run that was killed while it trained."""
    folder.mkdir()
    with ServiceProcess(folder) as service, Client(service.port) as client:
        client.put(f"/jobs/{JOB}", JobSpec(8, 256, (4, 64), 1, 4, 20_000).to_json())
        client.put(f"/jobs/{JOB}/allocation", {"generation": 1, "replicas": 1})
        client.register(JOB, a_registration())
        state = {"generation": 1, "assigned": 1, "stepped": 1, "replicas": 1}
        client.register(JOB, a_registration(0, ReplicaState.RUNNING, **state))
        client.post_gain(JOB, *(a_report(step, progress=progress * step) for step in range(1, 20)))


def entry(
    folder: Path, name: str, state: JobStateName | None, began_at: float = NOW - 100, **known: Any
) -> RunEntry:
    view = RunView(folder=str(folder), url=None, began_at=NOW - 100, **known)
    # Another id in each test, which share a service.
    return RunEntry(
        f"{JOB}~{folder.parent.name}-{name}",
        JOB,
        str(folder / "service.db"),
        str(folder / "logs"),
        state,
        began_at,
        view,
    )


def write(path: Path, *entries: RunEntry) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([each.to_json() for each in entries]))
    draft.replace(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder)
    return folder


@pytest.fixture
def ended(tmp_path: Path, trained: Path) -> RunEntry:
    shutil.copytree(trained, tmp_path / "one")
    return entry(tmp_path / "one", "one", JobStateName.FAILED, ended_at=NOW - 10, reason="it has crashed")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("shown")
    write(folder / "runs.json")
    with ServiceProcess(folder, runs=folder / "runs.json", environ=ENVIRON) as service:
        yield service


@pytest.fixture
def listed(shown: ServiceProcess, ended: RunEntry) -> Path:
    path = shown.folder / "runs.json"
    write(path, ended)
    return path


@pytest.fixture
def client(shown: ServiceProcess, listed: Path) -> Iterator[Client]:
    with Client(shown.port, READ_TOKEN) as client:
        yield client


def test_an_ended_run_has_the_state_and_the_reason_of_its_list(ended: RunEntry, client: Client) -> None:
    summary = client.summary(ended.id)
    # Its service has not learnt that it was killed.
    assert (summary["state"], summary["replicas"], summary["seconds_left"]) == ("Failed", 0, None)
    assert (summary["run"]["reason"], summary["run"]["ended_at"]) == ("it has crashed", NOW - 10)
    assert client.get(f"/jobs/{ended.id}")["latest"]["step"] == 19
    assert client.get(f"/jobs/{ended.id}/gain/history")["total"] == 19
    assert len(client.get(f"/jobs/{ended.id}/generations")["generations"]) == 1
    # The newest run of a job has the id of the job too.
    assert client.get("/jobs/digits/gain")["progress"] == 38.0


def test_a_run_is_followed_while_its_own_service_writes(
    tmp_path: Path, listed: Path, ended: RunEntry, client: Client
) -> None:
    assert client.summary(ended.id)["state"] == "Failed"
    live = replace(ended, state=None, run=replace(ended.run, ended_at=None, reason=""))
    with ServiceProcess(tmp_path / "one") as service, Client(service.port) as run:
        write(listed, live)
        client.summary(ended.id, lambda summary: summary["state"] == "Running")
        run.post_gain(JOB, a_report(20, progress=40.0))
        client.summary(ended.id, lambda summary: summary["latest"]["step"] == 20)
        assert client.get(f"/jobs/{ended.id}")["latest"]["step"] == 20
        # A run that starts over has another file at the same place.
        run.call("DELETE", f"/jobs/{JOB}")
    for file in (tmp_path / "one").glob("service.db*"):
        file.unlink()
    with ServiceProcess(tmp_path / "one") as service, Client(service.port) as run:
        run.post_gain(JOB, a_report(1, progress=1.0))
        client.summary(ended.id, lambda summary: (summary["latest"] or {}).get("step") == 1)
        assert client.get(f"/jobs/{ended.id}/gain/history")["total"] == 1


def test_two_runs_of_a_job_are_shown_beside_each_other(
    tmp_path: Path, trained: Path, listed: Path, ended: RunEntry, client: Client
) -> None:
    shutil.copytree(trained, tmp_path / "two")
    now = time.time()
    one = replace(ended, run=replace(ended.run, ended_at=now))
    two = entry(tmp_path / "two", "two", JobStateName.COMPLETE, ended_at=now)
    write(listed, one, two)
    assert client.summary(two.id)["state"] == "Complete"
    used = client.get("/usage?seconds=600&points=10")
    assert {each["name"] for each in used["largest"]} == {one.id, two.id}
    write(listed)
    wait_until(lambda: not client.summaries(), "the end of both in the list")


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "can't be read"), (b"no database", "can't be read"), (b"", "has no data of a metrics service")],
    ids=["missing", "damaged", "empty"],
)
def test_a_run_whose_database_cannot_be_read_is_listed_with_the_reason(
    tmp_path: Path, listed: Path, ended: RunEntry, client: Client, content: bytes | None,
    problem: str,
) -> None:  # fmt: skip
    (tmp_path / "bad").mkdir()
    if content is not None:
        (tmp_path / "bad" / "service.db").write_bytes(content)
    bad = entry(tmp_path / "bad", "bad", JobStateName.STOPPED)
    write(listed, ended, bad)
    summary = client.summary(bad.id)
    assert summary["state"] == "Stopped"
    assert problem in summary["run"]["reason"]
    answer = client.call("GET", f"/jobs/{bad.id}")
    assert answer.status == 503
    assert problem in answer.body["error"]
    # The others are shown.
    assert client.get(f"/jobs/{ended.id}")["latest"]["step"] == 19


def test_a_database_with_values_of_another_program_does_not_hide_other_runs(
    tmp_path: Path, trained: Path, listed: Path, ended: RunEntry, client: Client
) -> None:
    shutil.copytree(trained, tmp_path / "changed")
    with closing(sqlite3.connect(tmp_path / "changed" / "service.db")) as database:
        database.execute("UPDATE jobs SET rendezvous = ?", ["[" * 100_000])
        database.commit()
    changed = entry(tmp_path / "changed", "changed", JobStateName.STOPPED, ended_at=NOW)
    write(listed, changed, replace(ended, run=replace(ended.run, reason="another reason")))
    assert "can't be read" in client.summary(changed.id)["run"]["reason"]
    client.summary(ended.id, lambda summary: summary["run"]["reason"] == "another reason")


def test_the_id_of_a_job_is_that_of_its_newest_run(
    tmp_path: Path, trained: Path, listed: Path, ended: RunEntry, client: Client
) -> None:
    # When the other one was killed is not known.
    killed = entry(tmp_path / "killed", "killed", JobStateName.STOPPED, began_at=NOW - 500)
    write(listed, killed, ended)
    assert client.get("/jobs/digits/gain")["progress"] == 38.0
    # A run that runs is meant, also if it began first.
    write(listed, replace(killed, began_at=NOW), replace(ended, state=None, began_at=NOW - 900))
    assert client.get("/jobs/digits/gain")["progress"] == 38.0


def test_databases_of_many_runs_are_open_in_turn(tmp_path: Path, ended: RunEntry) -> None:
    entries = [replace(ended, id=f"{JOB}~{number}") for number in range(MAX_OPEN + 8)]
    write(tmp_path / "runs.json", *entries)

    async def read() -> None:
        runs = RunServices(tmp_path / "runs.json", None, ConnectionLimits(8, 8, 1))

        async def find(run: str) -> str:
            async with runs.open(run) as (job, service):
                return (await service.find_job(job)).id

        assert await asyncio.gather(*(find(each.id) for each in entries)) == [JOB] * len(entries)

    asyncio.run(read())


def test_a_folder_with_a_name_that_is_no_text_is_shown(
    tmp_path: Path, trained: Path, listed: Path, client: Client
) -> None:
    folder = tmp_path / os.fsdecode(b"100%25 caf\xe9?")
    shutil.copytree(trained, folder)
    named = entry(folder, "named", JobStateName.STOPPED)
    write(listed, named)
    assert client.get(f"/jobs/{named.id}/gain")["progress"] == 38.0


def test_a_list_that_is_damaged_for_a_moment_is_a_problem_for_that_moment(
    listed: Path, client: Client
) -> None:
    text = listed.read_text()
    listed.write_text("[")
    wait_until(lambda: client.call("GET", "/summaries").status == 503, "the problem")
    assert "the list of runs" in client.call("GET", "/summaries").body["error"]
    assert client.call("GET", "/jobs/digits").status == 503
    listed.write_text(text)
    assert client.get("/summaries")["jobs"]


@pytest.mark.usefixtures("listed")
def test_nothing_can_be_changed(shown: ServiceProcess, ended: RunEntry) -> None:
    with Client(shown.port, TOKEN) as client:
        for method, path in (("DELETE", ""), ("POST", "/gain"), ("PUT", "/decision")):
            answer = client.call(method, f"/jobs/{ended.id}{path}", {})
            assert (answer.status, answer.headers["allow"]) == (405, "GET")
        assert client.get(f"/jobs/{ended.id}")["latest"]["step"] == 19


@pytest.mark.parametrize("path", ["/jobs/other", "/jobs/..%2F..", "/jobs/a~b/gain"])
def test_an_unknown_run_is_not_found(client: Client, path: str) -> None:
    answer = client.call("GET", path)
    assert answer.status == 404
    assert "`adascale list`" in answer.body["error"]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/jobs", "no resource at /jobs: `adascale list` lists the runs"),
        ("/jobs/", "no resource at /jobs"),
        ("/jobs?limit=5", "no resource at /jobs"),
        ("/nothing", "no resource at /nothing"),
    ],
)
def test_calls_that_a_list_of_runs_does_not_have_are_refused(client: Client, path: str, error: str) -> None:
    answer = client.call("GET", path)
    assert answer.status == 404
    assert answer.body["error"].startswith(error)


def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.json"
    path.write_text("{")
    with pytest.raises(SystemExit):
        cli.run(["--runs", str(path), "--database", "sqlite:///x.db"], ENVIRON)
    assert "not allowed with argument" in capsys.readouterr().err
    with pytest.raises(AdaScaleError, match=r"the list of runs .* can't be read"):
        cli.run(["--port", "0", "--runs", str(path)], ENVIRON)


# -- the output of replicas -------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path, ended: RunEntry) -> Path:
    (tmp_path / "one" / "logs").mkdir()
    return tmp_path / "one" / "logs" / "replica-0.log"


def test_the_output_of_a_replica_is_read_in_parts(client: Client, ended: RunEntry, log: Path) -> None:
    path = f"/jobs/{ended.id}/logs/0"
    assert client.get(path)["missing"] == "replica 0 of job default.digits has no output"
    log.write_bytes(b"one\n" + "é".encode()[:1])
    first = client.get(path)
    assert first == {"text": "one\n", "next": 4, "continues": False, "missing": ""}
    # The rest of a character.
    log.write_bytes("one\né\n".encode())
    second = client.get(f"{path}?after=4")
    assert second == {"text": "é\n", "next": 7, "continues": True, "missing": ""}
    assert client.get(f"{path}?after=7") == {"text": "", "next": 7, "continues": True, "missing": ""}
    # A run that starts over has a new file.
    log.write_text("new\n")
    assert client.get(f"{path}?after=7") == {"text": "new\n", "next": 4, "continues": False, "missing": ""}


def test_an_output_that_is_no_file_is_a_message(client: Client, ended: RunEntry, log: Path) -> None:
    os.mkfifo(log)
    assert client.get(f"/jobs/{ended.id}/logs/0")["missing"].endswith(
        "can't be read: " + f"{log} is no regular file"
    )
    log.unlink()
    log.mkdir()
    assert client.get(f"/jobs/{ended.id}/logs/0")["missing"].endswith("can't be read: Is a directory")


def test_a_long_output_begins_with_a_whole_line(client: Client, ended: RunEntry, log: Path) -> None:
    log.write_text("".join(f"line {number}\n" for number in range(20_000)))
    part = client.get(f"/jobs/{ended.id}/logs/0")
    assert part["text"].startswith("line ")
    assert part["text"].endswith("line 19999\n")
    assert len(part["text"]) > 60_000


@pytest.mark.usefixtures("listed")
def test_the_output_needs_a_token(shown: ServiceProcess, ended: RunEntry, log: Path) -> None:
    log.write_text("secret\n")
    for token, status in ((None, 401), ("another", 401), (READ_TOKEN, 200)):
        with Client(shown.port, token) as client:
            assert client.call("GET", f"/jobs/{ended.id}/logs/0").status == status
    with Client(shown.port, READ_TOKEN) as client:
        for replica in ("-1", "1024", "..%2F..%2Fx", "x"):
            assert client.call("GET", f"/jobs/{ended.id}/logs/{replica}").status in (404, 422)


def test_a_service_without_the_folder_names_what_shows_the_output(service: ServiceProcess) -> None:
    with Client(service.port) as client:
        answer = client.get(f"/jobs/{JOB}/logs/0")
        assert "`kubectl logs` shows that of its pods" in answer["missing"]
