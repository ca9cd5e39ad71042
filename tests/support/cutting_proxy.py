"""A TCP proxy in front of a PostgreSQL server that cuts connections in the middle of a COMMIT."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle

COMMIT = b"COMMIT\0"


class CuttingProxy:
    """Forwards connections to a server.

    Every `period`-th COMMIT cuts its connection, in turn before the server receives it, and after the server
    has answered it, without the answer.

    Args:
        port: the port of the server on 127.0.0.1.
        period: COMMITs from one cut to the next.
    """

    def __init__(self, port: int, period: int) -> None:
        self._port_of_server = port
        self._period = period
        self._commits = 0
        self._kinds = cycle(("before", "after"))
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cuts = {"before": 0, "after": 0}

    def serve(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port_of_server))
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def close(self) -> None:
        """Accept no further connections."""
        # Wakes `accept`, which closing the socket would not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        answers_are_lost = threading.Event()
        back = threading.Thread(target=_copy, args=(server, client, answers_are_lost), daemon=True)
        back.start()
        with client, server, suppress(OSError):
            while data := client.recv(65536):
                kind = self._kind_of_cut() if COMMIT in data else None
                if kind == "before":
                    break
                if kind == "after":
                    answers_are_lost.set()
                    server.sendall(data)
                    back.join()  # ends with the answer
                    break
                server.sendall(data)
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join()

    def _kind_of_cut(self) -> str | None:
        with self._lock:
            self._commits += 1
            if self._commits % self._period:
                return None
            kind = next(self._kinds)
            self.cuts[kind] += 1
            return kind


def _copy(source: socket.socket, target: socket.socket, is_lost: threading.Event) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            if is_lost.is_set():
                return
            target.sendall(data)


@contextmanager
def cutting_proxy(port: int, period: int) -> Iterator[CuttingProxy]:
    """Run a proxy; see `CuttingProxy`."""
    with ExitStack() as stack:
        proxy = CuttingProxy(port, period)
        stack.callback(proxy.close)
        threading.Thread(target=proxy.serve, daemon=True).start()
        yield proxy
