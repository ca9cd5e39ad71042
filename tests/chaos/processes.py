"""The processes of a run, found by an environment variable that they all inherit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adascale_core import names

MARK = "CHAOS_RUN"
"""The environment variable that marks the processes of a run."""


@dataclass(frozen=True)
class Process:
    """A process of a run.

    Args:
        pid: its id.
        kind: `controller`, `service`, `agent` or `trainer`.
        replica: the index of an agent's or trainer's replica; -1 for the others.
        token: its token for the metrics service; empty if it has none.
        parent: the id of its parent.
    """

    pid: int
    kind: str
    replica: int
    token: str
    parent: int

    def __str__(self) -> str:
        replica = f" of replica {self.replica}" if self.replica >= 0 else ""
        return f"{self.kind}{replica} ({self.pid})"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has exited."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def kill_all(mark: str) -> None:
    """Kill the processes whose marks begin with this one."""
    # A controller that is killed lets its children save, and an agent restarts its trainer.
    while remaining := processes(mark):
        for process in remaining:
            process.send(signal.SIGKILL)
        time.sleep(0.05)


def started(pid: int) -> float | None:
    """Return when a process was started, in seconds since the start of the machine; None if it has ended."""
    with suppress(OSError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return ticks / os.sysconf("SC_CLK_TCK")
    return None


def processes(mark: str) -> list[Process]:
    """Return the processes whose marks begin with this one, by kind and replica; no zombies."""
    return sorted(_marked(mark), key=lambda each: (each.kind, each.replica, each.pid))


def _marked(mark: str) -> Iterator[Process]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes().split(b"\0")
            if not any(each.startswith(f"{MARK}={mark}".encode()) for each in environ):
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" or not command:
            continue
        values = dict(each.decode(errors="replace").partition("=")[::2] for each in environ)
        replica, token = values.get(names.ENV_REPLICA, ""), values.get(names.ENV_TOKEN, "")
        if "adascale_controller" in command:
            kind = "controller"
        elif "adascale_api" in command:
            kind = "service"
        elif "adascale_worker.agent" in command:
            kind = "agent"
        else:
            kind = "trainer"
        yield Process(int(entry.name), kind, int(replica) if replica else -1, token, int(parent))
