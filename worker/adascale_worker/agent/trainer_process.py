"""A trainer as a process: it dies with its agent, which passes on its output and keeps the end of it.

A trainer is started before its generation begins: it imports what it needs while the generation before it
still trains, says that it is ready, and waits to be told its place. That takes the slowest part of a
re-entry, the import of torch, out of the time that training stands still.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from adascale_core.names import ENV_AGENT_FD, ENV_LISTEN_FD

LOG_LINES = 40
"""Last lines of output kept for the case that the program fails."""
LINE_LENGTH = 500
LAST_OUTPUT = 2.0
"""Seconds after the end of a trainer within which the rest of its output is read."""
PR_SET_PDEATHSIG = 1

_own: set[int] = set()
"""Process ids of trainers that are not reaped yet, which nobody else may do."""


class TrainerProcess:
    """A trainer, waiting for its place or running in it.

    Args:
        command: the user's program and its arguments.
        environ: its environment.
        listen_fd: the listening socket for the rendezvous, on rank 0.
        on_change: called, from a thread of this object's, when it is ready and when it has ended.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        listen_fd: int | None,
        on_change: Callable[[], None],
    ) -> None:
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._on_change = on_change
        self._channel, theirs = socket.socketpair()
        inherited = [theirs.fileno()]
        told = {"PYTHONUNBUFFERED": "1", ENV_AGENT_FD: str(theirs.fileno())}
        if listen_fd is not None:
            inherited.append(listen_fd)
            told[ENV_LISTEN_FD] = str(listen_fd)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    env={**environ, **told},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=inherited,
                    # A terminal's Ctrl-C is for the agent, which ends the trainer in its own way.
                    process_group=0,
                    preexec_fn=_die_with_parent(os.getpid()),
                    text=True,
                    errors="replace",
                )
        except OSError:
            self._channel.close()
            raise
        _own.add(self._process.pid)
        self.ready = False
        """Whether it waits for its place."""
        self._ended = False
        output = threading.Thread(target=self._pass_on, name="adascale-output", daemon=True)
        output.start()
        threading.Thread(target=self._await_ready, name="adascale-ready", daemon=True).start()
        threading.Thread(target=self._await_end, args=[output], name="adascale-end", daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal, once it has ended and what it wrote is read."""
        return self._process.poll() if self._ended else None

    @property
    def log(self) -> str:
        """The last lines that it wrote."""
        return "\n".join(self._lines)

    def place(self, environ: Mapping[str, str | None]) -> None:
        """Tell it its place, as environment variables, and so let it go on; those that are none go."""
        try:
            self._channel.sendall(json.dumps(dict(environ)).encode() + b"\n")
        except OSError:
            # It has ended, and its exit code will tell.
            return

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def end(self) -> None:
        """End it without ceremony; it has nothing to lose before it is told its place."""
        if self._process.poll() is None:
            self._kill_group()
        self._process.wait()

    def _await_end(self, output: threading.Thread) -> None:
        """Wait for its end, and end what it has left running: loaders of data, which hold its connections
        and its output open."""
        with contextlib.suppress(ChildProcessError):
            # Not reaped yet, its number cannot be another's.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()
        self._process.wait()
        _own.discard(self._process.pid)
        # What has moved to another group lives on, and may hold the output open for good.
        output.join(LAST_OUTPUT)
        self._channel.close()
        self._ended = True
        self._on_change()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _await_ready(self) -> None:
        with contextlib.suppress(OSError):
            if self._channel.recv(1):
                self.ready = True
                self._on_change()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n")[:LINE_LENGTH])
                try:
                    sys.stdout.write(line)
                    sys.stdout.flush()
                except OSError:
                    # Nobody reads us any more; the program goes on all the same.
                    continue


def reap_orphans() -> None:
    """Let go of processes that trainers have left behind and that have ended.

    To be called now and then by an agent that is the first process of a container, from the thread that
    starts trainers: what loses its parent there is handed to it, and would stay as a zombie.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            # Looked at first: a trainer's exit code is for the thread that waits for it.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in _own:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What a child runs before the program, so that the kernel kills it when its agent dies."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The agent died in between.
            os._exit(1)

    return prepare
