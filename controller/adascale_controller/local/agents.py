"""The agents of a run: one process per replica."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.machine import ADDRESS, gpu_environment
from adascale_controller.local.processes import ChildProcess, tail
from adascale_controller.local.state_dir import StateDir
from adascale_core import names

STOP_TIMEOUT = 20.0
"""Seconds that agents have to save and exit before they are killed."""


@dataclass(frozen=True)
class AgentExit:
    """The exit of an agent."""

    rank: int  # the index of its replica
    code: int  # its exit code; negative for a signal
    requested: bool  # whether it was requested to stop


class Agents:
    """Starts and stops agents."""

    def __init__(
        self,
        command: LocalCommand,
        environ: Mapping[str, str],
        devices: Sequence[str],
        folder: StateDir,
        lock: int,
    ) -> None:
        self._command = command
        self._environ = {**command.environ, **environ, names.ENV_ADDRESS: ADDRESS}
        self._devices = devices
        self._folder = folder
        self._lock = lock
        self._processes: dict[int, ChildProcess] = {}
        self._stopping: set[int] = set()

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks whose agents run, or whose exits have not been collected."""
        return frozenset(self._processes)

    def start(self, rank: int) -> None:
        """Start the agent of `rank`."""
        environ = {**self._environ, names.ENV_REPLICA: str(rank)}
        if self._devices:
            count = int(self._environ.get(names.ENV_PROCESSES_PER_REPLICA, "1"))
            own = self._devices[rank * count : (rank + 1) * count]
            environ |= gpu_environment(environ, ",".join(own))
        # -P: a file in the user's folder must not shadow a library.
        command = [sys.executable, "-P", "-m", "adascale_worker.agent", "--", *self._command.command]
        log = self._folder.replica_log(rank).absolute()
        self._processes[rank] = ChildProcess(command, environ, log, [self._lock], self._command.cwd)

    def request_stop(self, rank: int) -> None:
        """Request the agent of `rank` to save and exit."""
        if rank in self._processes and rank not in self._stopping:
            self._stopping.add(rank)
            self._processes[rank].terminate()

    def collect_exits(self) -> list[AgentExit]:
        """Return the exits since the last call, by rank."""
        exits = []
        for rank, process in sorted(self._processes.items()):
            code = process.exit_code
            if code is not None:
                exits.append(AgentExit(rank, code, rank in self._stopping))
                del self._processes[rank]
                self._stopping.discard(rank)
        return exits

    def log_tail(self, rank: int, lines: int = 20) -> str:
        """Return the last lines of the replica's log."""
        return tail(self._folder.replica_log(rank), lines)

    def stop_all(self, kill_now: Callable[[], bool], while_waiting: Callable[[], None]) -> list[AgentExit]:
        """Request all agents to save and exit, and wait for it."""
        for rank in self.ranks:
            self.request_stop(rank)
        deadline = time.monotonic() + STOP_TIMEOUT
        while True:
            self.collect_exits()
            if not self._processes:
                return []
            if kill_now() or time.monotonic() > deadline:
                return self._kill_all()
            while_waiting()
            time.sleep(0.05)

    def _kill_all(self) -> list[AgentExit]:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(STOP_TIMEOUT)
        return self.collect_exits()
