"""Clients that send what costs the service much: each is bounded, and others are served meanwhile."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from adascale_api.cli import INTERVAL, MAX_RECORDS, LogLimit
from adascale_api.data.job import StoredJob
from adascale_api.data.store.jobs import EPOCH, MAX_UNDECLARED, require_reachable
from adascale_api.errors import InvalidInputError
from adascale_api.http.connection_limits import MAX_DATA
from adascale_api.http.connections import HEADER_OVERHEAD, MAX_HEAD
from adascale_api.service.changes import MAX_ANONYMOUS_FOLLOWERS, MAX_ANONYMOUS_WAITS
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.rendezvous.rendezvous import Rendezvous
from adascale_core.views.jobs import JobView
from api.client import MEMORY_LIMIT, TOKEN, Client, ServiceProcess, a_registration, a_report, wait_until
from support.clock import Clock


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service whose memory is measured at the end of this module's tests."""
    with ServiceProcess(tmp_path_factory.mktemp("attacked"), own_interpreter=True) as running:
        yield running
        assert running.code is None
        assert running.peak_memory() < MEMORY_LIMIT / 2
        assert "Traceback" not in running.log()


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b",".join([b"{}"] * 340_000) + b"]",
        b"[" + b",".join([b"[]"] * 340_000) + b"]",
        b"[" + b",".join([b"{}"] * 1000) + b"]",
        b"[" * 1_000_000,
        b"{" + b",".join(b'"%d":0' % number for number in range(100_000)) + b"}",
        b'{"metrics":{' + b",".join(b'"m%d":0' % number for number in range(90_000)) + b"}}",
        b'{"step":' + b"1" * 1_000_000 + b"}",
        b'{"step":"' + b"\\u0000" * 170_000 + b'"}',
    ],
    ids=["objects", "lists", "1000 objects", "nested", "fields", "metrics", "digits", "escapes"],
)
def test_a_body_costs_no_more_than_its_size(attacked: ServiceProcess, text: bytes) -> None:
    with Client(attacked.port) as client:
        before = attacked.peak_memory()
        for path, method in (("gain", "POST"), ("allocation", "PUT"), ("replicas/0", "PUT")):
            answer = client.call(method, f"/jobs/attacked/{path}", text=text)
            assert answer.status == 422
            assert path == "gain" or "reports" not in answer.body["error"]
            assert len(json.dumps(answer.body)) < 20_000
        assert attacked.peak_memory() - before < 100 * 1024


def test_reports_at_the_limit_are_stored(attacked: ServiceProcess) -> None:
    with Client(attacked.port) as client:
        assert client.post_gain("limit", *[a_report(step) for step in range(1000)])["stored"] == 1000


def test_connections_with_half_a_request_are_closed_and_others_are_served(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, "--max-connections", "100") as service, ExitStack() as stack:
        heads = (b"POST /jobs/a/gain HTTP/1.1\r\nHost: x\r\n", b"", b"GET ")
        for number in range(300):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=10))
            half.sendall(heads[number % len(heads)])
            if number % 100 == 99:
                with Client(service.port) as client:
                    assert client.post_gain("a", a_report(number))["stored"] == 1
        assert len(service.log()) < 10_000


def test_a_head_that_is_too_large_is_refused(attacked: ServiceProcess) -> None:
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=10) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000)
        connection.sendall(b"a" * 20_000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "head", [b"A: " + b"a" * (MAX_HEAD - 1000), b"a:b\r\n" * 100], ids=["large header", "small headers"]
)
def test_incomplete_heads_take_bounded_memory(tmp_path: Path, head: bytes) -> None:
    headers = head.count(b":")
    count = 2 * MAX_DATA // (len(head) + headers * HEADER_OVERHEAD)
    with (
        ServiceProcess(tmp_path, "--request-timeout", "600") as service,
        ExitStack() as stack,
        Client(service.port) as client,
    ):
        before = service.peak_memory()
        halves = []
        for _ in range(count):
            half = socket.create_connection(("127.0.0.1", service.port), timeout=30)
            halves.append(stack.enter_context(half))
            half.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + head)
        with suppress(ConnectionResetError):
            assert halves[0].recv(1000) == b"", "the oldest is closed"
        assert client.get("/healthz") == {"status": "ok"}
        halves[-1].sendall(b"\r\n\r\n")
        assert halves[-1].recv(1000).startswith(b"HTTP/1.1 200 ")
        assert service.peak_memory() - before < 100 * 1024


def test_the_number_of_headers_is_bounded(attacked: ServiceProcess) -> None:
    count = MAX_HEAD // HEADER_OVERHEAD
    for headers, status in ((count // 2, b"200"), (count, b"400")):
        with socket.create_connection(("127.0.0.1", attacked.port), timeout=10) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\n" + b"a:b\r\n" * headers + b"\r\n")
            assert connection.recv(1000).split()[1] == status


@pytest.mark.parametrize("path", ["/healthz", "/jobs/pipelined/allocation?version={version}&wait=60"])
def test_a_request_waits_for_the_answer_to_the_one_before(attacked: ServiceProcess, path: str) -> None:
    with Client(attacked.port) as client:
        path = path.format(**client.put("/jobs/pipelined", JobSpec(8).to_json()))
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\n".encode())
        received = received_until_closed(connection)
    assert b"HTTP/1.1 400 " in received
    assert received.endswith(b"Wait for the answer to a request before sending the next one.")


def received_until_closed(connection: socket.socket) -> bytes:
    """Return what a service sends until it closes a connection."""
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 2",
        "Content-Length: +5",
        "Content-Length: -1",
        f"Content-Length: {'9' * 30}",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding : chunked",
        "A: b\r\n c",
        "A: \0",
    ],
)
def test_a_request_that_two_servers_may_read_differently_is_refused(
    attacked: ServiceProcess, head: str
) -> None:
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=30) as connection:
        connection.sendall(f"POST /jobs/a/gain HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        connection.sendall(b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        received = received_until_closed(connection)
        assert received.startswith(b"HTTP/1.1 400 ")
        assert received.count(b"HTTP/1.1") == 1


def test_the_length_of_a_body_may_have_any_number_of_zeros(attacked: ServiceProcess) -> None:
    with Client(attacked.port) as client:
        length = {"content-length": "0" * 5000 + "2"}
        assert client.call("POST", "/jobs/a/gain", text=b"{}", headers=length).status == 422


CHUNKED = f"POST /jobs/a/gain HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
CHUNKED += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        (b"", b"GET /jobs?limit=1000 HTTP/1.1\r\nHost: x\r\n\r\n" * 1000),
        (CHUNKED + b"0\r\n", b"a: b\r\n" * 5000),
        (CHUNKED + b"0\r\na: ", b"a" * 50_000),
        (CHUNKED + b"1;", b"a" * 50_000),
    ],
    ids=["requests", "trailers", "a trailer", "a chunk header"],
)
def test_what_never_ends_is_refused(attacked: ServiceProcess, begin: bytes, repeated: bytes) -> None:
    before = attacked.peak_memory()
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=60) as connection:
        connection.sendall(begin)
        sent = 0
        with suppress(ConnectionResetError, BrokenPipeError):
            while sent < 200 * 1024 * 1024:
                connection.sendall(repeated)
                sent += len(repeated)
        assert sent < 20 * 1024 * 1024
    assert attacked.peak_memory() - before < 50 * 1024


def test_large_heads_of_waiting_requests_take_bounded_memory(attacked: ServiceProcess) -> None:
    size = MAX_HEAD - 1000
    with ExitStack() as stack, Client(attacked.port) as client:
        path = "/jobs/heads/allocation?version={version}&wait=60"
        path = path.format(**client.put("/jobs/heads/allocation", {"generation": 1, "replicas": 1}))
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        waiting = [
            stack.enter_context(socket.create_connection(("127.0.0.1", attacked.port), timeout=30))
            for _ in range(1 + MAX_DATA // size)
        ]
        waiting[0].sendall(f"{head}\r\n".encode())
        for connection in waiting[1:]:
            connection.sendall(f"{head}A: {'a' * size}\r\n\r\n".encode())
        with suppress(ConnectionResetError):
            assert waiting[1].recv(1000) == b"", "the oldest with a large head is closed"
        client.put("/jobs/heads/allocation", {"generation": 2, "replicas": 1})
        for connection in (waiting[0], waiting[-1]):
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_large_bodies_that_do_not_end_do_not_take_the_place_of_others(attacked: ServiceProcess) -> None:
    size = 1_000_000
    head = f"POST /jobs/bodies/gain HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    before = attacked.peak_memory()
    with ExitStack() as stack, Client(attacked.port) as client:
        for _ in range(2 * MAX_DATA // size):
            connection = socket.create_connection(("127.0.0.1", attacked.port), timeout=30)
            stack.enter_context(connection)
            connection.sendall(head.encode() + b" " * (size - 1))
        reports = [a_report(step, metrics={"m": float(step)}) for step in range(500)]
        assert client.post_gain("bodies", *reports)["stored"] == len(reports)
    assert attacked.peak_memory() - before < 3 * MAX_DATA // 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "method", "path", "pad", "body"),
    [
        (5000, "GET", "/healthz", 30_000, 0),
        (1000, "POST", "/jobs/a/gain", 0, 250_000),
        (1000, "GET", "/jobs/held/allocation?version={version}&wait=60", 0, 250_000),
    ],
    ids=["answered, heads", "refused, bodies", "waiting, bodies"],
)
def test_what_a_request_has_sent_is_not_kept(
    tmp_path: Path, count: int, method: str, path: str, pad: int, body: int
) -> None:
    with ServiceProcess(tmp_path) as service, Client(service.port) as client, ExitStack() as stack:
        path = path.format(**client.put("/jobs/held/allocation", {"generation": 1, "replicas": 1}))
        token = f"Authorization: Bearer {TOKEN}\r\n" if "wait" in path else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\n{token}A: {'a' * pad}\r\nContent-Length: {body}\r\n\r\n"
        )
        before = service.peak_memory()
        for number in range(count):
            place = ("127.0.0.1", service.port)
            source = (f"127.0.4.{1 + number % 4}", 0)
            connection = socket.create_connection(place, timeout=30, source_address=source)
            stack.enter_context(connection)
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(head.encode() + b"x" * body)
        assert client.get("/healthz") == {"status": "ok"}
        assert service.peak_memory() - before < 130 * 1024
        version = client.get("/jobs/held")["version"]
        assert client.get(f"/jobs/held/allocation?version={version}&wait=1")["version"] == version
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_a_request_that_does_not_end_is_closed_after_the_timeout(tmp_path: Path) -> None:
    head = f"POST /jobs/a/gain HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    body = "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with ServiceProcess(tmp_path, "--request-timeout", "1") as service:
        for text in (b"GET /heal", (head + body).encode()):
            with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
                connection.sendall(text)
                started = time.monotonic()
                with suppress(ConnectionResetError):
                    assert connection.recv(1000) == b""
                assert time.monotonic() - started >= 0.5
        with Client(service.port) as client:
            # A connection that waits for its answer is not incomplete.
            version = client.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})["version"]
            assert client.get(f"/jobs/a/allocation?version={version}&wait=3")["version"] == version
            wait_until(lambda: client.get("/healthz"), "the answer")
        assert "Traceback" not in service.log()


def test_a_repeated_log_record_is_dropped_and_counted() -> None:
    clock = Clock()
    limit = LogLimit(clock)

    def logged(message: str = "refused %s") -> logging.LogRecord | None:
        record = logging.LogRecord("a", logging.WARNING, "a.py", 1, message, ("it",), None)
        return record if limit.filter(record) else None

    assert sum(logged() is not None for _ in range(1000)) == MAX_RECORDS
    clock.now += INTERVAL
    record = logged()
    assert record is not None
    assert record.getMessage() == f"refused it ({1000 - MAX_RECORDS} more before were not logged)"


def test_without_a_token_logs_and_addresses_are_empty(tmp_path: Path) -> None:
    environ = {"ADASCALE_TOKEN": TOKEN, "ADASCALE_READ_TOKEN": "for-people"}
    with ServiceProcess(tmp_path, environ=environ) as service, Client(service.port) as client:
        cursor = client.get("/jobs")["cursor"]
        client.put("/jobs/a", JobSpec(8, max_replicas=2).to_json())
        client.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})
        client.register("a", a_registration(address="10.9.8.7"))
        client.post_gain("a", a_report())
        failed = a_registration(0, ReplicaState.FAILED, address="10.9.8.7", exit_code=1, log="my secret")
        client.register("a", failed)
        paths = ("/jobs", "/jobs/a", f"/changes?since={cursor}", "/jobs/a/allocation")
        with Client(service.port, "for-people") as reader:
            for path in paths:
                assert client.get(path).keys() == reader.get(path).keys()
            for path in paths[:3]:
                text = json.dumps(reader.get(path))
                assert "my secret" in text
                assert "10.9.8.7" in text
            assert reader.call("POST", "/jobs/a/gain", a_report().to_json()).status == 401
        with Client(service.port, None) as nobody:
            for path in paths:
                text = json.dumps(nobody.get(path))
                assert "my secret" not in text
                assert "10.9.8.7" not in text
                assert nobody.get(path).keys() == client.get(path).keys()
            (listed,) = nobody.get("/jobs")["jobs"]
            for job in (listed, nobody.get("/jobs/a")):
                (replica,) = JobView.from_json(job).replicas
                assert replica.exit_code == 1
                assert replica.log == "", "there is one, which needs a token"
            assert nobody.get("/jobs/a/gain")["gain"] == 2.0
        with Client(service.port, "wrong") as wrong:
            for path in paths:
                assert wrong.call("GET", path).status == 401


@pytest.mark.parametrize(
    ("path", "waits"),
    [
        ("/jobs/a/allocation?version={version}", MAX_ANONYMOUS_WAITS),
        ("/jobs/a/allocation?unknown=1&version={version}", MAX_ANONYMOUS_WAITS),
        ("/changes?since={cursor}", MAX_ANONYMOUS_FOLLOWERS),
    ],
)
def test_clients_without_a_token_can_not_wait_on_all_connections_and_a_wait_ends_when_its_client_leaves(
    tmp_path: Path, path: str, waits: int
) -> None:
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        view = client.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})
        path = path.format(cursor=client.get("/jobs")["cursor"], **view)
        with ExitStack() as stack, Client(service.port, token=None) as other:
            connections = []
            for _ in range(waits):
                connection = socket.create_connection(("127.0.0.1", service.port), timeout=30)
                connections.append(stack.enter_context(connection))
                connection.sendall(f"GET {path}&wait=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode())

            def status(with_token: Client | None = None) -> int:
                return (with_token or other).call("GET", f"{path}&wait=0.01").status

            wait_until(lambda: status() == 503, "all waits")
            assert status(client) == 200
            for connection in connections[: waits // 2]:
                connection.close()
            wait_until(lambda: status() == 200, "the end of these waits")
            client.put("/jobs/a/allocation", {"generation": 2, "replicas": 1})
            for connection in connections[waits // 2 :]:
                assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/jobs/a/gain", "/jobs/a/decision"])
def test_of_several_tokens_the_first_counts(attacked: ServiceProcess, path: str) -> None:
    tokens = ("wrong", TOKEN)
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=10) as connection:
        head = "".join(f"Authorization: Bearer {token}\r\n" for token in tokens)
        method = "POST" if path.endswith("gain") else "PUT"
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")


def test_a_generation_that_the_job_can_not_have_reached_is_refused(attacked: ServiceProcess) -> None:
    with Client(attacked.port) as client:
        client.put("/jobs/generations/allocation", {"generation": 7, "replicas": 2})
        for job, unreachable in (("generations", 2**31 - 1), ("generations", 200_000), ("new", 200_000)):
            body = a_registration(0, ReplicaState.RUNNING, generation=unreachable).to_json()
            answer = client.call("PUT", f"/jobs/{job}/replicas/0", body)
            assert answer.status == 422
            assert f"generation: got {unreachable}, expected at most 1000" in answer.body["error"]
            report = a_report(generation=unreachable).to_json()
            assert client.call("POST", f"/jobs/{job}/gain", report).status == 422
        assert client.call("GET", "/jobs/new").status == 404, "a refused request creates no job"
        client.register("generations", a_registration(0, ReplicaState.RUNNING, generation=57))
        client.put("/jobs/generations/allocation", {"generation": 58, "replicas": 2})


YEAR = 365 * 86400.0


@pytest.mark.parametrize(
    ("desired", "age", "now", "highest"),
    [
        (None, 0.0, 1.77e9, 100_000),
        (7, 0.0, 1.77e9, 100_007),
        (7, 3600.5, 1.77e9, 103_607),
        (7, -3600.0, 1.77e9, 100_007),
        (2**31 - 100, YEAR, 1.77e9, 192_163_200),
        (7, YEAR, EPOCH + 50, 50),
        (7, YEAR, 0.0, 1),
    ],
    ids=["new", "allocated", "old", "clock set back", "high", "wrong clock", "clock at 1970"],
)
@pytest.mark.parametrize("field", ["generation", "assigned", "stepped"])
def test_the_highest_generation_follows_the_desired_one_and_the_age_of_the_job(
    field: str, desired: int | None, age: float, now: float, highest: int
) -> None:
    state = Rendezvous(desired=None if desired is None else Allocation(desired, 1))
    job = StoredJob(1, "default.a", now - age, 1, None, state)
    reachable: dict[str, Any] = {field: highest}
    require_reachable(a_registration(**reachable), job, now)
    with pytest.raises(InvalidInputError, match=f"{field}: got {highest + 1}, expected at most {highest},"):
        require_reachable(a_registration(**{field: reachable[field] + 1}), job, now)


def test_workers_create_a_bounded_number_of_jobs_in_their_namespace(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, Client(service.port) as client:
        client.put("/jobs/crowd.declared", JobSpec(8).to_json())
        for number in range(MAX_UNDECLARED):
            client.register(f"crowd.job-{number}", a_registration())
        refused = [
            client.call("PUT", "/jobs/crowd.more/replicas/0", a_registration().to_json()),
            client.call("POST", "/jobs/crowd.more/gain", a_report().to_json()),
        ]
        for answer in refused:
            assert answer.status == 503
            assert answer.body["error"].startswith("namespace crowd has 200 jobs that were not declared")
        assert client.call("GET", "/jobs/crowd.more").status == 404
        client.register("crowd.job-0", a_registration(1))
        client.post_gain("crowd.declared", a_report())
        client.post_gain("crow.other", a_report())
        client.put("/jobs/crowd.more", JobSpec(8).to_json())
        client.post_gain("crowd.more", a_report())
        client.call("DELETE", "/jobs/crowd.job-0")
        client.post_gain("crowd.again", a_report())


def test_long_reads_do_not_delay_registrations(attacked: ServiceProcess) -> None:
    with Client(attacked.port) as client:
        for start in range(0, 8000, 1000):
            client.post_gain(
                "plans", *[a_report(step, local_bsz=1 + step) for step in range(start, start + 1000)]
            )
        client.put("/jobs/plans", JobSpec(8, max_replicas=1024).to_json())
        stop = threading.Event()

        def read() -> set[int]:
            statuses = set()
            with Client(attacked.port, None) as reader:
                while not stop.is_set():
                    for path in (
                        "/jobs?limit=1000",
                        "/jobs/plans/gain",
                        "/jobs/plans/gain/history?points=5000",
                    ):
                        statuses.add(reader.call("GET", path).status)
            return statuses

        with ThreadPoolExecutor(8) as threads:
            reading = [threads.submit(read) for _ in range(8)]
            try:
                slowest = 0.0
                for generation in range(1, 15):
                    started = time.monotonic()
                    client.put("/jobs/other/allocation", {"generation": generation, "replicas": 1})
                    slowest = max(slowest, time.monotonic() - started)
            finally:
                stop.set()
            assert slowest < 5, "the client's timeout"
            assert set().union(*(reader.result() for reader in reading)) <= {200, 503}
