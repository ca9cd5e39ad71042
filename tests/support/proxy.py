"""A TCP proxy in front of a server, whose subclasses disturb what they forward."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Forwards connections to a server.

    Args:
        port: the port of the server on 127.0.0.1.

    Attributes:
        port: its own port on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close all connections."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def request(self, data: bytes, client: socket.socket, server: socket.socket) -> bool:
        """Forward what a client has sent; return False to end the connection."""
        server.sendall(data)
        return True

    def answer(self, data: bytes, client: socket.socket) -> bool:
        """Forward what the server has sent; return False to end the connection."""
        client.sendall(data)
        return True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            for forward in (self._forward_requests, self._forward_answers):
                threading.Thread(target=forward, args=(client, server), daemon=True).start()

    def _forward_requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while (data := client.recv(65536)) and self.request(data, client, server):
                pass
        self._end(client, server)

    def _forward_answers(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while (data := server.recv(65536)) and self.answer(data, client):
                pass
        self._end(client, server)

    def _end(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
