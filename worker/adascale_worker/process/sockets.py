"""Sockets: listening for other replicas, and the user at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

_BACKLOG: Final = 1024


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port, of all interfaces unless the address is a loopback one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    any_interface = "::" if family == socket.AF_INET6 else ""
    is_loopback = address.startswith("127.") or address == "::1"
    listener.bind((address if is_loopback else any_interface, 0))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


_CREDENTIALS = struct.Struct("3i")
"""Process id, user id and group id, as SO_PEERCRED of Linux has them."""


def require_same_user(connection: socket.socket) -> int | None:
    """Check that the process at the other end of a connection belongs to the user of this one, or to root.

    Returns its process id; None in another PID namespace, and on other systems than Linux, where the
    permissions of the socket's folder have to suffice.
    """
    option: int | None = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user not in (os.geteuid(), 0):
        raise PermissionError(
            f"process {pid} at its other end belongs to user {user}, and this process to user {os.geteuid()}"
        )
    return pid or None
