"""The trainers of a replica of several processes, except the first, which communicates with the agent.

They run the same program, and end with the first: none of them can continue without the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO

from adascale_core.failures.exit_codes import EXIT_FINISHED, EXIT_PEER_LOST, EXIT_REENTRY
from adascale_core.names import ENV_AGENT_SOCKET, ENV_LOCAL_RANK
from adascale_worker.agent.trainer_starter import Child

FINISH_GRACE = 10.0
"""Seconds that the other processes of a replica have to end after the first has ended without an error."""
INTENDED = (EXIT_FINISHED, EXIT_REENTRY)
"""Exit codes with which all processes of a replica end by themselves, each after its own exit functions."""
_CONSEQUENCES = (0, EXIT_PEER_LOST, -signal.SIGKILL)
"""Exit codes of processes that end because another one has ended."""


class FollowerProcesses:
    """The processes 1 to G-1 of a replica."""

    def __init__(
        self,
        start: Callable[[Mapping[str, str]], Child],
        environ: Mapping[str, str],
        count: int,
        forward: Callable[[IO[str]], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._on_failure = on_failure
        self._killing = threading.Lock()
        """Held while a process is killed or reaped."""
        self._processes: list[Child] = []
        self._threads: list[threading.Thread] = []
        own = {name: value for name, value in environ.items() if name != ENV_AGENT_SOCKET}
        self._processes += [start({**own, ENV_LOCAL_RANK: str(process)}) for process in range(1, count)]
        for each in self._processes:
            assert each.stdout is not None
            for target, argument in ((forward, each.stdout), (self._wait, each)):
                thread = threading.Thread(
                    target=target, args=[argument], name="adascale-follower", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    @property
    def process_ids(self) -> list[int]:
        """Their process ids, in order."""
        return [each.pid for each in self._processes]

    def exit_code(self, first: int) -> int:
        """Return the exit code of the replica, after all processes have ended."""
        if first not in _CONSEQUENCES:
            return first
        codes = [each.returncode for each in self._processes]
        return next(
            (code for code in codes if code not in _CONSEQUENCES), first or next(filter(None, codes), 0)
        )

    def kill(self) -> None:
        """Kill those that run, and what else is in their process groups."""
        with self._killing:
            for each in self._processes:
                if each.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each.pid, signal.SIGKILL)

    def end(self, grace: float, output_timeout: float) -> None:
        """Wait until they have ended, and kill them after `grace` seconds."""
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(each.returncode is None for each in self._processes):
            time.sleep(0.01)
        self.kill()
        for thread in self._threads:
            thread.join(output_timeout)

    def _wait(self, process: Child) -> None:
        with contextlib.suppress(ChildProcessError):
            # Until it is reaped, its process id cannot be reused.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with self._killing:
            process.wait()
        if process.returncode not in INTENDED:
            self._on_failure()
