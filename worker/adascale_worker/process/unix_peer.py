"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
"""Process id, user id and group id, as SO_PEERCRED of Linux has them."""


def require_same_user(connection: socket.socket) -> int | None:
    """Check that the process at the other end of a connection belongs to the user of this one, or to root."""
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
