"""What an error of the program, a lack of memory or a step that does not end means for the replicas.

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
from types import FrameType, TracebackType

from adascale_core.failures import EXIT_OUT_OF_MEMORY, EXIT_PEER_LOST, EXIT_SINGLE_REPLICA
from adascale_core.messages.channel import Limited, Stalled
from adascale_core.names import WAITS_FOR_OTHERS
from adascale_worker.gradients.step_failure import is_out_of_memory, kind_of, release_memory
from adascale_worker.loop.context import Context, Replica
from adascale_worker.loop.steps import Steps
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.exit import end_process
from adascale_worker.process.user_code import is_own, location, raising_line
from adascale_worker.program.program_loop import ProgramLoop, ProgramPlace
from adascale_worker.reporting.progress import StepTimer
from adascale_worker.torch_private.distributed import is_lost_peer

MAX_REASON = 200
"""Characters of torch's own message about a lack of memory that are printed."""


class MemoryShortage:
    """Recognizes that a batch does not fit into memory, and limits the batches that follow."""

    def __init__(self, replica: Replica, loop: ProgramLoop) -> None:
        self._planner = replica.planner
        self._group = replica.group
        self._device = replica.device
        self._channel = replica.channel
        self._loop = loop
        self.limit: int | None = None
        """Of the local batch size, with which the samples of a discarded step follow; None if none do."""

    def handle(self, error: BaseException) -> bool:
        """Whether `error` means that a batch does not fit, and its samples can follow in smaller batches."""
        if not self._loop.has_batch or (self._channel is None and self._group.replicas > 1):
            return False
        if self._group.has_mesh:
            # A batch that does not fit into the memory of one process of several ends its replica: its
            # collective calls would not be those of the other processes.
            return False
        limit = self.limit_after(error)
        if limit is None:
            return False
        if self._channel is None:
            self.limit = limit
        else:
            self._group.fail()
        return True

    def limit_after(self, error: BaseException) -> int | None:
        """Report and return the limit after an error; None if it has another cause, or none is left."""
        if not is_out_of_memory(error):
            return None
        planner, device = self._planner, kind_of(self._device)
        size, limit = planner.plan.local_bsz, planner.smaller_local_bsz()
        found = f"a local batch of {size} samples does not fit into the memory of {device}"
        if limit is None:
            print(
                f"adascale: {found}, and the bounds allow no smaller one: lower the lower bound of "
                "local_bsz_bounds, or use devices with more memory",
                file=sys.stderr,
            )
            return None
        reason = str(error).partition("\n")[0][:MAX_REASON]
        print(f"adascale: {found}: training continues with at most {limit}. {reason}", file=sys.stderr)
        if self._channel is not None:
            self._channel.send(Limited(limit))
        return limit


@dataclass(eq=False, kw_only=True)
class Failures(Context):
    """Ends a program that fails, and explains steps that do not end. See `process.exit.FailingTraining`."""

    steps: Steps

    def end_after(self, error: BaseException, trace: TracebackType | None) -> int | None:
        """Print what an error means that another process continues after, and return the exit code for it;
        None for any other error."""
        line = raising_line(trace)
        if is_lost_peer(error):
            if self.channel is not None:
                # Without exit functions, which could wait for the lost peer for ever.
                end_process(
                    EXIT_PEER_LOST,
                    "lost the connection to a peer in communication of the program itself; exiting to join "
                    "the next generation",
                )
            # An NCCL error before the first step can mean a wrong configuration.
            if self.steps.has_stepped or self.device.type == "cpu":
                reason = str(error).splitlines()[0]
                print(
                    "adascale: lost the connection to another replica, whose output says why it has ended "
                    f"({line}): {reason}",
                    file=sys.stderr,
                )
                return EXIT_PEER_LOST
        if not self._leave_short_of_memory(error, trace):
            return None
        print(
            f"adascale: {type(error).__name__} was raised outside of the model ({line}), so this process "
            "ends, and another one continues with smaller batches",
            file=sys.stderr,
        )
        return EXIT_OUT_OF_MEMORY

    def announce_failure(self) -> None:
        """Announce that an error of the program ends this replica, and so its loop."""
        self.departures.fail()

    def _leave_short_of_memory(self, error: BaseException, trace: TracebackType | None) -> bool:
        """Prepare the end of the process after an error of the program that the lack of memory has caused.

        With an agent, another process continues with smaller batches, from the state of the others. Rank 0
        saves its state, because the batch may have been too large for all of them.
        """
        # An error has ended the trainer's loop.
        is_training = self.loop.place is ProgramPlace.LEFT
        if self.channel is None or not isinstance(error, Exception) or not is_training:
            return False
        if not self.failure.lacks_memory and self.shortage.limit_after(error) is None:
            return False
        self.group.fail()  # The others need not wait until this process has ended.
        if self.group.is_main and self.group.processes == 1:
            # Else the other processes of this replica are in a collective call.
            traceback.clear_frames(trace)
            release_memory()
            try:
                self.steps.discard()
                self.state.save_alone()
            except (RuntimeError, MemoryError) as failure:
                print(f"adascale: the state was not saved: {failure}", file=sys.stderr)
        return True

    # -- called by the watchdog, in its thread ------------------------------------------------------------

    def explain_stall(self) -> str | None:
        """Return an error message if the present step cannot end because others have left their loop."""
        if self.loop.is_evaluating or self.group.has_failed:
            return None
        step = self.progress.step
        failure = self.program.trained.find_failure(step)
        if failure is not None or not self.loop.trains:
            return failure
        self.evaluations.announce_training(is_waiting=True)
        return self.departures.find_failure(step)

    def report_stall(self, stall: Stall | None) -> None:
        """Report to the agent that no step ends, or that a step has ended."""
        if self.channel is not None:
            self.channel.send(Stalled("" if stall is None else str(stall)))


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
            print(f"adascale: rank {self._group.rank} continues", file=sys.stderr, flush=True)
            self._report(None)


def _stack(thread: int) -> list[str]:
    frame: FrameType | None = sys._current_frames().get(thread)
    return [] if frame is None else traceback.format_stack(frame)
