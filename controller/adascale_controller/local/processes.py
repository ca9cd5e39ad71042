"""Child processes that end with this process, and the signals that request this process to stop."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from adascale_core.names import SIGNAL_REPEAT_INTERVAL

_PR_SET_PDEATHSIG = 1  # prctl(2)


_MESSAGE = re.compile(
    r"^(?:(.+?:\d+): RuntimeWarning: |adascale: "
    # what the run reports itself
    r"(?!step \d+: replica|no step for|replica \d+ continues|the metrics service|lost the connection))(.+)$",
    re.MULTILINE,
)
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ChildProcess:
    """A child process with its own session, so that a Ctrl-C of the terminal reaches only this process.

    If this process dies, the kernel sends the child a SIGTERM. Start children from the main thread: the
    kernel watches the thread that started them.
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
        """Its exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def terminate(self) -> None:
        """Send it a SIGTERM."""
        self._popen.terminate()

    def kill(self) -> None:
        """Kill it and the processes of its group."""
        if self._popen.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Wait for its exit; whether it exited within `timeout` seconds."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


def _die_with_parent(parent: int) -> Callable[[], None]:
    """Return the function that the child runs between fork and exec, where only system calls are safe."""
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # The parent died before prctl took effect.

    return prepare


def tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            # A message of one line can be long, and its beginning says what it is about.
            file.seek(max(file.seek(0, os.SEEK_END) - 2000 - 200 * lines, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


class TrainerMessages:
    """What trainers report to their user in the logs of a run, each message once."""

    def __init__(self) -> None:
        self._positions: dict[Path, int] = {}
        self._known: set[str] = set()

    def follow(self, log: Path) -> None:
        """Read a log from its present end on."""
        if log not in self._positions:
            self._positions[log] = log.stat().st_size if log.exists() else 0

    def read(self) -> list[str]:
        """Return the messages since the last call."""
        messages: list[str] = []
        for log, position in self._positions.items():
            with suppress(OSError), log.open("rb") as file:
                file.seek(position)
                text = file.read().rpartition(b"\n")[0]
                self._positions[log] += len(text) + 1 if text else 0
                messages += map(_message, _MESSAGE.finditer(text.decode(errors="replace")))
        new = [each for each in dict.fromkeys(messages) if each not in self._known]
        self._known.update(new)
        return new


def has_message(text: str) -> bool:
    """Whether an output has a message of a trainer."""
    return _MESSAGE.search(text) is not None


def _message(found: re.Match[str]) -> str:
    line, text = found.groups()
    return f"{text} ({line})" if line else text


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP while entered; restores the previous handlers on exit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.first: signal.Signals | None = None
        """The first signal received; None before that."""
        self._clock = clock
        self._first_at = 0.0
        # Whether a second signal was received: the run is to stop without saving. Not one within
        # `SIGNAL_REPEAT_INTERVAL` after the first, and not SIGHUP: a terminal may be closed while it saves.
        self.kill_requested = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def stop_requested(self) -> bool:
        """Whether a signal was received: the run is to save and stop."""
        return self.first is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a process that stops because of the first signal, as a shell reports it."""
        return 128 + (self.first or signal.SIGTERM)

    def __enter__(self) -> Self:
        for number in _HANDLED:
            # An ignored signal, such as SIGHUP under nohup, stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        now = self._clock()
        if self.first is None:
            self.first, self._first_at = signal.Signals(number), now
        elif number != signal.SIGHUP and now - self._first_at >= SIGNAL_REPEAT_INTERVAL:
            self.kill_requested = True
