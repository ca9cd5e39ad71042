"""The metrics service with TLS, as a process, and the client of agents, operator and users."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import urllib3
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from adascale_api.cli import run
from adascale_api.http.connection_limits import Connection, ConnectionLimits
from adascale_api.http.connections import limited_protocol
from adascale_api.http.tls import server_certificate
from adascale_client import MetricsServiceClient, ServiceRefusedError, ServiceUnreachableError
from adascale_controller.operator.runtime.certificate_keeper import KeyPair, make_authority
from adascale_core.errors import AdaScaleError
from adascale_core.messages.reports import GainReport
from adascale_core.names import ENV_CA_FILE
from api.client import TOKEN, Client, ServiceProcess, a_registration, a_report, wait_until
from support.certificates import TlsFiles, tls_files

JOB = "default.digits"
NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return make_authority(NOW - timedelta(days=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, authority: KeyPair) -> Path:
    return tls_files(tmp_path_factory.mktemp("tls"), authority).folder


@pytest.fixture
def files(folder: Path, authority: KeyPair) -> TlsFiles:
    """The files of `running`, with a new certificate."""
    return tls_files(folder, authority)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(folder, *TlsFiles(folder).options) as running:
        yield running


@pytest.fixture
def service(running: ServiceProcess, files: TlsFiles) -> Iterator[ServiceProcess]:
    """A service with `files`, and without the jobs of other tests."""
    yield running
    assert running.code is None
    assert "Traceback" not in running.log(), running.log()
    cleaning = client(running, tls_files(files.folder).ca)
    for job in cleaning.list_jobs():
        cleaning.delete_job(job.id)


def client(service: ServiceProcess, ca: Path | None, host: str = "127.0.0.1") -> MetricsServiceClient:
    return MetricsServiceClient(f"https://{host}:{service.port}", TOKEN, ca_file=ca)


def reports(count: int, begin: int = 1) -> list[GainReport]:
    return [a_report(step, progress=2.0 * step) for step in range(begin, begin + count)]


def test_requests_with_and_without_tls_are_answered_at_the_same_port(
    service: ServiceProcess, files: TlsFiles
) -> None:
    assert f"listening on https://127.0.0.1:{service.port}" in service.log()
    trusting = client(service, files.ca)
    trusting.register(JOB, a_registration())
    assert trusting.post_gain(JOB, reports(3)).stored == 3
    with Client(service.port) as plain:
        plain.post_gain(JOB, *reports(2, begin=4))
        assert plain.get(f"/jobs/{JOB}/gain")["step"] == 5
    assert trusting.get_gain(JOB).report.step == 5


def test_a_change_reaches_a_client_that_waits_with_tls(service: ServiceProcess, files: TlsFiles) -> None:
    trusting = client(service, files.ca)
    known = trusting.register(JOB, a_registration()).version
    answers: list[int] = []
    waiting = threading.Thread(
        target=lambda: answers.append(trusting.get_allocation(JOB, known, wait=20.0).version)
    )
    waiting.start()
    with Client(service.port) as plain:
        plain.put(f"/jobs/{JOB}/allocation", {"generation": 1, "replicas": 1})
    waiting.join(20)
    assert answers
    assert answers[0] > known


def test_a_large_body_and_a_large_answer_are_whole_with_tls(service: ServiceProcess, files: TlsFiles) -> None:
    trusting = client(service, files.ca)
    trusting.register(JOB, a_registration())
    for begin in range(1, 6001, 1000):
        trusting.post_gain(JOB, reports(1000, begin))
    history = trusting.get_history(JOB, 1000)
    assert history.points[-1].step == 6000


def test_a_certificate_of_another_authority_is_refused(
    service: ServiceProcess, tmp_path: Path, authority: KeyPair
) -> None:
    other = tls_files(tmp_path / "other")
    for ca in (other.ca, None):
        with pytest.raises(
            ServiceUnreachableError,
            match=rf"not trusted \(unable to get local issuer certificate\). Set {ENV_CA_FILE}",
        ):
            client(service, ca).list_jobs()


def test_a_certificate_for_another_host_is_refused(
    service: ServiceProcess, files: TlsFiles, authority: KeyPair
) -> None:
    files.issue(authority, "adascale-api.adascale-system.svc")
    with pytest.raises(ServiceUnreachableError, match="IP address mismatch"):
        client(service, files.ca).list_jobs()


def test_an_expired_certificate_is_refused_until_it_is_renewed(
    service: ServiceProcess, files: TlsFiles, authority: KeyPair
) -> None:
    expired = make_authority(NOW - timedelta(days=400))
    files.trust(make_authority(NOW, expired))
    files.issue(expired, now=NOW - timedelta(days=100))
    with pytest.raises(ServiceUnreachableError, match="certificate has expired"):
        client(service, files.ca).list_jobs()
    files.issue(expired)
    assert client(service, files.ca).list_jobs() == []


def test_renewals_lose_no_report(service: ServiceProcess, files: TlsFiles, authority: KeyPair) -> None:
    """Certificate, then authority, then an authority with another key, while reports are posted."""
    posting = client(service, files.ca)
    posting.register(JOB, a_registration())
    sent, stop = [0], threading.Event()
    failures: list[ServiceUnreachableError] = []

    def post() -> None:
        while not stop.is_set():
            # Without an open connection, each report takes a handshake.
            posting.close()
            try:
                posting.post_gain(JOB, reports(1, sent[0] + 1))
            except ServiceUnreachableError as error:
                failures.append(error)
                continue
            sent[0] += 1

    def posted_more() -> None:
        before = sent[0]
        wait_until(lambda: sent[0] >= before + 3, "three more reports")

    thread = threading.Thread(target=post)
    thread.start()
    try:
        posted_more()
        files.issue(authority)
        posted_more()
        renewed = make_authority(NOW, authority)
        files.issue(renewed)  # the service has it first, and agents the earlier authority
        posted_more()
        files.trust(renewed)
        files.issue(authority)  # and the other way round
        posted_more()
        assert failures == []
        replaced = make_authority(NOW)
        files.issue(replaced)
        wait_until(lambda: failures, "an authority that is not known yet")
        files.trust(replaced)
        posted_more()
    finally:
        stop.set()
        thread.join()
    assert client(service, files.ca).get_gain(JOB).report.step == sent[0]
    history = client(service, files.ca).get_history(JOB, 5000)
    assert [point.step for point in history.points] == list(range(1, sent[0] + 1))


def test_files_that_become_unusable_leave_the_last_certificate_in_use(
    service: ServiceProcess, files: TlsFiles, authority: KeyPair
) -> None:
    assert client(service, files.ca).list_jobs() == []
    (files.folder / "tls.crt").write_text("nonsense")
    assert client(service, files.ca).list_jobs() == []
    assert client(service, files.ca).list_jobs() == []
    assert service.log().count("it has no certificate or key in PEM; what was read before stays in use") == 1
    (files.folder / "tls.crt").unlink()
    assert client(service, files.ca).list_jobs() == []
    assert client(service, files.ca).list_jobs() == []
    assert service.log().count("No such file") == 1
    files.issue(authority)
    assert client(service, files.ca).list_jobs() == []


def test_an_authority_that_cannot_be_read_is_an_error(service: ServiceProcess, tmp_path: Path) -> None:
    missing = tmp_path / "missing.crt"
    with pytest.raises(ServiceUnreachableError, match=f"{missing} .* can't be read: No such file"):
        client(service, missing).list_jobs()
    missing.write_text("nonsense")
    with pytest.raises(ServiceUnreachableError, match="it has no certificate in PEM"):
        client(service, missing).list_jobs()


def test_tls_to_a_service_without_tls_names_the_scheme(tmp_path: Path, files: TlsFiles) -> None:
    with (
        ServiceProcess(tmp_path) as plain,
        pytest.raises(ServiceUnreachableError, match="it answers without TLS: use http://"),
    ):
        client(plain, files.ca).list_jobs()


def test_a_service_that_requires_tls_refuses_other_requests_with_an_error(
    tmp_path: Path, files: TlsFiles
) -> None:
    with ServiceProcess(tmp_path, *files.options, "--require-tls") as service:
        plain = MetricsServiceClient(f"http://127.0.0.1:{service.port}", TOKEN)
        with pytest.raises(ServiceRefusedError, match="426: this service requires TLS: use https://"):
            plain.post_gain(JOB, reports(1))
        with Client(service.port) as other:
            answer = other.call("GET", "/healthz")
            assert answer.body["error"].startswith("this service requires TLS")
            assert answer.headers["content-type"] == "application/json"
        assert client(service, files.ca).list_jobs() == []


def test_only_tls_of_at_least_version_1_2_is_spoken(service: ServiceProcess, files: TlsFiles) -> None:
    def version(maximum: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=str(files.ca))
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
            context.maximum_version = maximum
        with (
            socket.create_connection(("127.0.0.1", service.port), 10) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as wrapped,
        ):
            return wrapped.version()

    assert version(ssl.TLSVersion.MAXIMUM_SUPPORTED) == "TLSv1.3"
    assert version(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    with pytest.raises(ssl.SSLError):
        version(ssl.TLSVersion.TLSv1_1)


class NotingLimits(ConnectionLimits):
    """Limits that note the bytes of the answers that clients begin to leave unread, and 0 once they read."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[int] = []

    def unread(self, connection: Connection, size: int) -> None:
        super().unread(connection, size)
        self.noted.append(self.answers.total)

    def read(self, connection: Connection) -> None:
        super().read(connection)
        self.noted.append(self.answers.total)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_answer_that_is_not_read_is_counted_until_it_is_read(files: TlsFiles, scheme: str) -> None:
    # Several times as much as the buffers of the kernel take.
    answer = b"a" * (32 * 1024 * 1024)
    limits = NotingLimits()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        length = str(len(answer)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": answer})

    async def noted(count: int) -> None:
        while len(limits.noted) < count:
            await asyncio.sleep(0.01)

    async def ask() -> None:
        certificate = server_certificate(files.folder / "tls.crt", files.folder / "tls.key")
        protocol = limited_protocol(limits, certificate)
        config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        make: Any = config.http_protocol_class
        with socket.create_server(("127.0.0.1", 0)) as listener:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: make(config, state, {}), sock=listener)
            context = ssl.create_default_context(cafile=str(files.ca)) if scheme == "https" else None
            reader, writer = await asyncio.open_connection(*listener.getsockname(), ssl=context)
            try:
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.wait_for(noted(1), 30)
                assert limits.noted[0] > len(answer) / 2
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(len(answer)) == answer
                await asyncio.wait_for(noted(2), 30)
                assert limits.noted[1] == 0
            finally:
                writer.transport.abort()
                server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not there")
@pytest.mark.parametrize(
    ("groups", "connects"), [("P-256", True), ("X25519:P-256", True), ("ffdhe8192", False)]
)
def test_a_client_cannot_choose_a_costly_group(service: ServiceProcess, groups: str, connects: bool) -> None:
    connecting = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{service.port}", "-groups", groups],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ("BEGIN CERTIFICATE" in connecting.stdout) == connects, connecting.stderr


def test_a_connection_without_a_handshake_is_closed_after_the_time_of_a_request(
    tmp_path: Path, files: TlsFiles
) -> None:
    with ServiceProcess(tmp_path, *files.options, "--request-timeout", "1") as service:
        for first in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n"):
            with socket.create_connection(("127.0.0.1", service.port), 20) as silent:
                silent.sendall(first)
                while silent.recv(4096):
                    pass
        assert client(service, files.ca).list_jobs() == []


def test_connections_without_a_handshake_take_no_place_of_others(tmp_path: Path, files: TlsFiles) -> None:
    with (
        ServiceProcess(tmp_path, *files.options, "--max-connections", "8") as service,
        ExitStack() as opened,
    ):
        serving = client(service, files.ca)
        serving.register(JOB, a_registration())
        for number in range(40):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", service.port), 10))
            connection.sendall((b"", b"\x16")[number % 2])
        assert serving.post_gain(JOB, reports(1)).stored == 1
        metrics = urllib3.request("GET", f"http://127.0.0.1:{service.port}/metrics").data.decode()
        closed = next(line for line in metrics.splitlines() if line.startswith("adascale_connections_closed"))
        assert float(closed.split()[1]) >= 30


def test_garbage_in_a_handshake_ends_that_connection_only(service: ServiceProcess, files: TlsFiles) -> None:
    serving = client(service, files.ca)
    assert serving.list_jobs() == []
    for garbage in (b"\x16" + b"\xff" * 500, b"\x16\x03\x01\x00\x05hello", b"\x00" * 100, b"\xff"):
        with closing(socket.create_connection(("127.0.0.1", service.port), 30)) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert serving.list_jobs() == []


def test_a_service_with_tls_stops_at_once_with_open_connections(tmp_path: Path, files: TlsFiles) -> None:
    with ServiceProcess(tmp_path, *files.options) as service, ExitStack() as opened:
        for first in (b"", b"\x16\x03\x01", b"GET "):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", service.port), 10))
            connection.sendall(first)
        serving = client(service, files.ca)
        serving.register(JOB, a_registration())
        begun = time.monotonic()
        assert service.stop() == 0, service.log()
        assert time.monotonic() - begun < 15
        assert "Traceback" not in service.log()
        assert "graceful shutdown exceeded" not in service.log()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tls-cert", "tls.crt"), "--tls-cert is given but --tls-key is not"),
        (("--tls-key", "tls.key"), "--tls-key is given but --tls-cert is not"),
        (("--require-tls",), "--require-tls needs a certificate"),
        (("--tls-cert", "missing", "--tls-key", "tls.key"), "No such file or directory"),
        (("--tls-cert", "tls.key", "--tls-key", "tls.key"), "it has no certificate or key in PEM"),
        (("--tls-cert", "ca.crt", "--tls-key", "tls.key"), "the key is of another certificate"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_an_error(
    files: TlsFiles, options: tuple[str, ...], message: str
) -> None:
    placed = [option if option.startswith("--") else str(files.folder / option) for option in options]
    with pytest.raises(AdaScaleError, match=message) as error:
        run(["--port", "0", "--no-auth", *placed], {})
    assert error.value.exit_code == 2
