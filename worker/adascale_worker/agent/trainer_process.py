"""A trainer as a process: it dies with its agent, which passes on its output and keeps the end of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

LOG_LINES = 40
"""Last lines of output kept for the case that the program fails."""
LINE_LENGTH = 500
PR_SET_PDEATHSIG = 1


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


class TrainerProcess:
    """A running trainer.

    Args:
        command: the user's program and its arguments.
        environ: its environment.
        pass_fd: a descriptor that it inherits, if any.
        on_exit: called from a thread of this object's, once the program has ended and its output is read.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        pass_fd: int | None,
        on_exit: Callable[[], None],
    ) -> None:
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._on_exit = on_exit
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[] if pass_fd is None else [pass_fd],
            preexec_fn=_die_with_parent(os.getpid()),
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._pass_on, name="adascale-output", daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; none while it runs."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """The last lines that it wrote."""
        return "\n".join(self._lines)

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n")[:LINE_LENGTH])
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except OSError:
                # Nobody reads us any more; the program goes on all the same.
                continue
        self._process.wait()
        self._on_exit()


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What a child runs before the program, so that the kernel kills it when its agent dies."""
    libc = _libc()
    if libc is None:
        return None

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The agent died in between.
            os._exit(1)

    return prepare
