"""The agreement of the replicas on what to do between two steps.

Each replica requests, the requests of all replicas are summed in AdaScale's all-reduce, and all replicas
read the same sums after the same step. So they save, exit or replan at the same step, without a collective
call for it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, fields
from typing import Final

from adascale_core.performance.slow_replica import SlowReplica, slow_replica
from adascale_worker.errors import WorkerError
from adascale_worker.loop.context import Context
from adascale_worker.membership.board import Board
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.user_code import calling_line
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.state.state import State

FINISH = "finish"
"""The event that a replica announces when it has called `finish`."""
FINISH_TIMEOUT = 30.0
"""Seconds that a replica which has called `finish` and ends waits for the others to call it."""


class FinishRequest:
    """The request to end training, which is ended after the next step for which the replicas agree."""

    def __init__(self, progress: TrainingProgress, group: ReplicaGroup, state: State) -> None:
        self._progress = progress
        self._group = group
        self._board = Board(group)
        self._state = state
        self._line = ""
        self.reason: str | None = None  # None without a request

    def make(self, reason: str) -> None:
        """Request the end of training."""
        self._state.require_finite_weights()
        self.reason, self._line = reason, calling_line()
        self._board.announce(FINISH)
        self.save()

    def save(self) -> None:
        """Save the end of training on rank 0, because the program may end before the next step."""
        progress = self._progress
        progress.finish_reason = self.reason
        self._state.save_on_rank_0()
        progress.finish_reason = None

    def agree(self) -> None:
        """Finish training on all replicas, for the reason of one of them. A collective call."""
        reasons = self._group.gather(self.reason)
        self._progress.finish_reason = next(reason for reason in reasons if reason is not None)

    def end_alone(self) -> WorkerError | None:
        """Return an error if another replica has not called `finish`, and still trains."""
        group = self._group
        if group.replicas == 1:
            return None
        missing = [rank for rank in range(group.replicas) if rank != group.rank]
        # Also of replicas that are lost, because their programs have ended.
        for (finished,) in self._board.poll(FINISH, timeout=FINISH_TIMEOUT, is_over=lambda: False):
            missing = [rank for rank in range(group.replicas) if rank not in finished]
            if not missing:
                return None
        if self._board.read(FINISH) is None and not (group.processes > 1 and group.has_failed):
            # The process that serves the store ends after it has seen all the others. With several processes
            # a replica reads nothing any more once others are lost.
            return None
        # In place of the checkpoint of `finish`, which says that training is finished.
        self._state.save_on_rank_0()
        return WorkerError(
            f"rank {group.rank} called trainer.finish ({self._line}) and left its loop, but rank "
            f"{', '.join(map(str, missing))} did not call it. After trainer.finish(reason) on some of the "
            "replicas, continue the loop: trainer.finished becomes true and trainer.dataloader ends on all "
            "of them after the same step. To leave the loop at once, call trainer.finish on all replicas"
        )


@dataclass(frozen=True)
class Requests:
    """What one replica requests for the next step boundary."""

    exit: bool  # save and exit
    save: bool = False  # save a checkpoint
    replan: bool = False  # choose the batch plan again at the end of the epoch
    # Exchange requests in every step, because steps are slow. Otherwise they are exchanged in the steps that
    # AdaScale measures.
    agree_each_step: bool = False
    finish: bool = False  # end training
    compare_weights: bool = False  # compare the weights of the replicas
    change: bool = False  # enter a newer generation
    is_unsaved: bool = False  # no request: the last checkpoint that this replica has begun is not saved yet

    def flags(self) -> tuple[float, ...]:
        """Return the requests as numbers to be summed over the replicas."""
        return tuple(map(float, astuple(self)))


REQUESTS: Final = len(fields(Requests))
"""Number of requests of a replica."""


@dataclass
class Agreement:
    """What the replicas have agreed on. See `Requests` for the attributes.

    A request of any replica counts, except for `change`, which all replicas have to request: a replica that
    does not know of the newer generation yet would keep the others waiting.
    """

    exit: bool = False
    save: bool = False
    replan: bool = False
    agree_each_step: bool = True
    finish: bool = False
    compare_weights: bool = False
    change: bool = False
    is_unsaved: bool = True

    def update(self, sums: tuple[float, ...] | None, replicas: int) -> None:
        """Add the summed requests of all replicas; None if the step had no exchange."""
        if sums is not None:
            summed = dict(zip((each.name for each in fields(Requests)), sums, strict=True))
            self.exit = self.exit or summed["exit"] > 0
            self.save = self.save or summed["save"] > 0
            self.replan = self.replan or summed["replan"] > 0
            self.agree_each_step = summed["agree_each_step"] > 0
            self.finish = self.finish or summed["finish"] > 0
            self.compare_weights = self.compare_weights or summed["compare_weights"] > 0
            self.change = self.change or summed["change"] > replicas - 0.5
            self.is_unsaved = summed["is_unsaved"] > 0


@dataclass(eq=False, kw_only=True)
class StepAgreement(Context):
    """What this replica requests, and what all replicas have agreed on.

    The optimizer exchanges the requests in its all-reduce, together with the times of computation.
    """

    agreed: Agreement = field(default_factory=Agreement, init=False)
    slow: SlowReplica | None = field(default=None, init=False)  # None if no replica is slower than the others
    steps_are_slow: bool = field(default=True, init=False)

    def begin_generation(self) -> None:
        """Begin with other replicas, which have agreed on nothing yet."""
        self.agreed = Agreement()
        self.slow = None

    def flags(self) -> tuple[float, ...]:
        """Return what this replica requests, as numbers to be summed over the replicas.

        They are followed by two numbers for each replica: the time for which it computes in a step, and the
        error of that time. The others add 0.
        """
        group, typical = self.group, self.times.compute.typical
        times, first = [0.0] * 2 * group.replicas, 2 * group.rank
        times[first : first + 2] = typical.seconds, typical.error
        return (*self._requests().flags(), *times)

    def withdraw(self) -> None:
        """Replace requests that are fulfilled, so that the next all-reduce does not sum them again."""
        self.optimizer.flags = self.flags()

    def exchange(self, flags: tuple[float, ...]) -> None:
        """Agree after a step. A collective call if steps are slow, and the step had no all-reduce."""
        sums = None if self.group.processes > 1 else self.optimizer.flags_sum
        if sums is None and (self.agreed.agree_each_step or self.group.processes > 1):
            # AdaScale does not measure every step, and the next measured one may be a minute away. Of a
            # replica of several processes, the first requests, and the others learn it here.
            sums = self.group.sum(flags)
        self.agreed.update(sums[:REQUESTS] if sums is not None else None, self.group.replicas)
        if sums is not None:
            self.checkpointing.is_unsaved = self.agreed.is_unsaved
            self.slow = slow_replica(sums[REQUESTS::2], sums[REQUESTS + 1 :: 2], self.slow)

    def _requests(self) -> Requests:
        """Return what this replica requests. What becomes due with time is requested by rank 0 only."""
        signaled, membership = self.shutdown_request.is_made, self.membership
        if signaled and membership is not None:
            membership.report_terminated()
        finish = self.finish_request.reason is not None
        change = membership is not None and membership.change_is_pending
        if not self.group.is_main:
            return Requests(exit=signaled, finish=finish, change=change)
        return Requests(
            exit=signaled,
            change=change,
            save=self.checkpointing.is_due,
            replan=self.planner.is_due,
            agree_each_step=self.steps_are_slow,
            finish=finish,
            compare_weights=self.comparison.is_due,
            is_unsaved=self.checkpointing.last_is_unsaved,
        )
