"""Finds a step that does not end, and the replica that the others wait for.

A thread of each trainer compares the time since the last step with the steps before. If it is far longer, it
reports where the main thread is: a replica that waits in a collective call says so, and a replica that is
elsewhere is behind and prints its stack. With a step timeout, the replica that is behind ends its process.
The others keep the state and continue, and the process that replaces it gets the state from them, or from the
last checkpoint if no other replica has it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from adascale_core.failures import EXIT_SINGLE_REPLICA
from adascale_core.names import WAITS_FOR_OTHERS
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.exit import end_process
from adascale_worker.process.user_code import is_own, location
from adascale_worker.program.program_loop import ProgramLoop
from adascale_worker.reporting.progress import StepTimer

WARN_AFTER = 30.0
"""Seconds without a step after which it is reported, at least..."""
WARN_FACTOR = 10.0
"""...and multiples of the median step time."""
EXPLAIN_AFTER = 5.0
"""Seconds without a step after which a replica that waits for others looks for the reason."""
POLL_INTERVAL = 1.0
"""Seconds between two checks of the main thread."""
WAITING_FACTOR = 1.5
"""A replica that only waits for the others ends its process after this multiple of the step timeout."""

_COLLECTIVE_MODULES = (
    "torch.autograd",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.cuda.streams",
    "adascale_worker",
)
"""Modules whose functions wait for other replicas, on a GPU for kernels that do. Others that they call, such
as a data set, do not."""


@dataclass(frozen=True)
class Stall:
    """A step that does not end."""

    seconds: float  # since the last step
    line: str  # of the program, as in `train.py, line 41, in load`
    waiting: bool  # whether this replica waits for another one

    def __str__(self) -> str:
        return WAITS_FOR_OTHERS if self.waiting else f"is at {self.line}"


class StepWatchdog:
    """Observes the main thread, which calls the constructor."""

    def __init__(
        self,
        timer: StepTimer,
        loop: ProgramLoop,
        group: ReplicaGroup,
        timeout: float | None,  # seconds without a step after which the process ends
        # Why the step of a replica that waits for others cannot end; None if it may. Called in the thread.
        explain: Callable[[], str | None] = lambda: None,
        # Called in the thread with a stall, and with None when a step ends it.
        report: Callable[[Stall | None], None] = lambda _: None,
    ) -> None:
        self._timer = timer
        self._loop = loop
        self._group = group
        self._timeout = timeout
        self._explain = explain
        self._report = report
        self._main = threading.get_ident()
        self._pid = os.getpid()
        self._stopped = threading.Event()
        self._position: tuple[int, bool] | None = None
        self._since = time.monotonic()
        self._stall: Stall | None = None

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, name="adascale-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread. May be called again."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_INTERVAL):
            if os.getpid() == self._pid:
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Check whether the main thread has made a step, at a time of a monotonic clock."""
        position = (self._timer.steps, self._timer.is_running or self._loop.trains)
        if position != self._position or not position[1]:
            self._position, self._since = position, now
            self._end_stall()
            return
        seconds = now - self._since
        if seconds >= EXPLAIN_AFTER and self._find(seconds).waiting:
            self._end_if_explained()
        if not self._is_long(seconds):
            return
        stall = self._find(seconds)
        if self._stall is None:
            self._print(stall)
            self._report(stall)
        self._stall = stall
        self._enforce_timeout(stall)

    def _end_if_explained(self) -> None:
        failure = self._explain()
        if failure is not None:
            # The main thread does not return from the collective call.
            end_process(EXIT_SINGLE_REPLICA, failure)

    def _is_long(self, seconds: float) -> bool:
        if self._timeout is not None and seconds >= self._timeout:
            return True
        return seconds >= WARN_AFTER and seconds >= WARN_FACTOR * self._timer.recent_median

    def _find(self, seconds: float) -> Stall:
        frame = sys._current_frames().get(self._main)
        module = frame.f_globals.get("__name__", "") if frame is not None else ""
        waiting = self._group.replicas > 1 and module.startswith(_COLLECTIVE_MODULES)
        while frame is not None and is_own(frame) and frame.f_back is not None:
            frame = frame.f_back
        return Stall(
            seconds, "" if frame is None else f"{location(frame)}, in {frame.f_code.co_name}", waiting
        )

    def _print(self, stall: Stall) -> None:
        name, seconds = f"rank {self._group.rank}", f"{stall.seconds:.0f} s"
        if stall.waiting:
            text = f"adascale: no step for {seconds}: {name} waits for the others, at {stall.line}\n"
        else:
            stack = "".join(_stack(self._main))
            text = f"adascale: no step for {seconds}: {name} is at {stall.line}. Its stack:\n{stack}"
        sys.stderr.write(text)
        sys.stderr.flush()

    def _enforce_timeout(self, stall: Stall) -> None:
        if self._timeout is None:
            return
        if stall.seconds < self._timeout * (WAITING_FACTOR if stall.waiting else 1.0):
            return
        sys.stderr.write(
            f"adascale: rank {self._group.rank} has made no step for {stall.seconds:.0f} s, and the step "
            f"timeout is {self._timeout:g} s: ending its process. It was at {stall.line}\n"
        )
        sys.stderr.flush()
        # As a kill from outside does: the main thread does not return to Python.
        os.kill(os.getpid(), signal.SIGKILL)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall = None
            sys.stderr.write(f"adascale: rank {self._group.rank} continues\n")
            sys.stderr.flush()
            self._report(None)


def _stack(thread: int) -> list[str]:
    frame: FrameType | None = sys._current_frames().get(thread)
    return [] if frame is None else traceback.format_stack(frame)
