"""What an error of the program, a lack of memory or a step that does not end means for the replicas.

A thread of each trainer observes its main thread. If the time since the last step is far longer than that of
the steps before, it reports where the main thread is: a replica that waits in a collective call says so, and
a replica that is elsewhere is behind and prints its stack. With a step timeout, the replica that is behind
ends its process. The others keep the state and continue, and the process that replaces it gets the state from
them, or from the last checkpoint if no other replica has it.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType

import torch

from adascale_core.failures import EXIT_OUT_OF_MEMORY, EXIT_PEER_LOST, EXIT_REENTRY, EXIT_SINGLE_REPLICA
from adascale_core.messages.channel import Limited, Stalled
from adascale_core.names import WAITS_FOR_OTHERS
from adascale_worker.gradients.step_failure import is_out_of_memory, kind_of, release_memory
from adascale_worker.loop.context import Context
from adascale_worker.process import environment
from adascale_worker.process.exit import end_process
from adascale_worker.process.user_code import is_own, location, raising_line
from adascale_worker.program.program_loop import ProgramPlace
from adascale_worker.torch_private.distributed import is_lost_peer

WARN_AFTER = 30.0
"""Seconds without a step after which it is reported, at least..."""
WARN_FACTOR = 10.0
"""...and multiples of the median step time."""
EXPLAIN_AFTER = 5.0
"""Seconds without a step after which a replica that waits for others looks for the reason."""
POLL_INTERVAL = 0.5
"""Seconds between two checks of the main thread, and of the other processes of the replica."""
CHECKS = 10
"""Number of checks in succession that must find the main thread waiting at the same place, after members were
lost. No duration is measured, because time passes also while the process is frozen."""
_MAX_CPU_TIME = 0.01
"""Seconds of processor time between two checks, below which a thread waits."""
WAITING_FACTOR = 1.5
"""A replica that only waits for the others ends its process after this multiple of the step timeout."""

_DEVICE_MODULE = "torch.cuda.streams"
"""Its functions wait for the kernels of a GPU, of which one may wait for others. CUDA may use the processor
while it waits."""
_COLLECTIVE_MODULES = (
    _DEVICE_MODULE,
    "torch.autograd",
    "torch.distributed",
    "torch.nn.parallel",
    "adascale_worker.gradients",
    "adascale_worker.membership.process_group",
    "adascale_worker.scaling.statistics",
)
"""Modules whose functions wait for other replicas. Others that they call, such as a data set, do not."""

MAX_REASON = 200
"""Characters of torch's own message about a lack of memory that are printed."""


class Failures(Context):
    """Recognizes that a batch does not fit into memory, ends a program that fails, and explains steps that do
    not end, in a thread that observes the main thread, which calls the constructor.
    """

    watches_steps = False
    """Whether it explains steps."""

    limit: int | None = None
    """Of the local batch size, with which the samples of a discarded step follow; None if none do."""
    _position: tuple[int, bool] | None = None
    _since = float("-inf")
    _is_stalled = False

    def __init__(self, known: Context) -> None:
        super().__init__(known)
        self._step_timeout = environment.read_step_timeout(os.environ) or math.inf
        self._main = threading.current_thread()
        self._is_stopped = threading.Event()
        self._waits_at: object = None
        """Where the main thread was at the last check after members were lost, if it may wait for them."""
        self._used, self._checks = 0.0, 0

    # -- a lack of memory ---------------------------------------------------------------------------------

    def limits_batches_after(self, error: BaseException) -> bool:
        """Whether `error` means that a batch does not fit, and its samples can follow in smaller batches."""
        if not self.loop.has_batch or (self.group.replicas > 1 and not self.group.is_elastic):
            return False
        if self.group.has_mesh:
            # A batch that does not fit into the memory of one process of several ends its replica: its
            # collective calls would not be those of the other processes.
            return False
        limit = self._limit_after(error)
        if limit is None:
            return False
        if self.group.is_elastic:
            self.group.fail()
        else:
            self.limit = limit
        return True

    def _limit_after(self, error: BaseException) -> int | None:
        """Report and return the limit after an error; None if it has another cause, or none is left."""
        if not is_out_of_memory(error):
            return None
        planner, device = self.planner, kind_of(self.device)
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
        self.channel.send(Limited(limit))
        return limit

    # -- the end of a program that fails ------------------------------------------------------------------

    def end_after(self, error: BaseException, trace: TracebackType | None) -> int | None:
        """Print what an error means that another process continues after, and return the exit code for it;
        None for any other error."""
        line = raising_line(trace)
        if is_lost_peer(error):
            if self.group.is_elastic:
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

    def _leave_short_of_memory(self, error: BaseException, trace: TracebackType | None) -> bool:
        """Prepare the end of the process after an error of the program that the lack of memory has caused.

        With an agent, another process continues with smaller batches, from the state of the others. Rank 0
        saves its state, because the batch may have been too large for all of them.
        """
        # An error has ended the trainer's loop.
        is_training = self.loop.place is ProgramPlace.LEFT
        if not self.group.is_elastic or not isinstance(error, Exception) or not is_training:
            return False
        if not self.failure.lacks_memory and self._limit_after(error) is None:
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

    # -- the thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Observe the main thread, and the other processes of this replica."""
        # In two threads: a read of a store that does not answer must not delay what ends a stuck process.
        threads = {"watchdog": self._watch_steps, "stuck-collective": self._watch_members}
        for name, target in threads.items():
            threading.Thread(target=target, name=f"adascale-{name}", daemon=True).start()

    def stop(self) -> None:
        """Do not observe them any more. May be called again."""
        self._is_stopped.set()

    def _watch_steps(self) -> None:
        while not self._is_stopped.wait(POLL_INTERVAL) and self._main.is_alive():
            if self.watches_steps:
                self.look(time.monotonic())

    def _watch_members(self) -> None:
        timeout = self.group.peer_timeout
        checks = max(int(timeout / POLL_INTERVAL), 2) if math.isfinite(timeout) else 0
        while not self._is_stopped.wait(POLL_INTERVAL) and self._main.is_alive():
            self._end_if_stuck()
            frozen = self.group.own.find_frozen(checks)
            if frozen is not None:
                # The main thread waits for the other process.
                end_process(
                    EXIT_PEER_LOST,
                    f"process {frozen} of this replica has shown no sign of life for {timeout:g} s: ending "
                    "the replica, so that another one joins the others",
                )

    # -- collective calls that do not end -----------------------------------------------------------------

    def _end_if_stuck(self) -> None:
        """End this process if members are lost, and the main thread stays in a call that waits for them."""
        place, before = self._waiting_place(), self._waits_at
        self._waits_at = place
        self._checks = self._checks + 1 if place is not None and place == before else 0
        if self._checks < CHECKS:
            return
        sys.stderr.write(
            f"adascale: a peer was lost, and the collective call that waited for it has not ended within "
            f"{CHECKS * POLL_INTERVAL:g} s: ending this process, so that another one joins the others\n"
        )
        code = EXIT_PEER_LOST
        self.watches_steps = False  # A step timeout must not end the process while it saves.
        try:
            if self._save_beside():
                code = EXIT_REENTRY
        finally:
            # The main thread does not return to Python.
            end_process(code)

    def _waiting_place(self) -> object:
        """Return where the main thread may wait for members that are lost; None if it does not.

        In a replica of several processes, it may wait for the others of them.
        """
        group = self.group
        if not group.has_failed or group.is_forming or group.processes > 1:
            return None
        before, self._used = self._used, time.clock_gettime(time.pthread_getcpuclockid(self._main.ident or 0))
        frame, module = self._frame()
        if module == _DEVICE_MODULE:
            # While it is kept, no later call has the same frame. It has no tensors.
            return frame
        is_idle = self._used - before < _MAX_CPU_TIME
        if frame is None or not is_idle or not module.startswith(_COLLECTIVE_MODULES):
            return None
        return group.generation, id(frame), frame.f_lasti

    def _save_beside(self) -> bool:
        """Save the state, on a GPU beside a kernel that waits for a lost peer, in a stream of its own."""
        if self.device.type != "cuda":
            return self.state.save_beside()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            return self.state.save_beside()

    def _frame(self) -> tuple[FrameType | None, str]:
        """Return the frame of the main thread, and its module."""
        frame = sys._current_frames().get(self._main.ident or 0)
        return frame, "" if frame is None else str(frame.f_globals.get("__name__", ""))

    # -- steps that do not end ----------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Check whether the main thread has made a step, at a time of a monotonic clock."""
        timer, rank = self.telemetry.step_timer, self.group.rank
        position = (timer.steps, timer.is_running or self.loop.trains)
        if position != self._position or not position[1]:
            self._position, self._since = position, now
            if self._is_stalled:
                self._is_stalled = False
                print(f"adascale: rank {rank} continues", file=sys.stderr, flush=True)
                self.channel.send(Stalled(""))
            return
        seconds = now - self._since
        is_long = seconds >= min(max(WARN_AFTER, WARN_FACTOR * timer.recent_median), self._step_timeout)
        if not is_long and seconds < EXPLAIN_AFTER:
            return
        line, waits = self._place_of_program()
        if waits and seconds >= EXPLAIN_AFTER and (failure := self._explain_stall()) is not None:
            # The main thread does not return from the collective call.
            end_process(EXIT_SINGLE_REPLICA, failure)
        if is_long and not self._is_stalled:
            self._is_stalled = True
            place = f"waits for the others, at {line}" if waits else f"is at {line}. Its stack:"
            frame, _ = self._frame()
            stack = [] if waits or frame is None else traceback.format_stack(frame)
            sys.stderr.write(f"adascale: no step for {seconds:.0f} s: rank {rank} {place}\n{''.join(stack)}")
            sys.stderr.flush()
            self.channel.send(Stalled(WAITS_FOR_OTHERS if waits else f"is at {line}"))
        if seconds >= self._step_timeout * (WAITING_FACTOR if waits else 1.0):
            sys.stderr.write(
                f"adascale: rank {rank} has made no step for {seconds:.0f} s, and the step timeout is "
                f"{self._step_timeout:g} s: ending its process. It was at {line}\n"
            )
            sys.stderr.flush()
            # As a kill from outside does: the main thread does not return to Python.
            os.kill(os.getpid(), signal.SIGKILL)

    def _place_of_program(self) -> tuple[str, bool]:
        """Return where the program is (`train.py, line 41, in load`), and whether it waits for others."""
        frame, module = self._frame()
        waits = self.group.replicas > 1 and module.startswith(_COLLECTIVE_MODULES)
        while frame is not None and is_own(frame) and frame.f_back is not None:
            frame = frame.f_back
        return "" if frame is None else f"{location(frame)}, in {frame.f_code.co_name}", waits

    def _explain_stall(self) -> str | None:
        """Return an error message if the present step cannot end because others have left their loop."""
        if self.loop.is_evaluating or self.group.has_failed:
            return None
        step = self.progress.step
        failure = self.program.trained.find_failure(step)
        if failure is not None or not self.loop.trains:
            return failure
        self.evaluations.announce_training(is_waiting=True)
        return self.departures.find_failure(step)
