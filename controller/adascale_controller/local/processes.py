"""Processes that end with this one: each in a session of its own, its output in a file."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Process:
    """A child process.

    A session of its own keeps the terminal's Ctrl-C from it: that goes to this process, which asks its
    children to leave in order. When this process dies, the kernel sends the child a SIGTERM; so children
    are to be started from the main thread, whose end is what the kernel minds.

    Args:
        command: the program and its arguments.
        environ: its environment.
        log: the file that its output is appended to.
        pass_fds: descriptors that it inherits.
        cwd: the folder that it runs in; none: this process's.

    Raises:
        OSError: it can't be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> None:
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                env=environ,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        self.pid = self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; none while it runs."""
        return self._popen.poll()

    def terminate(self) -> None:
        """Ask it to leave."""
        self._popen.terminate()

    def kill(self) -> None:
        """End it and what it has started."""
        if self._popen.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Wait for its end; whether it has come."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What the child runs before its program; it may only call the kernel, for this is after a fork."""
    if _libc is None:
        return None
    prctl = _libc.prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # The parent died before the kernel was told to mind it.

    return prepare


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 200 * lines, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
