"""How an agent starts the processes of its trainers.

All but the first are forked from a process that has torch imported (`adascale_worker.preloaded`). That is
possible for a program that the agent's own Python runs, as in `python train.py --epochs 3`, and that sets no
environment variable: torch reads some when it is imported. Every other command is executed, and so is one
whose server does not answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Protocol

from adascale_core.names import ENV_PRELOAD

PRELOADED: Final = Path(__file__).parents[1] / "preloaded.py"
SERVER_NAME: Final = "adascale-fork"
"""The name of the server in /proc/PID/comm. Its command line is that of the first trainer."""
NUMBER_BYTES: Final = 8
"""Bytes of a number in a message: the length of a request, or the process id in the answer."""
READY: Final = b"\n"
"""What the server sends before the first request."""
_ANSWER_TIMEOUT: Final = 10.0
"""Seconds within which the server must have forked a process: it does nothing else."""
_OPTIONS: Final = frozenset({"-u", "-B", "-O", "-OO"})
"""Options of Python with which a program can be forked."""
_PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
_SETS_VARIABLES: Final = re.compile(
    rb"environ\s*\[[^\]\n]*\]\s*=[^=]|environ\.(setdefault|update)\b|\b(putenv|load_dotenv)\b"
)
PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER: Final = 36

_unreaped: set[int] = set()
"""Process ids of trainers that are not reaped yet. Only their own thread may reap them."""
_gets_orphans = False
"""Whether the kernel makes this process the parent of the orphans of its descendants."""


class Child(Protocol):
    """A child process: a `subprocess.Popen`, or one that was forked for the agent."""

    @property
    def pid(self) -> int:
        """Its process id, which also is the id of its process group."""

    @property
    def returncode(self) -> int | Any:
        """Its exit code, -n for signal n; None until `wait` has reaped it."""

    @property
    def stdout(self) -> IO[str] | None:
        """Its output."""

    def wait(self) -> int:
        """Wait for its exit, reap it, and return its exit code."""


class TrainerStarter:
    """Starts processes that run a program.

    All calls have to come from the thread that waits for events.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._server: socket.socket | None = None
        self._is_ready = False

    def start(self, environ: Mapping[str, str]) -> Child:
        """Start a process. It leads a process group, and dies with this process."""
        child = self._fork(environ) or self._execute(environ)
        _unreaped.add(child.pid)
        return child

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server, self._is_ready = None, False

    def _fork(self, environ: Mapping[str, str]) -> Child | None:
        """Have the server fork a process; None if there is none, or it is not ready yet, or has ended."""
        if self._server is None:
            return None
        if not self._is_ready:
            if not select.select([self._server], [], [], 0)[0]:
                return None
            if self._server.recv(len(READY)) != READY:
                self.close()
                return None
            self._is_ready = True
        reading, writing = os.pipe()
        try:
            body = json.dumps(dict(environ)).encode()
            socket.send_fds(self._server, [len(body).to_bytes(NUMBER_BYTES, "big")], [writing])
            self._server.sendall(body)
            answer = self._server.recv(NUMBER_BYTES, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        finally:
            os.close(writing)
        if len(answer) < NUMBER_BYTES:
            os.close(reading)
            # A server that answers later finds the socket closed, and kills the process.
            self.close()
            return None
        return _ForkedChild(
            int.from_bytes(answer, "big"), os.fdopen(reading, encoding="utf-8", errors="replace")
        )

    def _execute(self, environ: Mapping[str, str]) -> Child:
        """Execute the command; with a server for the processes after it, if there can be one."""
        if self._server is not None or not _can_be_forked(self._command, environ) or not _get_orphans():
            return _execute(self._command, environ)
        self._server, theirs = socket.socketpair()
        self._server.settimeout(_ANSWER_TIMEOUT)
        program = next(index for index, part in enumerate(self._command) if index and part not in _OPTIONS)
        with theirs:
            own = [str(PRELOADED), str(theirs.fileno())]
            command = [*self._command[:program], *own, *self._command[program:]]
            try:
                return _execute(command, environ, [theirs.fileno()])
            except OSError:
                self.close()
                raise


class _ForkedChild:
    """A process that the server has forked, and that is a child of this process."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = stdout
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def forget(process_ids: Sequence[int]) -> None:
    """Take note that these processes are reaped, and that their ids may become those of others."""
    _unreaped.difference_update(process_ids)


def reap_orphans() -> None:
    """Reap exited processes that trainers have left behind, if the kernel makes this process their parent.

    They would stay as zombies. Call it from time to time, in the thread that starts trainers.
    """
    if not (_gets_orphans or os.getpid() == 1):
        return
    with suppress(ChildProcessError):
        while True:
            # Without reaping: the exit code of a trainer is for its own thread.
            exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exited is None or exited.si_pid in _unreaped:
                return
            os.waitpid(exited.si_pid, os.WNOHANG)


def _can_be_forked(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a forked process can run the command."""
    if (
        sys.platform != "linux"
        or environ.get(ENV_PRELOAD) == "0"
        or not _PYTHON.fullmatch(Path(command[0]).name)
    ):
        return False
    python = shutil.which(command[0], path=environ.get("PATH"))
    # The links in environments of several Pythons lead to the same file.
    if python is None or Path(python).parent.resolve() != Path(sys.executable).parent.resolve():
        return False
    program = next((part for part in command[1:] if part not in _OPTIONS), "-")
    if program.startswith("-"):
        return False
    try:
        return not _SETS_VARIABLES.search(Path(program).read_bytes())
    except OSError:
        return False


def _get_orphans() -> bool:
    """Have the kernel make this process the parent of its descendants' orphans. Returns whether it does."""
    global _gets_orphans
    _gets_orphans = _gets_orphans or ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    return _gets_orphans


def _execute(
    command: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Ctrl-C in a terminal must only reach the agent, which lets the trainer save its state.
        process_group=0,
        preexec_fn=_die_with_parent(os.getpid()),
        pass_fds=descriptors,
        text=True,
        errors="replace",
    )


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return the function that a child runs before the program, so that it dies with its agent."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The agent died before the call of prctl.
            os._exit(1)

    return prepare
