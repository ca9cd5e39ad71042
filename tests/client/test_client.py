"""The client against servers that answer wrongly or not at all, and against the real metrics service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from adascale_client import MetricsServiceClient, ServiceError, ServiceRefusedError, ServiceUnreachableError
from adascale_client import client as client_module
from adascale_client import transport as transport_module
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.names import HEARTBEAT_TIMEOUT
from api.client import TOKEN
from support.launch import free_port
from support.service import Service

JOB = "default.digits"
REPORT = GainReport(
    generation=1, step=1200, progress=4512.5, epoch=3, replicas=2, local_bsz=16, accumulation=1, scale=8.0,
    gain=6.25, grad_sqr=0.01, grad_var=0.25, step_time=0.004, time=1760000000.0, loss=0.2134,
)  # fmt: skip
REGISTRATION = Registration(0, "6f1c", ReplicaState.WAITING, 0, "127.0.0.1", 40123)
CALLS: dict[str, Callable[[MetricsServiceClient], Any]] = {
    "get_job": lambda client: client.get_job(JOB),
    "list_jobs": lambda client: client.list_jobs(),
    "read_changes": lambda client: client.read_changes("cursor"),
    "allocate": lambda client: client.allocate(JOB, Allocation(1, 1)),
    "get_allocation": lambda client: client.get_allocation(JOB),
    "register": lambda client: client.register(JOB, REGISTRATION),
    "post_gain": lambda client: client.post_gain(JOB, []),
    "get_gain": lambda client: client.get_gain(JOB),
    "get_history": lambda client: client.get_history(JOB, 10),
}
"""Every call that parses an answer."""


class FixedAnswer(BaseHTTPRequestHandler):
    """Answers every request with `status` and `body`, and records the token of each."""

    status = 200
    body = b""
    missing = 0
    """Bytes that are announced and not sent."""
    tokens: list[str | None]

    def do_GET(self) -> None:
        self.tokens.append(self.headers["authorization"])
        self.send_response(self.status)
        self.send_header("content-length", str(len(self.body) + self.missing))
        self.end_headers()
        self.wfile.write(self.body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    do_PUT = do_POST  # noqa: N815 (the base class finds it by this name)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Log nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that answers as `FixedAnswer`."""
    monkeypatch.setattr(FixedAnswer, "tokens", [], raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), FixedAnswer)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A metrics service with a job that has a report."""
    started = Service(tmp_path_factory.mktemp("service"), job=JOB)
    client = MetricsServiceClient(started.url, TOKEN)
    client.declare_job(JOB, JobSpec(4, 256, (4, 64), 1, 4, 12_000))
    client.allocate(JOB, Allocation(1, 2))
    client.post_gain(JOB, [REPORT])
    client.close()
    yield started
    started.stop()


@pytest.fixture
def fixed_client(server: str) -> Iterator[MetricsServiceClient]:
    """A client of that server."""
    client = MetricsServiceClient(server)
    yield client
    client.close()


@pytest.fixture
def client(service: Service) -> Iterator[MetricsServiceClient]:
    """A client of the metrics service."""
    client = MetricsServiceClient(service.url, TOKEN)
    yield client
    client.close()


# -- no answer, or another program's --------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "body",
    [
        *(b"<html>hello", b"{}", b"[]", b"3", b'{"allocation": 3}', b'{"version": 1, "desired": 5}', b"\xff"),
        *(b"", b"[" * 100_000),
    ],
    ids=range(9),
)
def test_an_answer_of_another_program_is_an_error(
    server: str, fixed_client: MetricsServiceClient, call: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedAnswer, "body", body)
    with pytest.raises(ServiceUnreachableError, match=f"^{server} is not the address of a metrics service"):
        CALLS[call](fixed_client)


def test_an_answer_that_is_cut_off_is_an_error(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedAnswer, "missing", 146)
    with pytest.raises(ServiceUnreachableError) as raised:
        MetricsServiceClient(server).get_job(JOB)
    assert str(raised.value) == (
        f"the metrics service at {server} does not answer: "
        "the connection was closed before the answer was complete"
    )


def test_an_answer_that_does_not_end_is_an_error(
    server: str, fixed_client: MetricsServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "MAX_ANSWER", 4096)
    monkeypatch.setattr(FixedAnswer, "body", b"1" * 4097)
    monkeypatch.setattr(FixedAnswer, "missing", 10**13)
    for status in (200, 500):
        monkeypatch.setattr(FixedAnswer, "status", status)
        with pytest.raises(ServiceUnreachableError) as raised:
            fixed_client.get_job(JOB)
        assert str(raised.value) == (
            f"{server} is not the address of a metrics service: its answer has more than 4096 bytes"
        )


def test_connections_are_used_again(
    fixed_client: MetricsServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedAnswer, "protocol_version", "HTTP/1.1")
    setup, made = FixedAnswer.setup, []

    def count(self: FixedAnswer) -> None:
        made.append(self)
        setup(self)

    monkeypatch.setattr(FixedAnswer, "setup", count)
    monkeypatch.setattr(FixedAnswer, "body", b"{}")
    for _ in range(3):
        with pytest.raises(ServiceError):
            fixed_client.get_job(JOB)
    assert len(made) == 1


def test_a_refused_connection_is_an_error() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServiceUnreachableError) as raised:
        MetricsServiceClient(url).get_allocation(JOB)
    assert str(raised.value) == f"the metrics service at {url} does not answer: connection refused"
    assert raised.value.exit_code == 69


def test_an_answer_that_takes_too_long_is_an_error(
    monkeypatch: pytest.MonkeyPatch, client: MetricsServiceClient
) -> None:
    monkeypatch.setattr(transport_module, "TIMEOUT", 0.2)
    version = client.get_allocation(JOB).version
    assert client.get_allocation(JOB, version, wait=0.5).version == version, (
        "the wait is added to the timeout"
    )
    monkeypatch.setattr(transport_module, "TIMEOUT", -0.4)
    with pytest.raises(ServiceUnreachableError, match="timed out"):
        client.get_allocation(JOB, version, wait=0.5)


@pytest.mark.parametrize(
    "url", ["nonsense://x", "http://", "http://[::1", "", "http://127.0.0.1:99999", "http://a b"]
)
def test_an_address_that_is_not_one_is_an_error(url: str) -> None:
    with pytest.raises(ServiceUnreachableError, match="must be http://HOST:PORT or https://HOST:PORT, got '"):
        MetricsServiceClient(url).get_gain(JOB)


# -- error statuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": "the database is busy"}', "the database is busy"),
        (b"upstream connect error", "upstream connect error"),
        (b"[]", r"\[\]"),
        (b"", "no reason is given"),
    ],
)
def test_an_error_status_has_the_services_reason(
    fixed_client: MetricsServiceClient, body: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedAnswer, "status", 503)
    monkeypatch.setattr(FixedAnswer, "body", body)
    with pytest.raises(ServiceRefusedError, match=f"^the metrics service answers 503: {reason}$") as raised:
        fixed_client.get_job(JOB)
    assert raised.value.status == 503
    assert isinstance(raised.value, ServiceError)


def test_a_redirect_is_not_followed_with_the_token(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedAnswer, "status", 307)
    client = MetricsServiceClient(server, TOKEN)
    with pytest.raises(ServiceRefusedError, match="answers 307"):
        client.get_job(JOB)
    client.close()


def test_a_refused_replica_learns_when_other_members_are_removed(client: MetricsServiceClient) -> None:
    client.allocate("default.versions", Allocation(1, 1))
    client.register("default.versions", REGISTRATION)
    running = replace(REGISTRATION, state=ReplicaState.RUNNING, generation=1, rank=0, replicas=1, version="1")
    client.register("default.versions", running)
    with pytest.raises(ServiceRefusedError, match="replica 1 has adascale 2, but replica 0") as raised:
        client.register("default.versions", replace(REGISTRATION, replica=1, version="2"))
    client.delete_job("default.versions")
    assert raised.value.retry_after == HEARTBEAT_TIMEOUT


# -- tokens ---------------------------------------------------------------------------------------------


def test_the_token_file_is_read_for_each_request(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedAnswer, "body", b'{"jobs": [], "next": null, "cursor": ""}')
    file = tmp_path / "token"
    client = MetricsServiceClient(server, "unused", token_file=file)
    for token in ("first", "renewed"):
        file.write_text(f"{token}\n")
        client.list_jobs()
    client.close()
    assert FixedAnswer.tokens == ["Bearer first", "Bearer renewed"]


def test_no_token_sends_no_header(
    fixed_client: MetricsServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedAnswer, "body", b'{"jobs": [], "next": null, "cursor": ""}')
    fixed_client.list_jobs()
    assert FixedAnswer.tokens == [None]


def test_a_missing_token_file_counts_as_no_answer(tmp_path: Path) -> None:
    client = MetricsServiceClient("http://127.0.0.1:1", token_file=tmp_path / "missing")
    with pytest.raises(ServiceUnreachableError, match=r"token file .*missing .*can't be read: No such file"):
        client.get_allocation(JOB)


@pytest.mark.parametrize("token", [b"\xff", b"two\nlines"])
def test_a_token_file_without_a_token_counts_as_no_answer(tmp_path: Path, token: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(token)
    with pytest.raises(ServiceUnreachableError):
        MetricsServiceClient("http://127.0.0.1:1", token_file=file).get_allocation(JOB)


# -- answers of the real service ------------------------------------------------------------------------


def test_a_job_is_read_with_all_that_the_service_stores(client: MetricsServiceClient) -> None:
    job = client.get_job(JOB)
    assert job.spec == JobSpec(4, 256, (4, 64), 1, 4, 12_000)
    assert job.desired == Allocation(1, 2)
    assert (job.generation, job.active, job.complete, job.failures) == (1, None, False, 0)
    assert job.latest == REPORT
    assert [(each.plan, each.step_time) for each in job.step_times] == [(REPORT.plan, REPORT.step_time)]
    history = client.get_history(JOB, 10)
    assert (history.total, list(history.points)) == (1, [REPORT])
    gain = client.get_gain(JOB)
    assert (gain.job, gain.report, gain.efficiency) == (JOB, REPORT, 0.78125)
    assert gain.predictions is not None
    assert [each.replicas for each in gain.predictions] == [1, 2, 3, 4]


def test_all_pages_of_the_job_list_are_read(
    client: MetricsServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAGE_SIZE", 2)
    names = [f"pages.job-{n}" for n in range(5)]
    for name in names:
        client.declare_job(name, JobSpec(4))
    assert [job.id for job in client.list_jobs()] == [JOB, *names]
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert [job.id for job in client.read_jobs(share=0.5).jobs] == [JOB, *names]
    assert [pause > 0 for pause in pauses] == [True, True], "after each page but the last"
    for name in names:
        client.delete_job(name)
    assert [job.id for job in client.list_jobs()] == [JOB]


def test_a_worker_reads_its_generations_from_every_answer(client: MetricsServiceClient) -> None:
    job = "default.worker"
    registered = client.register(job, REGISTRATION)
    assert client.post_gain(job, [REPORT]).allocation.version == registered.version
    assert client.get_allocation(job).version == registered.version
    (replica,) = client.get_job(job).replicas
    assert replica.registration == REGISTRATION
    assert replica.seconds_since_heartbeat is not None
    client.delete_job(job)


def test_threads_share_a_client(client: MetricsServiceClient) -> None:
    with ThreadPoolExecutor(16) as threads:
        jobs = list(threads.map(lambda _: client.get_job(JOB), range(64)))
    assert {job.id for job in jobs} == {JOB}
