"""A service whose disk is full, or whose database is locked, deleted, damaged or of another program."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from adascale_api.data.backend import UnusableDatabaseError
from adascale_api.data.sqlite import SqliteConnector
from adascale_core.messages.registration import ReplicaState
from api.client import Client, ServiceProcess, a_registration, a_report, wait_until
from api.test_decision import a_decision
from support.file_systems import fill, small_disk

TO_SCHEMA_13 = (
    "DROP TABLE replica_seconds",
    "DROP TABLE goodput_history",
    *(
        f"ALTER TABLE reports DROP COLUMN {column}"
        for column in (
            *("goodput", "lr", "grad_sqr_error", "gpu_use", "gpu_memory", "counts_samples"),
            *("slow_replica", "slow_factor"),
        )
    ),
    "ALTER TABLE adascale_schema DROP COLUMN readable_from",
    "UPDATE adascale_schema SET version = 13",
)
"""Make the tables of this version those of release 0.1.0."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@pytest.mark.slow
def test_what_was_answered_survives_a_full_disk_and_the_service_recovers(disk: Path, tmp_path: Path) -> None:
    with ServiceProcess(disk) as service, Client(service.port) as client:
        client.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})
        client.register("a", a_registration())
        running = a_registration(0, ReplicaState.RUNNING, generation=1)
        client.register("a", running)
        client.post_gain("b", *[a_report(step) for step in range(1000)])
        filler = fill(disk)
        stored = 0

        def is_refused() -> bool:
            nonlocal stored
            reports = [a_report(stored + step).to_json() for step in range(100)]
            status = client.call("POST", "/jobs/a/gain", reports).status
            stored += 100 * (status == 200)
            return status == 503

        wait_until(is_refused, "a full disk")
        client.register("a", running)
        wait_until(lambda: client.call("GET", "/readyz").status == 503, "the readiness probe")
        assert "adascale_database_full 1.0" in client.call("GET", "/metrics").body
        service.kill()
        with ServiceProcess(disk, port_file=tmp_path / "port") as service, Client(service.port) as client:
            assert [replica["state"] for replica in client.get("/jobs/a")["replicas"]] == ["running"]
            assert client.get("/jobs/a/gain/history?points=1")["total"] == stored
            filler.unlink()
            wait_until(lambda: not is_refused(), "room")
            wait_until(lambda: client.call("GET", "/readyz").status == 200, "the readiness probe")
            assert client.get("/jobs/a/gain/history?points=1")["total"] == stored
            assert client.get("/jobs/b/gain/history?points=1")["total"] == 1000
            assert "Traceback" not in service.log()


@pytest.mark.slow
def test_requests_to_a_locked_database_fail_within_their_deadline_and_so_does_the_stop(
    tmp_path: Path,
) -> None:
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        client.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})
        client.register("a", a_registration())
        running = a_registration(0, ReplicaState.RUNNING, generation=1)
        for _ in range(2):
            client.register("a", running)
        lock = sqlite3.connect(tmp_path / "service.db", isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")

        def post(number: int) -> tuple[int, float]:
            started = time.monotonic()
            with Client(service.port) as client:
                status = client.call("POST", f"/jobs/a-{number}/gain", a_report(number).to_json()).status
            return status, time.monotonic() - started

        with ThreadPoolExecutor(30) as threads:
            answers = [threads.submit(post, number) for number in range(30)]
            while not all(answer.done() for answer in answers):
                client.register("a", running)
                assert client.get("/jobs/a/allocation")["active"]["generation"] == 1
            assert {answer.result()[0] for answer in answers} == {503}
            assert max(answer.result()[1] for answer in answers) < 10
            waiting = [threads.submit(post, number) for number in range(30)]
            wait_until(lambda: "database is locked" in service.log(), "the lock")
            started = time.monotonic()
            assert service.stop() == 0
            assert time.monotonic() - started < 5
            for answer in waiting:
                # 500 if it has outlived the time for open requests.
                assert answer.exception() is not None or answer.result()[0] in (500, 503)
        lock.close()
        assert "Traceback" not in service.log()


def test_a_deleted_database_file_is_noticed_and_nothing_is_lost_silently(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        client.post_gain("a", a_report(1))
        (tmp_path / "service.db").unlink()
        answer = client.call("POST", "/jobs/a/gain", a_report(2).to_json())
        assert answer.status == 503
        assert "was deleted or replaced" in answer.body["error"]
        assert client.call("GET", "/readyz").status == 503
        assert client.call("GET", "/healthz").status == 200
        assert "was deleted or replaced" in service.log()
        scraped = client.call("GET", "/metrics")
        assert scraped.status == 200
        assert "adascale_database_damaged 1.0" in scraped.body
        assert "adascale_reports_total" in scraped.body
        assert "adascale_job_gain" not in scraped.body
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_a_damaged_page_is_noticed(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        for number in range(4):
            client.post_gain(f"a-{number}", *[a_report(step) for step in range(1000)])
        service.stop()
    with (tmp_path / "service.db").open("r+b") as file:
        file.seek(60 * 4096)  # beyond the first pages of all tables
        file.write(b"\xab" * 4096 * 5)
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        # The check that follows the start reads all pages.
        wait_until(lambda: client.call("GET", "/readyz").status == 503, "the check")
        assert client.call("POST", "/jobs/a-1/gain", a_report(5000).to_json()).status == 503
        assert "the database is damaged" in service.log()
        assert "Traceback" not in service.log()


DAMAGES = {
    "state": "UPDATE jobs SET version = version + 1, rendezvous = '{' WHERE id = :job",
    "text": "UPDATE reports SET metrics = 'no JSON' WHERE job_key = :key",
    "list": "UPDATE reports SET metrics = '[1]' WHERE job_key = :key",
    "metric": """UPDATE reports SET metrics = '{"a": "b"}' WHERE job_key = :key""",
    "number": "UPDATE reports SET loss = 'much' WHERE job_key = :key",
    "part": "UPDATE step_times SET seconds = x'00' WHERE job_key = :key",
    "none": "UPDATE step_times SET seconds = x'' WHERE job_key = :key",
    "gain": "UPDATE reports SET gain = 'much' WHERE job_key = :key",
    "nan": "UPDATE step_times SET seconds = x'000000000000f87f' WHERE job_key = :key",
}


def test_a_damaged_row_harms_its_own_job_only(tmp_path: Path) -> None:
    sound = ["default.a", "default.z"]
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        cursor = client.get("/jobs")["cursor"]
        for job in (*DAMAGES, "a", "z"):
            client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1})
            client.post_gain(job, a_report())
        connection = sqlite3.connect(tmp_path / "service.db", isolation_level=None)
        for job, statement in DAMAGES.items():
            job_id = f"default.{job}"
            (key,) = connection.execute("SELECT key FROM jobs WHERE id = ?", (job_id,)).fetchone()
            assert connection.execute(statement, {"job": job_id, "key": key}).rowcount == 1
        connection.close()
        for limit in (1, 3, 100):
            listed: list[str] = []
            after: str | None = ""
            while after is not None:
                page = client.get(f"/jobs?limit={limit}&after={after}")
                listed += [job["id"] for job in page["jobs"]]
                after = page["next"]
            assert listed == sound
        changed = client.get(f"/changes?since={cursor}")["jobs"]
        assert sorted(job["id"] for job in changed) == sound
        assert [job for job in client.summaries() if job in sound] == sound
        metrics = client.call("GET", "/metrics").body
        assert 'adascale_job_gain{adascale_job="default.z"}' in metrics
        assert 'adascale_job="default.gain"' not in metrics
        for job in ("part", "nan"):
            answer = client.call("POST", f"/jobs/{job}/gain", a_report(2).to_json())
            assert (answer.status, f"job default.{job} can't be read" in answer.body["error"]) == (500, True)
            assert client.get(f"/jobs/{job}/gain/history")["total"] == 1, "nothing was stored"
        for job in DAMAGES:
            assert client.call("GET", f"/jobs/{job}").status == 500
            assert client.call("DELETE", f"/jobs/{job}").status == 204
            assert f"the stored state of job default.{job} can't be read" in service.log()
        assert "Traceback" not in service.log()


@pytest.mark.parametrize(
    ("statement", "calls"),
    [
        ("UPDATE measurements SET received = 'many'", ["POST gain", "GET gain/history"]),
        ("UPDATE decisions SET decision = '['", ["GET decision", "GET generations"]),
    ],
)
def test_a_call_that_reads_a_damaged_row_names_the_job(
    tmp_path: Path, statement: str, calls: list[str]
) -> None:
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        client.post_gain("a", a_report())
        client.put("/jobs/a/decision", a_decision("default.a").to_json())
        connection = sqlite3.connect(tmp_path / "service.db", isolation_level=None)
        assert connection.execute(statement).rowcount == 1
        connection.close()
        for method, path in map(str.split, calls):
            body = a_report(2).to_json() if method == "POST" else None
            answer = client.call(method, f"/jobs/a/{path}", body)
            assert answer.status == 500
            assert answer.body["error"].startswith("the stored state of job default.a can't be read")
        assert client.call("DELETE", "/jobs/a").status == 204
        assert "Traceback" not in service.log()


def test_the_tables_of_the_release_before_are_migrated_after_a_copy_was_made(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        client.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})
        client.post_gain("a", a_report(1))
        client.post_gain("deleted", a_report(1))
        reported = client.get("/jobs/a/gain/history")["points"]
    with closing(sqlite3.connect(path)) as database:
        columns = database.execute("PRAGMA table_info(reports)").fetchall()
        for statement in TO_SCHEMA_13:
            database.execute(statement)
        # As that release leaves a deleted job until its rows are removed.
        database.execute("UPDATE jobs SET id = NULL WHERE id = 'default.deleted'")
        database.commit()
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        assert client.get("/jobs/a/gain/history")["points"] == reported
        client.post_gain("a", a_report(2))
        assert "changed the tables of" in service.log()
    with closing(sqlite3.connect(path)) as database:
        migrated = database.execute("PRAGMA table_info(reports)").fetchall()
        assert {column[1:4] for column in migrated} == {column[1:4] for column in columns}
        assert database.execute("SELECT job_key, step FROM reports").fetchall() == [(1, 1), (1, 2)]
        assert database.execute("SELECT id FROM jobs").fetchall() == [("default.a",)]
    with closing(sqlite3.connect(tmp_path / "service.db.schema-13")) as copy:
        assert copy.execute("SELECT version FROM adascale_schema").fetchall() == [(13,)]
        assert copy.execute("SELECT count(*) FROM reports").fetchall() == [(2,)]


def test_tables_are_not_migrated_without_room_for_a_copy(disk: Path) -> None:
    path = disk / "service.db"
    url = f"sqlite:///{path}"
    SqliteConnector(url).close()
    with closing(sqlite3.connect(path)) as database:
        for statement in TO_SCHEMA_13:
            database.execute(statement)
        database.execute("CREATE TABLE large (content BLOB)")
        database.execute("INSERT INTO large VALUES (randomblob(?))", (os.statvfs(disk).f_bavail * 1365,))
        database.commit()
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - (1 << 19))  # for the files that SQLite opens
    with pytest.raises(UnusableDatabaseError, match="no room for a copy of it, which"):
        SqliteConnector(url)
    assert not path.with_name("service.db.schema-13").exists()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT version FROM adascale_schema").fetchall() == [(13,)]
    filler.unlink()
    SqliteConnector(url).close()


def test_the_tables_of_a_later_version_are_used_if_they_say_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'service.db'}"
    SqliteConnector(url).close()
    with closing(sqlite3.connect(tmp_path / "service.db")) as database:
        database.execute("UPDATE adascale_schema SET version = version + 1")
        database.execute("ALTER TABLE reports ADD COLUMN added_later TEXT")
        database.commit()
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        client.post_gain("a", a_report(1))
    with closing(sqlite3.connect(tmp_path / "service.db")) as database:
        database.execute("UPDATE adascale_schema SET readable_from = version")
        database.commit()
    with pytest.raises(UnusableDatabaseError, match="use the version of the service that created it"):
        SqliteConnector(url)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("CREATE TABLE jobs (id TEXT)", "has the tables of another program"),
        ("DROP TABLE measurements", "lacks the tables measurements"),
        ("UPDATE adascale_schema SET version = 1", "has schema version 1"),
    ],
)
def test_the_tables_of_another_program_or_version_are_refused(
    tmp_path: Path, statement: str, message: str
) -> None:
    path = tmp_path / "service.db"
    if not statement.startswith("CREATE"):
        SqliteConnector(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
    with pytest.raises(UnusableDatabaseError, match=message):
        SqliteConnector(f"sqlite:///{path}")
