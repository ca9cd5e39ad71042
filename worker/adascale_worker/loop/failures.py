"""What an error of the program, a lack of memory or a step that does not end means for the replicas."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from types import TracebackType

from adascale_core.failures import EXIT_OUT_OF_MEMORY, EXIT_PEER_LOST
from adascale_core.messages.channel import Limited, Stalled
from adascale_worker.gradients.step_failure import is_out_of_memory, kind_of, release_memory
from adascale_worker.loop.context import Context
from adascale_worker.loop.replica import Replica
from adascale_worker.loop.step_watchdog import Stall
from adascale_worker.loop.steps import StepStrategy
from adascale_worker.process.exit import end_process
from adascale_worker.process.user_code import raising_line
from adascale_worker.program.program_loop import ProgramLoop, ProgramPlace
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
        self._limit: int | None = None

    @property
    def awaits_retry(self) -> bool:
        """Whether the samples of a discarded step follow in smaller batches, without another generation."""
        return self._limit is not None

    def take_limit(self) -> int | None:
        """Return the limit of the local batch size for these samples, once."""
        limit, self._limit = self._limit, None
        return limit

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
            self._limit = limit
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

    steps: StepStrategy

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
            if self.steps.counter.has_stepped or self.device.type == "cpu":
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
        if self.channel is None or not isinstance(error, Exception) or not self._is_training():
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

    def _is_training(self) -> bool:
        """Whether the program makes steps, in the trainer's loop, which an error has ended, or in its own."""
        return self.loop.place is ProgramPlace.LEFT or (self.loop.number == 0 and self.program.model.training)

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
