"""Sockets on which a replica accepts the connections of other replicas."""

from __future__ import annotations

import socket
from typing import Final

_BACKLOG: Final = 1024


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    any_interface = "::" if family == socket.AF_INET6 else ""
    is_loopback = address.startswith("127.") or address == "::1"
    listener.bind((address if is_loopback else any_interface, 0))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
