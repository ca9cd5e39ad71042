"""Several services on one PostgreSQL database."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import urllib3

from adascale_api.data import postgresql as postgresql_backend
from adascale_api.data.backend import UnusableDatabaseError
from adascale_api.data.postgresql import PostgresqlConnector
from adascale_core.messages.registration import ReplicaState
from api.client import Client, ServiceProcess, a_registration, a_report, wait_until
from api.test_faults import TO_SCHEMA_13
from support.file_systems import fill
from support.launch import free_port
from support.postgresql import PostgresqlServer, postgresql_server
from support.proxy import Proxy


@pytest.fixture
def services(tmp_path: Path, postgresql: PostgresqlServer) -> Iterator[list[ServiceProcess]]:
    """Two services on a new database."""
    url = postgresql.new_database()
    with ExitStack() as stack:
        folders = [tmp_path / name for name in ("first", "second")]
        for folder in folders:
            folder.mkdir()
        started = [stack.enter_context(ServiceProcess(folder, url=url)) for folder in folders]
        yield started
        assert all("Traceback" not in service.log() for service in started)


@pytest.fixture
def clients(services: list[ServiceProcess]) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Client(service.port)) for service in services]


def test_a_change_by_another_service_wakes_waiting_requests(clients: list[Client]) -> None:
    first, second = clients
    version = first.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})["version"]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(second.get, f"/jobs/a/allocation?version={version}&wait=60")
        changed = first.put("/jobs/a/allocation", {"generation": 2, "replicas": 1})
        assert waiting.result(30) == changed
    assert first.call("DELETE", "/jobs/a").status == 204
    wait_until(lambda: second.call("GET", "/jobs/a/allocation").status == 404, "the deletion")


def test_each_service_tells_the_changes_that_others_commit(clients: list[Client]) -> None:
    first, second = clients
    generation, cursor = 0, ""

    def learns() -> bool:
        nonlocal generation, cursor
        generation += 1
        cursor = cursor or second.get("/jobs")["cursor"]
        first.put("/jobs/a/allocation", {"generation": generation, "replicas": 1})
        answer = second.call("GET", f"/changes?since={cursor}&wait=2")
        cursor = answer.body["cursor"] if answer.status == 200 else ""
        return bool(cursor) and [job["desired"]["generation"] for job in answer.body["jobs"]] == [generation]

    # A service begins to listen after its start; its first cursors expire then.
    wait_until(learns, "a change")
    assert first.call("GET", f"/changes?since={cursor}").status == 410, "the cursor of another service"
    assert first.call("DELETE", "/jobs/a").status == 204

    def is_deleted() -> bool:
        nonlocal cursor
        found = second.get(f"/changes?since={cursor}&wait=60")
        cursor = found["cursor"]
        return bool(found["deleted"] == ["default.a"])

    wait_until(is_deleted, "the deletion")


def test_a_character_that_the_database_can_not_store_harms_no_other_job(
    clients: list[Client], services: list[ServiceProcess]
) -> None:
    for client in clients:
        bad = client.call("PUT", "/jobs/a/replicas/0", a_registration(0, instance="a\0b").to_json())
        assert (bad.status, "instance: got" in bad.body["error"]) == (422, True)
        assert client.call("GET", "/jobs?after=%00").status == 422
    clients[0].put("/jobs/a/allocation", {"generation": 1, "replicas": 1})
    clients[0].register("a", a_registration())
    failed = a_registration(replica_state=ReplicaState.FAILED, generation=1, exit_code=1, log="a\0b")
    clients[0].register("a", failed)
    assert clients[1].get("/jobs/a")["replicas"][0]["log"] == "a\ufffdb"
    assert all("unavailable" not in service.log() for service in services)


def test_replicas_that_register_with_different_services_activate_each_generation_once(
    clients: list[Client], services: list[ServiceProcess]
) -> None:
    size = 16
    for generation in (1, 2, 3):
        job = f"job-{generation}"
        clients[0].put(f"/jobs/{job}/allocation", {"generation": generation, "replicas": size})

        def register(rank: int, job: str = job) -> Any:
            with Client(services[rank % 2].port) as client:
                return client.register(job, a_registration(rank))

        with ThreadPoolExecutor(size) as threads:
            views = list(threads.map(register, range(size)))
        active = [view["active"] for view in views if view["active"] is not None]
        assert len(active) == 1, "the last registration activates the generation, and no other does"
        versions = [view["version"] for view in views]
        assert len(set(versions)) == size
        for client in clients:

            def knows(client: Client = client, job: str = job, expected: Any = active[0]) -> bool:
                return bool(client.get(f"/jobs/{job}/allocation")["active"] == expected)

            wait_until(knows, "the generation")


@pytest.mark.slow
def test_an_unreadable_job_or_an_invalid_notification_stops_no_service(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    url = postgresql.new_database()
    with ServiceProcess(tmp_path, url=url) as service, Client(service.port) as client:
        with psycopg.connect(url, autocommit=True) as connection:
            for job in ("bad", "sound"):
                client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1})
                client.register(job, a_registration())
            connection.execute("UPDATE jobs SET rendezvous = 'no JSON' WHERE id = 'default.bad'")
            connection.execute("NOTIFY adascale_jobs, 'default.bad 9000000000000000000'")
            wait_until(lambda: "job default.bad can't be read" in service.log(), "the read of the job")
            connection.execute("NOTIFY adascale_jobs, 'no version'")
            wait_until(lambda: "listens again" in service.log(), "the invalid notification")
        wait_until(lambda: client.get("/jobs/sound")["replicas"] == [], "the expiry of the other job")
        with psycopg.connect(url, autocommit=True) as connection, ThreadPoolExecutor(1) as threads:
            version = client.get("/jobs/sound/allocation")["version"]
            waiting = threads.submit(client.get, f"/jobs/sound/allocation?version={version}&wait=60")
            # As another service does.
            connection.execute("UPDATE jobs SET version = version + 1 WHERE id = 'default.sound'")

            def is_answered() -> bool:
                # Again, because the service may begin to listen only now.
                connection.execute(f"NOTIFY adascale_jobs, 'default.sound {version + 1}'".encode())
                return waiting.done()

            wait_until(is_answered, "the notification")
            assert waiting.result()["version"] == version + 1


@pytest.mark.slow
def test_a_heartbeat_to_any_service_keeps_a_replica(
    clients: list[Client], services: list[ServiceProcess]
) -> None:
    first, second = clients
    first.put("/jobs/a/allocation", {"generation": 1, "replicas": 2})
    running = [a_registration(rank, ReplicaState.RUNNING, generation=1) for rank in (0, 1)]
    for rank, registration in enumerate(running):
        first.register("a", a_registration(rank))
        first.register("a", registration)
    services[0].kill()

    def is_lost() -> bool:
        second.register("a", running[0])
        return [replica["replica"] for replica in second.get("/jobs/a")["replicas"]] == [0]

    # Replica 1 never sends a heartbeat to the remaining service.
    wait_until(is_lost, "the expiry of replica 1")


class Traffic:
    """Clients that post reports, each of its own job, to the services in turn.

    Args:
        ports: of the services.
        workers: the number of clients.
    """

    def __init__(self, ports: list[int], workers: int = 8) -> None:
        self._ports = ports
        self._stop = threading.Event()
        self.answered: dict[int, list[int]] = {number: [] for number in range(workers)}

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(len(self.answered)) as threads:
            posting = [threads.submit(self._post, number) for number in self.answered]
            try:
                yield
            finally:
                self._stop.set()
            for worker in posting:
                worker.result(60)

    def wait_for_progress(self) -> None:
        """Wait until each client has got another answer."""
        before = {number: len(steps) for number, steps in self.answered.items()}
        wait_until(
            lambda: all(len(steps) > before[number] for number, steps in self.answered.items()), "progress"
        )

    def require_stored_once(self, client: Client) -> None:
        """Fail if a report that was answered with 200 is not stored, or one is counted twice."""
        for number, steps in self.answered.items():
            history = client.get(f"/jobs/job-{number}/gain/history?points=5000")
            assert [point["step"] for point in history["points"]][: len(steps)] == steps
            assert history["total"] == len(history["points"])

    def _post(self, number: int) -> None:
        step = 0
        with Client(self._ports[number % len(self._ports)]) as client:
            while not self._stop.is_set():
                try:
                    answer = client.call("POST", f"/jobs/job-{number}/gain", a_report(step).to_json())
                except urllib3.exceptions.HTTPError:
                    continue
                if answer.status == 200:
                    self.answered[number].append(step)
                    step += 1
                else:
                    assert answer.status == 503, answer


@pytest.mark.slow
def test_what_was_answered_is_stored_once_whatever_fails(
    postgresql: PostgresqlServer, services: list[ServiceProcess]
) -> None:
    traffic = Traffic([service.port for service in services])
    with traffic.running():
        for _ in range(5):
            traffic.wait_for_progress()
            postgresql.cut_connections()
        traffic.wait_for_progress()
        postgresql.stop()
        postgresql.start()
        traffic.wait_for_progress()
    with Client(services[1].port) as client:
        traffic.require_stored_once(client)
        assert client.get("/readyz") == {"status": "ok"}


@pytest.mark.slow
def test_what_was_answered_survives_the_promotion_of_a_standby(tmp_path: Path) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(postgresql_server())
        name = primary.new_database().rpartition("/")[2]
        standby = stack.enter_context(primary.standby())
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        url = f"postgresql://tests@{hosts}/{name}?target_session_attrs=read-write"
        services = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            services.append(stack.enter_context(ServiceProcess(folder, url=url)))
        traffic = Traffic([service.port for service in services])
        with traffic.running():
            traffic.wait_for_progress()
            primary.stop()
            standby.execute("SELECT pg_promote()")
            traffic.wait_for_progress()
        for service in services:
            with Client(service.port) as client:
                traffic.require_stored_once(client)
                version = client.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})["version"]
                assert client.get("/jobs/a/allocation")["version"] == version
            assert "Traceback" not in service.log()


class CuttingProxy(Proxy):
    """Cuts the connection of every fifth COMMIT.

    In turn before the server receives it, and after the server has answered it, without the answer.
    """

    def __init__(self, port: int) -> None:
        self.cuts = {"before": 0, "after": 0}
        self._commits = 0
        self._lose_answers: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(port)

    def request(self, data: bytes, client: socket.socket, server: socket.socket) -> bool:
        if b"COMMIT\0" in data:
            with self._lock:
                self._commits += 1
                kind = {5: "before", 0: "after"}.get(self._commits % 10)
                if kind is not None:
                    self.cuts[kind] += 1
            if kind == "before":
                return False
            if kind == "after":
                self._lose_answers.add(client)
        return super().request(data, client, server)

    def answer(self, data: bytes, client: socket.socket) -> bool:
        return client not in self._lose_answers and super().answer(data, client)


@pytest.mark.slow
def test_a_connection_that_is_cut_in_a_commit_loses_and_repeats_nothing(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    url = postgresql.new_database()
    with (
        closing(CuttingProxy(postgresql.port)) as proxy,
        ServiceProcess(tmp_path, url=url.replace(f":{postgresql.port}/", f":{proxy.port}/")) as service,
        Client(service.port) as client,
    ):
        traffic = Traffic([service.port])
        activated: dict[int, Any] = {}

        def call(method: str, path: str, body: object) -> Any:
            """Return the answer, after further attempts as clients make them."""
            while (answer := client.call(method, path, body)).status == 503:
                pass
            assert answer.status in (200, 409), answer
            return answer.body

        with traffic.running():
            generation = 0
            while min(proxy.cuts.values()) < 10:
                generation += 1
                call("PUT", "/jobs/a/allocation", {"generation": generation, "replicas": 2})
                for rank in (0, 1):
                    waiting = a_registration(rank, instance=f"agent-{rank}.{generation}")
                    view = call("PUT", f"/jobs/a/replicas/{rank}", waiting.to_json())
                    if view["active"] is not None:
                        number = view["active"]["generation"]
                        assert activated.setdefault(number, view["active"]) == view["active"]
                assert generation in activated, "both replicas are ready"
            traffic.wait_for_progress()
        traffic.require_stored_once(client)
        recorded = [each["generation"] for each in client.get("/jobs/a/generations")["generations"]]
        assert recorded == list(range(1, generation + 1))
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_reports_are_accepted_again_once_the_disk_of_the_server_has_room(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    with (
        postgresql.small_database() as (url, disk),
        ServiceProcess(tmp_path, url=url) as service,
        Client(service.port) as client,
    ):
        client.post_gain("a", a_report())
        filler = fill(disk)
        reports = [a_report(step).to_json() for step in range(1000)]
        wait_until(lambda: client.call("POST", "/jobs/a/gain", reports).status == 503, "a full disk")
        assert client.call("GET", "/readyz").status == 503
        assert "adascale_database_full 1.0" in client.call("GET", "/metrics").body
        filler.unlink()
        # Nothing else is written meanwhile.
        wait_until(lambda: client.call("GET", "/readyz").status == 200, "the readiness probe")
        assert client.call("POST", "/jobs/a/gain", reports).status == 200
        assert "adascale_database_full 0.0" in client.call("GET", "/metrics").body
        assert "Traceback" not in service.log()


def test_the_tables_of_the_release_before_are_migrated(postgresql: PostgresqlServer, tmp_path: Path) -> None:
    url = postgresql.new_database()
    with ServiceProcess(tmp_path, url=url) as service, Client(service.port) as client:
        client.post_gain("a", a_report(1))
        reported = client.get("/jobs/a/gain/history")["points"]
    with psycopg.connect(url) as connection:
        for statement in TO_SCHEMA_13:
            connection.execute(statement.encode())
    with ServiceProcess(tmp_path, url=url) as service, Client(service.port) as client:
        assert client.get("/jobs/a/gain/history")["points"] == reported
        client.post_gain("a", a_report(2))


def test_a_database_of_another_version_or_program_is_refused(postgresql: PostgresqlServer) -> None:
    url = postgresql.new_database()
    PostgresqlConnector(url)
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE adascale_schema SET version = 3")
    with pytest.raises(UnusableDatabaseError, match=r"has schema version 3, this service needs version \d"):
        PostgresqlConnector(url)
    other = postgresql.new_database()
    with psycopg.connect(other) as connection:
        connection.execute("CREATE TABLE jobs (id TEXT)")
    with pytest.raises(UnusableDatabaseError, match="the tables of another program"):
        PostgresqlConnector(other)


# -- PgBouncer ---------------------------------------------------------------------------------------------


@contextmanager
def pgbouncer(postgresql: PostgresqlServer, database: str, mode: str, *settings: str) -> Iterator[str]:
    """Run Debian's PgBouncer before a server. Yields the URL of the database through it."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("needs pgbouncer")
        pytest.skip("needs pgbouncer")
    port = free_port()
    # It refuses to run as root, and other users can't read in the folders of pytest.
    user = "nobody" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "users.txt").write_text('"tests" ""\n')
    file = folder / "pgbouncer.ini"
    file.write_text(
        "\n".join(
            [
                "[databases]",
                f"* = host=127.0.0.1 port={postgresql.port}",
                "[pgbouncer]",
                "listen_addr = 127.0.0.1",
                f"listen_port = {port}",
                "unix_socket_dir =",
                "auth_type = trust",
                f"auth_file = {folder / 'users.txt'}",
                f"pool_mode = {mode}",
                *settings,
            ]
        )
    )
    with (folder / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen([program, file], stdout=log, stderr=log, user=user)
    try:
        wait_until(lambda: is_listening(port) or process.poll() is not None, "PgBouncer")
        assert process.poll() is None, (folder / "pgbouncer.log").read_text()
        yield f"postgresql://tests@127.0.0.1:{port}/{database.rpartition('/')[2]}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("settings", [[], ["ignore_startup_parameters = options"]])
def test_services_work_behind_pgbouncer_in_session_mode(
    tmp_path: Path, postgresql: PostgresqlServer, settings: list[str]
) -> None:
    database = postgresql.new_database()
    with pgbouncer(postgresql, database, "session", *settings) as url, ExitStack() as stack:
        folders = [tmp_path / name for name in ("first", "second")]
        for folder in folders:
            folder.mkdir()
        services = [stack.enter_context(ServiceProcess(folder, url=url)) for folder in folders]
        first, second = (stack.enter_context(Client(service.port)) for service in services)
        version = first.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})["version"]
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(second.get, f"/jobs/a/allocation?version={version}&wait=60")
            changed = first.put("/jobs/a/allocation", {"generation": 2, "replicas": 1})
            assert waiting.result(30) == changed
        connection = PostgresqlConnector(url).connect(writes=True)
        with connection:
            assert connection.execute("SHOW lock_timeout").fetchone() == ("2s",)


def test_timeouts_of_the_url_hold(postgresql: PostgresqlServer) -> None:
    url = f"{postgresql.new_database()}?options=-c%20lock_timeout%3D1s"
    with PostgresqlConnector(url).connect(writes=True) as connection:
        assert connection.execute("SHOW lock_timeout").fetchone() == ("1s",)
        assert connection.execute("SHOW statement_timeout").fetchone() == ("4s",)


@pytest.mark.parametrize("settings", [[], ["ignore_startup_parameters = options"]])
def test_a_pooler_in_transaction_mode_is_refused_with_what_to_do(
    postgresql: PostgresqlServer, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_backend, "NOTIFY_TIMEOUT", 0.5)
    database = postgresql.new_database()
    with (
        pgbouncer(postgresql, database, "transaction", *settings) as url,
        pytest.raises(UnusableDatabaseError) as error,
    ):
        PostgresqlConnector(url)
    assert str(error.value).endswith(
        "is behind a pooler in transaction mode, which passes no notifications on: give the address of "
        "PostgreSQL itself, or of a pool with pool_mode = session"
    )
