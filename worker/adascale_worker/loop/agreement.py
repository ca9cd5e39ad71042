"""The agreement of the replicas on what to do between two steps.

Each replica requests, the requests of all replicas are summed in AdaScale's all-reduce, and all replicas
read the same sums after the same step. So they save, exit or replan at the same step, without a collective
call for it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, fields
from typing import Final

from adascale_core.performance.slow_replica import SlowReplica, slow_replica
from adascale_worker.batches.planning import BatchPlanner
from adascale_worker.gradients.compute_timer import ComputeTimer
from adascale_worker.loop.finish_request import FinishRequest
from adascale_worker.membership.generations import Membership
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.shutdown_request import ShutdownRequest
from adascale_worker.program.optimizer_set import Optimizers
from adascale_worker.program.weight_checks import WeightComparison
from adascale_worker.state.checkpoints.checkpointing import Checkpointing


@dataclass(frozen=True)
class Requests:
    """What one replica requests."""

    exit: bool  # save and exit at the next step boundary
    save: bool = False  # save a checkpoint at the next step boundary
    replan: bool = False  # choose the batch plan again at the end of the epoch
    # exchange requests on every step, because steps are slow. Otherwise they are exchanged on the steps
    # that AdaScale measures.
    agree_each_step: bool = False
    finish: bool = False  # end training at the next step boundary
    compare_weights: bool = False  # compare the weights of the replicas after this step
    change: bool = False  # enter a newer generation at the next step boundary
    is_unsaved: bool = False  # no request: the last checkpoint that this replica has begun is not saved yet

    def flags(self) -> tuple[float, ...]:
        """Return the requests as numbers to be summed over the replicas."""
        return tuple(map(float, astuple(self)))


REQUESTS: Final = len(fields(Requests))
"""Number of requests of a replica."""


@dataclass
class Agreement:
    """What all replicas do. See `Requests` for the attributes.

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
        """Add the summed requests of all replicas."""
        if sums is not None:
            (
                exit_sum,
                save_sum,
                replan_sum,
                agree_each_step_sum,
                finish_sum,
                compare_sum,
                change_sum,
                unsaved_sum,
            ) = sums
            self.exit = self.exit or exit_sum > 0
            self.save = self.save or save_sum > 0
            self.replan = self.replan or replan_sum > 0
            self.agree_each_step = agree_each_step_sum > 0
            self.finish = self.finish or finish_sum > 0
            self.compare_weights = self.compare_weights or compare_sum > 0
            self.change = self.change or change_sum > replicas - 0.5
            self.is_unsaved = unsaved_sum > 0


@dataclass(eq=False)
class StepAgreement:
    """What this replica requests, and what all replicas have agreed on."""

    optimizer: Optimizers  # exchanges the requests in its all-reduce
    group: ReplicaGroup
    # planner, checkpointing, comparison: rank 0 requests what is due
    planner: BatchPlanner
    checkpointing: Checkpointing
    comparison: WeightComparison
    # measures how long this replica computes in a step. With the requests, the replicas exchange these
    # times.
    compute: ComputeTimer
    finish_request: FinishRequest  # whether the program has called `finish`
    shutdown_request: ShutdownRequest  # whether this replica was requested to save and exit
    membership: Membership | None  # whether a newer generation is there. None without an agent.
    agreed: Agreement = field(default_factory=Agreement, init=False)
    # the rank that is slower than the others; None if none is
    slow: SlowReplica | None = field(default=None, init=False)
    # whether steps take so long that requests are exchanged in each
    steps_are_slow: bool = field(default=True, init=False)

    def begin_generation(self) -> None:
        """Begin with other replicas, which have agreed on nothing yet."""
        self.agreed = Agreement()
        self.slow = None

    def flags(self) -> tuple[float, ...]:
        """Return what this replica requests, as numbers to be summed over the replicas.

        They are followed by two numbers for each replica, the time in which it computes and the error of that
        time. The others add 0.
        """
        times, first, typical = [0.0] * 2 * self.group.replicas, 2 * self.group.rank, self.compute.typical
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
        """Return what this replica requests. Some requests are made by rank 0 only."""
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
