"""What a process group on the CPU (Gloo) needs beside torch.

- Gloo has no function that ends a collective which waits. When its sockets are shut down, the collective
  fails. They are found among the descriptors of the process: those that appear while the group is made, and
  of which one end is a port that a member's Gloo listens on.
- There is one wait that this does not end: the peer's permission to send arrives just before the sockets are
  shut down, the send fails, and nothing reports that to the thread which waits for it. `loop.failures` then
  ends the process.
- A thread of Gloo can still hold tensors of the last collective when the caller has its result, and needs the
  GIL to release them. A thread that asks for the GIL while the interpreter is finalized aborts the process
  ("terminate called without an active exception", github.com/pytorch/pytorch/pull/179291).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
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
    for each in sockets:
        with contextlib.suppress(OSError), _borrowed(*each) as borrowed:
            if _is_tcp(borrowed) and _listens(borrowed):
                ports.append(int(borrowed.getsockname()[1]))
    return ports


def connected_to(sockets: Iterable[tuple[int, str]], ports: Iterable[int]) -> frozenset[tuple[int, str]]:
    """Return the TCP connections among `sockets` that have one of `ports` at one end."""
    wanted = set(ports)
    found = set()
    for each in sockets:
        with contextlib.suppress(OSError), _borrowed(*each) as borrowed:
            if _is_tcp(borrowed) and {borrowed.getsockname()[1], borrowed.getpeername()[1]} & wanted:
                found.add(each)
    return frozenset(found)


def keep_alive(sockets: Iterable[tuple[int, str]], seconds: float) -> None:
    """Make collective calls on the connections `sockets` fail if the other host is silent.

    Heartbeats go to rank 0 only, so they do not notice that two others have lost their connection. They
    notice silence after `seconds`, and name the replica, so this waits half as long again.
    """
    for each in sockets:
        with contextlib.suppress(OSError), _borrowed(*each) as borrowed:
            # The kernel of the other host answers also while its process is busy.
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
    """Shut the connections `sockets` down, so that nothing waits for them. Their owner closes them."""
    for each in sockets:
        with contextlib.suppress(OSError), _borrowed(*each) as borrowed:
            # Gloo ends the process if it cannot accept a connection.
            if _is_tcp(borrowed) and not _listens(borrowed):
                borrowed.shutdown(socket.SHUT_RDWR)


def _borrowed(descriptor: int, inode: str) -> socket.socket:
    """Return a socket on a duplicate of `descriptor`; `OSError` if that belongs to another socket by now."""
    duplicate = os.dup(descriptor)
    try:
        # Of the duplicate, because another thread may close the descriptor and get its number at any time.
        if str((_DESCRIPTORS / str(duplicate)).readlink()) != inode:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _listens(borrowed: socket.socket) -> bool:
    return bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_tcp(borrowed: socket.socket) -> bool:
    is_internet = borrowed.family in (socket.AF_INET, socket.AF_INET6)
    return is_internet and borrowed.type == socket.SOCK_STREAM


THREAD_NAME = "pt_gloo_runloop"
"""What torch names the threads that execute collectives of Gloo."""
IDLE_TIME = 0.02
"""Seconds without the GIL in which a thread that does not run has nothing left to do: one that waits for the
GIL tries to take it every 5 ms (`sys.getswitchinterval`)."""
IDLE_TIMEOUT = 10.0
"""Seconds to wait at most for threads that always run."""

_TASKS = Path("/proc/self/task")


def wait_until_idle(name: str = THREAD_NAME) -> None:
    """Wait until each thread with this name has nothing to do or is blocked, `IDLE_TIMEOUT` at most.

    Without /proc, wait for `IDLE_TIME`.
    """
    deadline = time.monotonic() + IDLE_TIMEOUT
    before = _activity(name)
    while before or not _TASKS.exists():
        time.sleep(IDLE_TIME)
        after = _activity(name)
        is_idle = after == before and all(state != "R" for state, _ in after.values())
        if is_idle or time.monotonic() > deadline:
            return
        before = after


def _activity(name: str) -> dict[str, tuple[str, str]]:
    """Return the state, and the number of times that it has waited, of each thread with this name."""
    found = {}
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):
                if (task / "comm").read_text().strip() != name:
                    continue
                status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                found[task.name] = (status["State"].split()[0], status["voluntary_ctxt_switches"].strip())
    return found
