"""The agents of a run: one process per replica, started, asked to leave and told of when they end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.processes import Process, tail
from adascale_controller.local.state_dir import StateDir
from adascale_core import names

ADDRESS = "127.0.0.1"
LEAVE_TIMEOUT = 20.0
"""Seconds that agents have to save and leave before they are ended."""


@dataclass(frozen=True)
class AgentExit:
    """An agent that has ended.

    Args:
        rank: index of its replica.
        code: its exit code, negative for a signal.
        dismissed: whether it was asked to leave.
    """

    rank: int
    code: int
    dismissed: bool


class Agents:
    """Starts and ends agents.

    Args:
        program: what they run.
        environ: what they are told of the metrics service and the job.
        devices: GPUs, one for each replica; none: on the CPU.
        folder: the state folder.
        lock: the descriptor of the folder's lock, which they hold as long as they live.
    """

    def __init__(
        self,
        program: LocalCommand,
        environ: Mapping[str, str],
        devices: Sequence[str],
        folder: StateDir,
        lock: int,
    ) -> None:
        self._program = program
        self._environ = {**program.environ, **environ, names.ENV_ADDRESS: ADDRESS}
        self._devices = devices
        self._folder = folder
        self._lock = lock
        self._processes: dict[int, Process] = {}
        self._dismissed: set[int] = set()

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks whose agents have not ended, or not been asked about yet."""
        return frozenset(self._processes)

    def start(self, rank: int) -> None:
        """Start the agent of `rank`."""
        environ = {**self._environ, names.ENV_REPLICA: str(rank)}
        if self._devices:
            environ["CUDA_VISIBLE_DEVICES"] = self._devices[rank]
        # -P: what lies in the user's folder must not be taken for a library.
        command = [sys.executable, "-P", "-m", "adascale_worker.agent", "--", *self._program.command]
        log = self._folder.replica_log(rank).absolute()
        self._processes[rank] = Process(command, environ, log, [self._lock], self._program.cwd)

    def dismiss(self, rank: int) -> None:
        """Ask the agent of `rank` to save and leave."""
        if rank in self._processes and rank not in self._dismissed:
            self._dismissed.add(rank)
            self._processes[rank].terminate()

    def ended(self) -> list[AgentExit]:
        """The agents that have ended since the last time."""
        gone = []
        for rank, process in sorted(self._processes.items()):
            code = process.exit_code
            if code is not None:
                gone.append(AgentExit(rank, code, rank in self._dismissed))
                del self._processes[rank]
                self._dismissed.discard(rank)
        return gone

    def last_lines(self, rank: int, lines: int = 20) -> str:
        """What the replica of `rank` wrote last."""
        return tail(self._folder.replica_log(rank), lines)

    def leave(self, hurry: Callable[[], bool], while_waiting: Callable[[], None]) -> list[AgentExit]:
        """Ask all to save and leave, and wait for it.

        Args:
            hurry: whether to wait no longer.
            while_waiting: called again and again meanwhile.

        Returns:
            those that had to be ended.
        """
        for rank in self.ranks:
            self.dismiss(rank)
        give_up = time.monotonic() + LEAVE_TIMEOUT
        while True:
            self.ended()
            if not self._processes:
                return []
            if hurry() or time.monotonic() > give_up:
                return self.kill()
            while_waiting()
            time.sleep(0.05)

    def kill(self) -> list[AgentExit]:
        """End all at once; those that it hit."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(LEAVE_TIMEOUT)
        return self.ended()
