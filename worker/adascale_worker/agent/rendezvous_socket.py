"""The listening socket of a replica, which serves the rendezvous of its next generation on rank 0."""

from __future__ import annotations

import socket

_BACKLOG = 128


class RendezvousSocket:
    """A socket that listens on a free port until a trainer takes it over.

    Peers that connect early wait in its backlog until the trainer accepts them.

    Args:
        address: host name or IP address at which the other replicas reach this one.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = _listen(address)

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._socket.getsockname()[1])

    def fileno(self) -> int:
        """Return its file descriptor."""
        return self._socket.fileno()

    def renew(self) -> None:
        """Close the socket, which a trainer has inherited or which is invalid, and listen on another port."""
        self._socket.close()
        self._socket = _listen(self._address)


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    any_interface = "::" if family == socket.AF_INET6 else ""
    listener.bind((address if address.startswith("127.") else any_interface, 0))
    listener.listen(_BACKLOG)
    return listener
