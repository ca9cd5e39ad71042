"""Has a program run in a process that `server.py` forks; see the docstring of the package.

python -S -E command.py SOCKET [-m MODULE | -c CODE | PROGRAM] ARGUMENT ...
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
NUMBER_SIZE = 8
"""Bytes of a number in a message."""


def request(
    address: str,
    arguments: list[str],
    environ: dict[str, str],
    descriptors: dict[int, int],
    ignored: list[int],
) -> socket.socket:
    """Request that the server runs a program.

    Args:
        address: the path of the server's socket.
        arguments: of the interpreter.
        environ: of the program.
        descriptors: those of this process that the program gets, by their numbers there.
        ignored: the signals that the program ignores at its start.

    Returns:
        The connection. The server sends the process id, and the exit code at the end; it forwards the signals
        whose numbers it receives, and kills the program when the connection is closed.
    """
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.connect(address)
    described = {
        "arguments": arguments,
        "environ": environ,
        "folder": os.getcwd(),  # noqa: PTH109 - without the time to import pathlib
        "descriptors": list(descriptors),
        "ignored": ignored,
    }
    body = json.dumps(described).encode()
    rights = array.array("i", descriptors.values())
    channel.sendmsg(
        [len(body).to_bytes(NUMBER_SIZE, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    )
    channel.sendall(body)
    return channel


def receive_number(channel: socket.socket) -> int | None:
    """Return the next number that the server sends. None if it has ended."""
    data = channel.recv(NUMBER_SIZE, socket.MSG_WAITALL)
    return int.from_bytes(data, "big", signed=True) if data else None


def main() -> None:
    """Run a program as this process would."""
    ignored = [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    numbers = os.listdir("/proc/self/fd")  # noqa: PTH208
    descriptors = [each for each in map(int, numbers) if _is_open(each)]
    channel = request(
        sys.argv[1], sys.argv[2:], dict(os.environ), {each: each for each in descriptors}, list(ignored)
    )
    for number in FORWARDED:
        if number not in ignored:
            signal.signal(number, lambda received, _: channel.sendall(bytes([received])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    # The program has them, and alone decides when they are closed.
    for each in descriptors:
        os.close(each)
    receive_number(channel)
    code = receive_number(channel)
    if code is None:
        os._exit(1)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(descriptor: int) -> bool:
    """Whether a descriptor is open. That of the listing is closed with it."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
