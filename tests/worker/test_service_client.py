"""Whatever answers at the service's address, a worker gets a view or a ServiceError."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from adascale_worker.environment import ServiceAddress
from adascale_worker.errors import ServiceError
from adascale_worker.service import ServiceClient
from support.launch import free_port


class Answers(BaseHTTPRequestHandler):
    """Answers each question with the path's last part, as far as it is JSON."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Nothing is told."""


@pytest.fixture
def stranger() -> Iterator[str]:
    """The address of something that is not the metrics service."""
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "body",
    [b"<html>hello", b"{}", b"[]", b"3", b'{"allocation": 3}', b'{"version": 1, "desired": 5}', b"\xff"],
)
def test_an_answer_of_something_else_is_told(
    stranger: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "body", body)
    client = ServiceClient(ServiceAddress(stranger, "default.test"))
    with pytest.raises(ServiceError, match="metrics service"):
        client.allocation()
    with pytest.raises(ServiceError, match="metrics service"):
        client.post_gain([])
    client.close()


def test_nobody_there_is_told() -> None:
    client = ServiceClient(ServiceAddress(f"http://127.0.0.1:{free_port()}", "default.test"))
    with pytest.raises(ServiceError, match="does not answer"):
        client.allocation()


def test_a_token_that_cannot_be_read_just_now_is_as_a_service_that_is_away(tmp_path: Path) -> None:
    address = ServiceAddress("http://127.0.0.1:1", "default.test", token_file=tmp_path / "missing")
    with pytest.raises(ServiceError, match="missing, which cannot be read: No such file"):
        ServiceClient(address).allocation()
