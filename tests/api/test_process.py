"""The service as a process: start, refused starts, crashes and shutdown."""

import errno
import os
import random
import signal
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import urllib3

from adascale_api import cli, server
from adascale_api.cli import main
from adascale_api.data.store.reports import Retention
from adascale_api.service.service import Settings
from adascale_core.errors import UsageError
from api.client import TOKEN, Client, ServiceProcess, a_report, environment, run_service, wait_until
from support.examples import examples
from support.file_systems import fill, small_disk

CLIENTS = 16


def test_concurrent_clients_lose_and_duplicate_no_report(service: ServiceProcess, job: str) -> None:
    together = Barrier(CLIENTS)

    def post(number: int) -> tuple[int, int]:
        """Post every report twice, by this client and by the next; some alone, some in lists."""
        stored = repeated = 0
        with Client(service.port) as client:
            together.wait()
            for chunk in range(10):
                steps = [
                    (number + again) % CLIENTS * 1000 + chunk * 5 + i for again in (0, 1) for i in range(5)
                ]
                for request in (steps[:3], steps[3:4], steps[4:]):
                    answer = client.post_gain(job, *[a_report(step) for step in request])
                    stored += answer["stored"]
                    repeated += answer["repeated"]
        return stored, repeated

    with ThreadPoolExecutor(CLIENTS) as threads:
        counts = list(threads.map(post, range(CLIENTS)))
    expected = CLIENTS * 50
    assert sum(stored for stored, _ in counts) == expected
    assert sum(repeated for _, repeated in counts) == expected
    with Client(service.port) as client:
        history = client.get(f"/jobs/{job}/gain/history?points=5000")
    assert history["total"] == expected
    steps = [point["step"] for point in history["points"]]
    assert steps == sorted({client * 1000 + i for client in range(CLIENTS) for i in range(50)})


KILLS = int(os.environ.get("ADASCALE_KILLS", examples(2)))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, KILLS))]
)
def test_what_was_answered_survives_a_kill(tmp_path: Path, seed: int) -> None:
    reports_before_kill = random.Random(seed).randrange(20, 400)
    answered: dict[int, list[int]] = {number: [] for number in range(CLIENTS)}

    def post_until_killed(port: int, number: int) -> None:
        with Client(port) as client:
            step = 0
            while True:
                steps = range(step, step + 1 + number % 3)
                body = [a_report(step).to_json() for step in steps]
                try:
                    answer = client.call("POST", f"/jobs/job-{number}/gain", body)
                except urllib3.exceptions.HTTPError:
                    return
                if answer.status == 503:  # A slow disk: it may be stored later, and is sent again.
                    continue
                assert answer.status == 200, answer
                assert answer.body["stored"] + answer.body["repeated"] == len(steps)
                answered[number] += steps
                step = steps.stop

    with ServiceProcess(tmp_path) as service, ThreadPoolExecutor(CLIENTS) as threads:
        posting = [threads.submit(post_until_killed, service.port, number) for number in range(CLIENTS)]
        with Client(service.port) as client:
            version = client.put("/jobs/job-0/allocation", {"generation": 7, "replicas": 2})["version"]

        def are_enough() -> bool:
            return all(answered.values()) and sum(map(len, answered.values())) >= reports_before_kill

        wait_until(are_enough, "enough reports")
        service.kill()
        for client_loop in posting:
            client_loop.result(30)
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        for number, steps in answered.items():
            history = client.get(f"/jobs/job-{number}/gain/history?points=5000")
            stored = [point["step"] for point in history["points"]]
            # The last request may have been stored without its answer having arrived.
            assert stored[: len(steps)] == steps
            assert len(stored) - len(steps) in (0, 1 + number % 3)
            assert history["total"] == len(stored)
            again = client.post_gain(f"job-{number}", *[a_report(step) for step in steps])
            assert (again["stored"], again["repeated"]) == (0, len(steps))
        assert client.get("/jobs/job-0/allocation")["version"] == version


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_service_and_answers_waiting_requests(
    tmp_path: Path, number: signal.Signals
) -> None:
    with ServiceProcess(tmp_path) as service, ThreadPoolExecutor(4) as threads:
        with Client(service.port) as client:
            now = client.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})

        def wait() -> object:
            with Client(service.port) as client:
                return client.get(f"/jobs/a/allocation?version={now['version']}&wait=60")

        waiting = [threads.submit(wait) for _ in range(4)]
        with Client(service.port) as client:
            metric = 'adascale_request_duration_seconds_count{method="GET",route="/jobs/{job}/allocation"'
            wait_until(lambda: open_connections(service) >= 5, "the waiting")
            assert metric not in str(client.call("GET", "/metrics").body)
        assert service.stop(number) == 0
        assert [request.result(10) for request in waiting] == [now] * 4
        assert "Traceback" not in service.log()
        assert not list(tmp_path.glob("*.db-wal")), "the database was not closed"


def open_connections(service: ServiceProcess) -> int:
    """Return the number of connections that the service has accepted."""
    folder = Path(f"/proc/{service.pid}/fd")
    if not folder.exists():
        pytest.skip("needs /proc")
    found = -1  # the socket that listens
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):  # It was closed since.
            found += str(entry.readlink()).startswith("socket:")
    return found


def test_thousands_of_agents_may_connect_while_the_service_is_busy(tmp_path: Path) -> None:
    clients = 3000
    limit = Path("/proc/sys/net/core/somaxconn")
    if not limit.exists() or int(limit.read_text()) < clients:
        pytest.skip(f"the kernel lets fewer than {clients} connections wait")
    with ServiceProcess(tmp_path) as service, ExitStack() as stack:
        service.send_signal(signal.SIGSTOP)
        stack.callback(service.send_signal, signal.SIGCONT)
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=10))
            for _ in range(clients)
        ]
        service.send_signal(signal.SIGCONT)
        for connection in connections[:: clients // 10]:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_the_port_file_is_replaced_when_the_service_listens(tmp_path: Path) -> None:
    old = tmp_path / "port"
    old.write_text("1\n")
    with ServiceProcess(tmp_path, port_file=old) as service:
        assert old.read_text() == f"{service.port}\n"
        assert not list(tmp_path.glob("port.*"))
        with Client(service.port) as client:
            assert client.get("/healthz") == {"status": "ok"}
            assert client.get("/readyz") == {"status": "ok"}


def test_the_service_accepts_connections_of_an_inherited_socket(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor = listener.fileno()
        with ServiceProcess(tmp_path, "--fd", str(descriptor), pass_fds=[descriptor]) as service:
            assert service.port == listener.getsockname()[1]
            with Client(service.port) as client:
                assert client.get("/readyz") == {"status": "ok"}


def test_a_port_file_that_can_not_be_written_is_refused_without_a_traceback(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    options = ["--port", "0", "--database", url, "--port-file", "/nowhere/at/all"]
    refused = run_service(*options, ADASCALE_TOKEN=TOKEN)
    assert_refused(refused.returncode, refused.stderr, "port file /nowhere/at/all can't be written")


def assert_refused(code: object, output: str, *parts: str) -> None:
    assert code == 2, output
    assert "Traceback" not in output
    for part in parts:
        assert part in output, output


class Command:
    """Calls the command in this process, which is faster; it must exit before it serves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def assert_refuses(self, options: list[str], environ: dict[str, str], *parts: str) -> None:
        self._monkeypatch.setattr("sys.argv", ["adascale-api", *options])
        self._monkeypatch.setattr("os.environ", environment(**environ))
        with pytest.raises(SystemExit) as exit_:
            main()
        assert_refused(exit_.value.code, self._capsys.readouterr().err, *parts)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_a_port_in_use_is_refused_without_a_traceback(service: ServiceProcess, command: Command) -> None:
    options = ["--port", str(service.port), "--database", "sqlite:////nowhere/at/all.db"]
    named = f"can't listen on 127.0.0.1 port {service.port}"
    command.assert_refuses(options, {"ADASCALE_TOKEN": TOKEN}, named, "in use", "--port")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("nonsense", ["'nonsense' is not valid", "sqlite:///PATH"]),
        ("mysql://me:secret@somewhere/db", ["mysql://me:***@somewhere/db", "is not valid", "postgresql://"]),
        (
            "postgresql://me:secret@localhost:1/db",
            ["postgresql://localhost/db", "can't be opened", "refused"],
        ),
        ("postgresql://me:secret@localhost/db?no=1", ["is not valid", "postgresql://"]),
        ("sqlite://", ["would lose all data"]),
        ("sqlite:///:memory:", ["would lose all data"]),
        ("sqlite:////nowhere/at/all.db", ["can't be opened", "unable to open database file"]),
        ("sqlite:////dev/null/a.db", ["can't be opened"]),
        ("sqlite:///{folder}", ["can't be opened", "unable to open database file"]),
        ("sqlite:///{folder}/no.db", ["can't be opened", "not a database"]),
        ("sqlite:///{folder}/other.db", ["schema version 99", "another file"]),
    ],
)
def test_an_unusable_database_is_refused_without_a_traceback(
    tmp_path: Path, command: Command, url: str, parts: list[str]
) -> None:
    (tmp_path / "no.db").write_bytes(b"this is no database, but a text" * 100)
    other = sqlite3.connect(tmp_path / "other.db")
    with other:
        other.execute("CREATE TABLE adascale_schema (version INTEGER PRIMARY KEY)")
        other.execute("INSERT INTO adascale_schema VALUES (99)")
    other.close()
    options = ["--port", "0", "--database", url.format(folder=tmp_path)]
    command.assert_refuses(options, {"ADASCALE_TOKEN": TOKEN}, *parts)


def test_a_disk_without_room_for_the_database_is_the_reason_in_the_error(
    tmp_path: Path, command: Command
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        filler = fill(disk)
        os.truncate(filler, filler.stat().st_size - 64 * 1024)  # enough for the file, and not for its tables
        options = ["--port", "0", "--database", f"sqlite:///{disk}/a.db"]
        command.assert_refuses(
            options, {"ADASCALE_TOKEN": TOKEN}, "can't be opened and written", "disk is full"
        )


@pytest.mark.parametrize(
    ("options", "environ", "parts"),
    [
        ([], {}, ["no token is set", "ADASCALE_TOKEN", "--no-auth"]),
        ([], {"ADASCALE_TOKEN": "two words"}, ["ADASCALE_TOKEN", "visible ASCII"]),
        ([], {"ADASCALE_TOKEN_FILE": "/nowhere/token"}, ["/nowhere/token", "can't be read"]),
        (["--no-auth", "--host", "0.0.0.0"], {}, ["--no-auth", "0.0.0.0", "--host 127.0.0.1"]),
        (["--no-auth", "--host", ""], {}, ["--no-auth"]),
        (["--no-auth", "--protect-reads"], {}, ["contradict"]),
        (["--no-auth", "--token-review"], {}, ["--token-review: not allowed with argument --no-auth"]),
        (["--host", "not.a.host.invalid"], {"ADASCALE_TOKEN": TOKEN}, ["can't listen on not.a.host.invalid"]),
        (["--fd", "99"], {"ADASCALE_TOKEN": TOKEN}, ["file descriptor 99 of --fd is no socket"]),
        (["--keep-finished-days", "0"], {"ADASCALE_TOKEN": TOKEN}, ["--keep-finished-days", "from 1 to"]),
        (
            ["--keep-finished-days", "9" * 400],
            {"ADASCALE_TOKEN": TOKEN},
            ["--keep-finished-days", "from 1 to"],
        ),
        (["--port", "70000"], {"ADASCALE_TOKEN": TOKEN}, ["port"]),
        (["--port", "-1"], {"ADASCALE_TOKEN": TOKEN}, ["port"]),
        (["--port", "http"], {"ADASCALE_TOKEN": TOKEN}, ["--port", "http"]),
    ],
)
def test_unusable_options_are_refused_without_a_traceback(
    tmp_path: Path, command: Command, options: list[str], environ: dict[str, str], parts: list[str]
) -> None:
    port = [] if "--port" in options else ["--port", "0"]
    url = f"sqlite:///{tmp_path / 'a.db'}"
    command.assert_refuses([*port, "--database", url, *options], environ, *parts)


def test_an_inherited_socket_that_does_not_listen_is_refused(tmp_path: Path, command: Command) -> None:
    with socket.socket() as unbound:
        descriptor = os.dup(unbound.fileno())
        options = ["--fd", str(descriptor), "--database", f"sqlite:///{tmp_path / 'a.db'}"]
        command.assert_refuses(options, {"ADASCALE_TOKEN": TOKEN}, "no listening TCP socket")


def test_options_set_how_many_reports_and_days_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Settings] = []

    def create_app(_database: object, _authorizer: object, settings: Settings, **_others: object) -> None:
        given.append(settings)
        raise UsageError("all options are read")

    monkeypatch.setattr(cli, "Database", str)
    monkeypatch.setattr(cli, "create_app", create_app)
    options = ["--port", "0", "--keep-finished-days", "2", "--keep-unfinished-days", "30"]
    options += ["--keep-newest-reports", "20", "--keep-earlier-reports", "10"]
    with pytest.raises(UsageError, match="all options"):
        cli.run(options, {"ADASCALE_TOKEN": "t"})
    assert (given[0].finished_days, given[0].unfinished_days) == (2, 30)
    assert given[0].reports == Retention(20, 10)


def test_without_authentication_every_client_may_write_and_a_warning_is_logged(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, "--no-auth", environ={}) as service, Client(service.port, None) as client:
        assert client.post_gain("a", a_report())["stored"] == 1
        assert "NO AUTHENTICATION" in service.log()


def test_a_renewed_token_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    # The file takes precedence over the variable.
    environ = {"ADASCALE_TOKEN_FILE": str(path), "ADASCALE_TOKEN": "unused"}
    with (
        ServiceProcess(tmp_path, environ=environ) as service,
        Client(service.port, "first") as first,
        Client(service.port, "second") as second,
    ):
        statuses = []
        for text in ("first", "second\n", "", None):
            if text is None:
                path.unlink()
            else:
                renewed = path.with_suffix(".new")
                renewed.write_text(text)
                renewed.replace(path)
            body = a_report().to_json()
            statuses.append([client.call("POST", "/jobs/a/gain", body).status for client in (first, second)])
        # With an empty or missing file the previous token stays valid.
        assert statuses == [[200, 401], [401, 200], [401, 200], [401, 200]]
        assert "what was read before stays in use" in service.log()


@pytest.mark.parametrize(
    ("host", "reached", "not_reached"),
    [
        ("::1", ["::1"], ["127.0.0.1"]),
        ("::", ["::1", "127.0.0.1"], []),
        ("0.0.0.0", ["127.0.0.1"], ["::1"]),
    ],
)
def test_the_service_listens_on_ipv4_and_ipv6_as_the_host_says(
    tmp_path: Path, host: str, reached: list[str], not_reached: list[str]
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with ServiceProcess(tmp_path, "--host", host) as service:
        url = f"http://{f'[{host}]' if ':' in host else host}:{service.port}"
        wait_until(lambda: url in service.log(), "the line with its address")
        for address in reached:
            with socket.create_connection((address, service.port)) as connection:
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        for address in not_reached:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, service.port))


def test_metrics_cover_the_jobs_and_the_requests(service: ServiceProcess, client: Client, job: str) -> None:
    client.post_gain(job, a_report(1), a_report(2, gain=3.0, progress=5.0))
    client.call("GET", "/somewhere/else")
    answer = client.call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        f'adascale_job_gain{{adascale_job="{job}"}} 3.0',
        f'adascale_job_efficiency_ratio{{adascale_job="{job}"}} 0.75',
        f'adascale_job_progress_steps{{adascale_job="{job}"}} 5.0',
        f'adascale_job_replicas{{adascale_job="{job}"}} 2.0',
        f'adascale_job_local_batch_size_samples{{adascale_job="{job}"}} 8.0',
        'adascale_reports_total{result="stored"}',
        'adascale_request_duration_seconds_count{method="POST",route="/jobs/{job}/gain",status="200"}',
        'adascale_request_duration_seconds_count{method="GET",route="none",status="404"}',
    ):
        assert line in answer.body, line


def test_without_ipv6_in_the_kernel_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    create_server = socket.create_server

    def without_ipv6(address: tuple[str, int], *, family: int, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return create_server(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    with server._listen("::", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    with pytest.raises(UsageError, match="can't listen on ::1 port 0"):
        server._listen("::1", 0)
