"""The sockets of a process group on the CPU, and how to free a thread that waits for a lost peer in one.

Gloo has no function that ends a collective which waits. When its sockets are shut down, the collective fails.
Gloo's sockets are found among the descriptors of the process: those that appear while the group is made, and
of which one end is a port that a member's gloo listens on.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def open_sockets() -> frozenset[tuple[int, str]]:
    """Return the descriptor and the inode of each socket of this process. Empty without /proc."""
    found = set()
    with contextlib.suppress(OSError):
        for path in _DESCRIPTORS.iterdir():
            with contextlib.suppress(OSError):
                target = str(path.readlink())
                if target.startswith("socket:"):
                    found.add((int(path.name), target))
    return frozenset(found)


def listening_ports(sockets: Iterable[tuple[int, str]]) -> list[int]:
    """Return the ports on which TCP sockets among `sockets` listen."""
    ports = []
    for descriptor, _ in sockets:
        with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
            if _is_tcp(borrowed) and _listens(borrowed):
                ports.append(int(borrowed.getsockname()[1]))
    return ports


def connected_to(sockets: Iterable[tuple[int, str]], ports: Iterable[int]) -> frozenset[tuple[int, str]]:
    """Return the TCP connections among `sockets` that have one of `ports` at one end."""
    wanted = set(ports)
    found = set()
    for descriptor, inode in sockets:
        with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
            if _is_tcp(borrowed) and {borrowed.getsockname()[1], borrowed.getpeername()[1]} & wanted:
                found.add((descriptor, inode))
    return frozenset(found)


def keep_alive(sockets: Iterable[tuple[int, str]], seconds: float) -> None:
    """Make collective calls on the connections `sockets` fail if the other host is silent.

    The heartbeats of members go to rank 0 only, so they do not notice that two others have lost the
    connection between them. The kernel asks the other host, whose kernel answers also while its process is
    busy. It waits longer than heartbeats do, so that where both notice a loss, heartbeats have named the
    replica before.
    """
    for descriptor, _ in sockets:
        with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
            borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, seconds),
                (socket.TCP_KEEPINTVL, seconds / 6),
                (socket.TCP_KEEPCNT, 3),
            ):
                borrowed.setsockopt(socket.IPPROTO_TCP, option, max(round(value), 1))
            # Of data that was sent and not acknowledged; the kernel asks nothing while there is some.
            borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1500 * seconds))


def shut_down(sockets: Iterable[tuple[int, str]]) -> None:
    """Shut the connections `sockets` down, so that nothing waits for them. Their owner closes them.

    A descriptor that belongs to another socket by now is left alone.
    """
    for descriptor, inode in sockets:
        with contextlib.suppress(OSError):
            if str((_DESCRIPTORS / str(descriptor)).readlink()) == inode:
                with _borrowed(descriptor) as borrowed:
                    # Gloo ends the process if it cannot accept a connection.
                    if _is_tcp(borrowed) and not _listens(borrowed):
                        borrowed.shutdown(socket.SHUT_RDWR)


def _borrowed(descriptor: int) -> socket.socket:
    """Return a socket of its own on a duplicate of `descriptor`."""
    return socket.socket(fileno=os.dup(descriptor))


def _listens(borrowed: socket.socket) -> bool:
    return bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_tcp(borrowed: socket.socket) -> bool:
    is_internet = borrowed.family in (socket.AF_INET, socket.AF_INET6)
    return is_internet and borrowed.type == socket.SOCK_STREAM
