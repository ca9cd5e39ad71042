"""The agreement of the replicas on what to do between two steps.

Each replica requests, the requests of all replicas are summed in AdaScale's all-reduce, and all replicas
read the same sums after the same step. So they save, exit or replan at the same step, without a collective
call for it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Requests:
    """What one replica requests.

    Args:
        exit: save and exit at the next step boundary.
        change: enter a newer generation at the next step boundary.
        save: save a checkpoint at the next step boundary.
        replan: choose the batch plan again at the end of the epoch.
        agree_each_step: exchange requests on every step, because steps are slow. Otherwise they are
            exchanged on the steps that AdaScale measures.
        finish: end training at the next step boundary.
        compare_weights: compare the weights of the replicas after this step.
        is_unsaved: no request: the last checkpoint that this replica has begun is not saved yet.
    """

    exit: bool
    save: bool = False
    replan: bool = False
    agree_each_step: bool = False
    finish: bool = False
    compare_weights: bool = False
    change: bool = False
    is_unsaved: bool = False

    def flags(self) -> tuple[float, ...]:
        """Return the requests as numbers to be summed over the replicas."""
        return tuple(map(float, astuple(self)))


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
        """Add the summed requests of all replicas.

        Args:
            sums: None if this step had no exchange.
            replicas: number of replicas.
        """
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
