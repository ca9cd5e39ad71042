"""A real S3 server, versitygw, and a proxy before it that fails in the ways that networks do."""

import contextlib
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from support.launch import free_port, wait_until
from support.proxy import Proxy

MODULE = "github.com/versity/versitygw/cmd/versitygw"
VERSION = "v1.8.0"
ACCESS_KEY = "AKIATESTTESTTEST"
SECRET_KEY = "a-secret-of-the-tests"
BUCKET = "checkpoints"
BUILD_TIMEOUT = 150.0
"""Seconds for the build of the server, the first time."""
MAX_OUTPUT = 1000
"""Characters of the output of a build that fails."""


def require_server() -> str:
    """Return the server's program, installed from its Go module where Go is available.

    Without it, the test is skipped; in CI (environment CI=true) it fails.
    """
    if found := os.environ.get("ADASCALE_TEST_S3_SERVER") or shutil.which("versitygw"):
        return found
    go = shutil.which("go")
    if go is None:
        _report_missing("neither versitygw nor Go, from whose module it is built, is installed")
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "adascale-tests" / VERSION
    program = folder / "versitygw"
    if not program.exists():
        environ = {**os.environ, "GOBIN": str(folder), "CGO_ENABLED": "0"}
        command = [go, "install", f"{MODULE}@{VERSION}"]
        try:
            subprocess.run(command, env=environ, capture_output=True, check=True, timeout=BUILD_TIMEOUT)
        except subprocess.CalledProcessError as error:
            output = error.stderr.decode(errors="replace").strip()
            _report_missing(f"`{' '.join(command)}` failed: {output[-MAX_OUTPUT:]}")
        except subprocess.TimeoutExpired:
            _report_missing(f"`{' '.join(command)}` did not end within {BUILD_TIMEOUT:g} s")
    return str(program)


def _report_missing(reason: str) -> NoReturn:
    message = f"no S3 server: {reason}. Install Go, or set ADASCALE_TEST_S3_SERVER to the path of versitygw"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{message}. Tests are not skipped in CI", pytrace=False)
    pytest.skip(message)


class S3Server:
    """The server, with its objects in a folder. Its address stays the same over restarts.

    Args:
        program: path of versitygw.
        folder: for objects; each bucket is a folder in it.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        (folder / BUCKET).mkdir(parents=True)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        self._process = subprocess.Popen(
            [
                *(self._program, "--port", f"127.0.0.1:{self.port}", "--quiet"),
                *("--access", ACCESS_KEY, "--secret", SECRET_KEY, "posix", str(self._folder)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: accepts(self.port), "the start of the S3 server")

    def stop(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None


@dataclass(frozen=True)
class Refusal:
    """An error of a server that takes no writes.

    Args:
        status: of HTTP.
        code: of S3, such as AccessDenied.
    """

    status: int
    code: str

    @property
    def answer(self) -> bytes:
        """The whole answer."""
        body = f"<Error><Code>{self.code}</Code><Message>refused by the test</Message></Error>"
        return (
            f"HTTP/1.1 {self.status} Refused\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
        ).encode()


class FaultyProxy(Proxy):
    """Disturbs the connections to an S3 server.

    Attributes:
        fault: "cut" closes connections after some bytes of a large request; "silent" takes requests and does
            not answer; a refusal answers all requests that write. None forwards everything.
        refusals: requests that were refused.
        refuses_checksums: whether requests are refused that have checksums which S3 does not require, as by
            some S3-compatible stores.
    """

    def __init__(self, port: int) -> None:
        self.fault: str | Refusal | None = None
        self.refusals = 0
        self.refuses_checksums = False
        self._forwarded: dict[socket.socket, int] = {}
        super().__init__(port)

    def request(self, data: bytes, client: socket.socket, server: socket.socket) -> bool:
        self._forwarded[client] = self._forwarded.get(client, 0) + len(data)
        # A client sends a request after the answer to the one before, so each begins a part.
        refusal = None
        if data.startswith((b"PUT ", b"POST ")) and isinstance(self.fault, Refusal):
            refusal = self.fault
        elif self.refuses_checksums and _has_checksums(data):
            refusal = Refusal(501, "NotImplemented")
        if refusal is not None:
            self.refusals += 1
            client.sendall(refusal.answer)
            while client.recv(65536):
                pass
            return False
        if self.fault == "cut" and self._forwarded[client] > 3_000_000:
            return False
        return super().request(data, client, server)

    def answer(self, data: bytes, client: socket.socket) -> bool:
        return self.fault == "silent" or super().answer(data, client)


def _has_checksums(request: bytes) -> bool:
    head = request.partition(b"\r\n\r\n")[0].lower()
    names = (b"x-amz-checksum-", b"x-amz-sdk-checksum-algorithm:", b"x-amz-trailer:")
    return any(b"\n" + name in head for name in names)


def accepts(port: int) -> bool:
    """Whether a server accepts connections."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def environment(port: int) -> dict[str, str]:
    """Environment variables with which clients find the server."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        # The instance's role is looked for otherwise.
        "AWS_EC2_METADATA_DISABLED": "true",
    }
