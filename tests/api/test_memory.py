"""Large jobs, and clients that do not read what they requested, take bounded memory."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from adascale_api.data.database import Database
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs
from adascale_api.http.connection_limits import MAX_DATA
from adascale_api.http.connections import MAX_HEAD
from adascale_api.service.summaries import MAX_JOBS
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.rendezvous.rendezvous import Rendezvous
from api.client import MEMORY_LIMIT, TOKEN, Client, ServiceProcess, a_registration, a_report, wait_until
from support.certificates import TlsFiles, tls_files

COUNT = 100


async def store_large_jobs(path: Path, count: int) -> None:
    """Store jobs with 16 logs of 64 KiB each, and as many of 1,024 replicas each."""
    database = Database(f"sqlite:///{path}")
    for number in range(count):
        failed = [a_registration(rank, ReplicaState.FAILED, log="x" * 65_536) for rank in range(16)]
        await asyncio.gather(
            *(
                database.write(
                    partial(jobs.register, job_id=f"default.{number:03}", registration=each, now=0.0)
                )
                for each in failed
            )
        )
    state = Rendezvous(replicas={rank: a_registration(rank) for rank in range(1024)}, complete=True)

    def store_state(transaction: Transaction, job_id: str) -> None:
        job = jobs.lock_or_create(transaction, job_id, 0.0)
        jobs.apply(transaction, job, lambda _state, *, declared: state)

    for number in range(count):
        await database.write(partial(store_state, job_id=f"default.large-{number:03}"))
    await database.close()


@pytest.fixture(scope="module")
def large_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with as many as `COUNT` of both kinds."""
    path = tmp_path_factory.mktemp("large") / "service.db"
    asyncio.run(store_large_jobs(path, COUNT))
    return path


@pytest.mark.slow
def test_pages_of_large_jobs_take_bounded_memory(tmp_path: Path, large_jobs: Path) -> None:
    shutil.copy(large_jobs, tmp_path)
    names = {f"default.{number:03}" for number in range(COUNT)}
    names |= {f"default.large-{number:03}" for number in range(COUNT)}
    with ServiceProcess(tmp_path, own_interpreter=True) as service, Client(service.port) as client:
        cursor = client.get("/jobs?limit=1")["cursor"]
        for token in (None, TOKEN):
            listed: set[str] = set()
            logs = 0
            after: str | None = ""
            with Client(service.port, token) as reader:
                while after is not None:
                    page = reader.get(f"/jobs?limit=1000&after={after}")
                    listed |= {job["id"] for job in page["jobs"]}
                    logs += sum(bool(replica["log"]) for job in page["jobs"] for replica in job["replicas"])
                    after = page["next"]
            assert listed == names
            assert logs == (16 * COUNT if token else 0)
        for name in names:
            client.put(f"/jobs/{name}/allocation", {"generation": 1, "replicas": 1})
        changed: set[str] = set()
        while changed != names:
            answer = client.get(f"/changes?since={cursor}&limit=1000")
            changed |= {job["id"] for job in answer["jobs"]}
            assert answer["cursor"] != cursor
            cursor = answer["cursor"]
        assert service.peak_memory() < MEMORY_LIMIT / 2
        assert "Traceback" not in service.log()


def unread_answer(port: int, path: str, tls: TlsFiles | None = None) -> socket.socket:
    """Return a connection whose answer has begun, and which has room for little of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    if tls is not None:
        context = ssl.create_default_context(cafile=str(tls.ca))
        connection = context.wrap_socket(connection, server_hostname="localhost")
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert connection.recv(1) == b"H"
    return connection


@pytest.mark.slow
def test_answers_that_nobody_reads_take_bounded_memory_and_are_closed(
    tmp_path: Path, large_jobs: Path
) -> None:
    clients, tls = 80, tls_files(tmp_path / "tls")
    shutil.copy(large_jobs, tmp_path)
    with ServiceProcess(tmp_path, *tls.options, own_interpreter=True) as service, ExitStack() as stack:
        for _ in range(clients):
            path = "/jobs?limit=1000&after=default.large"
            stack.enter_context(unread_answer(service.port, path, tls=tls))
        with Client(service.port) as client:
            assert client.get("/healthz") == {"status": "ok"}
            closed = re.compile(r"^adascale_connections_closed_total (\S+)$", re.MULTILINE)

            def most_are_closed() -> bool:
                found = closed.search(client.call("GET", "/metrics").body)
                return found is not None and float(found[1]) >= clients / 2

            wait_until(most_are_closed, "the end of unread answers")
        assert service.peak_memory() < MEMORY_LIMIT / 2


async def store_jobs(path: Path, count: int) -> None:
    """Store jobs without replicas."""
    database = Database(f"sqlite:///{path}")

    def declare(first: int, transaction: Transaction) -> None:
        for number in range(first, min(first + 500, count)):
            jobs.declare(transaction, f"default.job-{number}", JobSpec(8, max_replicas=2), 0.0)

    for first in range(0, count, 500):
        await database.write(partial(declare, first))
    await database.close()


@pytest.mark.slow
def test_all_kinds_of_costly_requests_at_once_take_bounded_memory(tmp_path: Path, large_jobs: Path) -> None:
    shutil.copy(large_jobs, tmp_path)
    asyncio.run(store_jobs(tmp_path / "service.db", 3000))
    with (
        ServiceProcess(tmp_path, own_interpreter=True) as service,
        Client(service.port) as client,
        ExitStack() as stack,
    ):

        def send(number: int, text: bytes) -> socket.socket:
            """Send on a new connection, from one of 8 addresses."""
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(120)
            connection.bind((f"127.0.5.{1 + number % 8}", 0))
            connection.connect(("127.0.0.1", service.port))
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(text)
            return connection

        def get(path: str) -> bytes:
            return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()

        version = client.put("/jobs/held/allocation", {"generation": 1, "replicas": 1})["version"]
        for number in range(12_000):
            send(number, get(f"/jobs/held/allocation?version={version}&wait=60") + b"\r\n")
        for number in range(3000):
            send(number, get("/jobs/held") + b"A: " + b"a" * (MAX_HEAD - 1000))
        body = b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n" + b" " * 999_999
        for number in range(60):
            send(number, get("/jobs/held/gain").replace(b"GET", b"POST") + body)
        for number in range(120):
            send(number, b"GET /summaries HTTP/1.1\r\nHost: x\r\n\r\n")
        for number in range(120):
            unread = send(number, get("/jobs?limit=1000&after=default.large") + b"\r\n")
            with suppress(ConnectionResetError):
                unread.recv(1, socket.MSG_PEEK)
        assert client.post_gain("held", a_report())["stored"] == 1
        assert client.get("/jobs/held")["version"] == version
        # The connections of a pod take memory of the kernel besides, about 60 MiB.
        assert service.peak_memory() < 400 * 1024
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_the_summaries_take_bounded_memory_however_many_clients_ask(tmp_path: Path) -> None:
    asyncio.run(store_jobs(tmp_path / "service.db", MAX_JOBS))
    with ServiceProcess(tmp_path) as service, Client(service.port) as client, ExitStack() as stack:
        found = client.get("/summaries")
        assert (len(found["jobs"]), found["truncated"]) == (MAX_JOBS, True)
        before = service.peak_memory()
        for _ in range(200):
            stack.enter_context(unread_answer(service.port, "/summaries"))
        assert client.get("/healthz") == {"status": "ok"}
        assert service.peak_memory() - before < MAX_DATA // 1024 + 30 * 1024
        assert "Traceback" not in service.log()
