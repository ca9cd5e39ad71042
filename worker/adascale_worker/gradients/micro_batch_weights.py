"""How much each micro-batch of a step weighs, for a loss that is a mean over a varying number.

The mean over valid tokens is an example. With w_ij the tokens of micro-batch j on replica i, and g_ij the
gradient of their mean loss, the gradient of the whole batch is sum(w_ij g_ij) / sum(w_ij), and not the mean
of g_ij. So `ElasticTrainer.weighted` multiplies the loss by w_ij / s. The exchange then gives the mean over
the replicas of the sums over micro-batches, which is divided by sum(w_ij) / (s replicas). The divisor s is
the same on all replicas. It is near the mean weight, for the range of float16, and a power of two, so that
results do not depend on it.

All micro-batches have a weight, or none has. The replicas agree on that in the first step of a generation
that has gradients: without weights, nothing is exchanged later. A replica that finds a mixture of its own
does not take part in the exchange, as it may have made fewer backward passes. Its error ends the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from adascale_core.batch.plans import BatchPlan
from adascale_worker.errors import WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.scaling.statistics.steps import StepWeights

_REMEDY = (
    "Compute the loss of every micro-batch as trainer.weighted(loss, weight) before backward(), also of one "
    "without valid tokens, with a weight of 0"
)


_Sums = tuple[float, float, float, float]
"""Sums over micro-batches: of their weights, and of how many were weighted, above 0, and not weighted.

Of those of a replica, each process has its parts; the leader counts which are above 0.
"""


class MicroBatchWeights:
    """The weights of the micro-batches of a step."""

    # A micro-batch is divided among the G processes of a replica, and each weighs its part. With w_ij the
    # weight of process j in micro-batch i, FSDP has computed the mean over j of w_ij g_ij / s, so that the
    # replica's micro-gradient has the weight sum_j(w_ij) / (s G).

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._plan = BatchPlan(1, 1)
        """Of all processes."""
        self._unit: float | None = None
        """The approximate weight of a sample. None until a step has weights."""
        self._next_unit: float | None = None
        self._are_used: bool | None = None
        """Whether the steps of this generation have weights; None before the first."""
        self._earlier: _Sums = (0.0, 0.0, 0.0, 0.0)
        """The sums of the earlier micro-batches of this step."""
        self.left_out = 0
        """How many micro-batches of this step are left out, on each replica."""
        self._weight: float | None = None
        """The weight of the present micro-batch, after its first weighted backward pass."""
        self._is_positive = self._has_unweighted_pass = False
        self._is_inside_pass = self._is_weighted_pass = False
        self._unagreed: Sequence[float] | None = None
        """The sums of the last step, if its replicas have not exchanged them."""
        self._exchanged: StepWeights | None = None
        """The weights of the step, once they are exchanged, which is in its last micro-batch."""
        self.factor = 1.0
        """The factor by which the loss of the present micro-batch is multiplied."""
        self.total: float | None = None
        """The sum of the weights of the last step that has exchanged them, over all replicas."""

    # -- the replicas and their batches -------------------------------------------------------------------

    def set_plan(self, plan: BatchPlan) -> None:
        """Use the micro-batches of `plan` from the next step on."""
        self._plan = plan.per_process(self._group.processes)

    @property
    def _micro_batches(self) -> int:
        """Micro-batches of a step of all processes."""
        return self._plan.replicas * self._plan.accumulation

    def begin_generation(self) -> None:
        """Agree again, with other replicas. A collective call."""
        self._are_used = self._unagreed = None
        # A replica that joins does not know the unit.
        self._unit = max(self._group.gather(self._unit or 0.0)) or None

    # -- the program --------------------------------------------------------------------------------------

    def weighted(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """Return the loss of a micro-batch, times a factor in proportion to `weight`."""
        number = float(weight)
        if not (math.isfinite(number) and number >= 0.0):
            raise WorkerError(
                f"trainer.weighted() got weight={number!r}: it must be a finite number of at least 0, such "
                "as the number of valid tokens in the batch"
            )
        if self._are_used is False:
            raise WorkerError(
                f"trainer.weighted() was called, but the steps before were made without weights. {_REMEDY}"
            )
        result = loss * self._factor_of(number)
        if result.requires_grad:
            result.register_hook(lambda _: self._enter_weighted_pass(number))
        return result

    def _factor_of(self, weight: float) -> float:
        if self._micro_batches == 1:
            return float(weight > 0.0)  # The gradient of the step does not depend on it.
        return weight / self._scale

    @property
    def _scale(self) -> float:
        """The divisor of all weights (s)."""
        return 2.0 ** round(math.log2((self._unit or 1.0) * self._plan.local_bsz))

    # -- backward passes ----------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin a backward pass."""
        self._is_inside_pass, self._is_weighted_pass = True, False

    def _enter_weighted_pass(self, weight: float) -> None:
        """Record that the pass is of a weighted loss. Called before gradients of parameters arrive."""
        if not self._is_inside_pass:
            return  # torch.autograd.grad calls the same hook.
        if self._weight is not None and self._weight != weight:
            raise WorkerError(
                f"trainer.weighted() got the weights {self._weight:g} and {weight:g} for one micro-batch: "
                "all of its losses need the same"
            )
        self._weight, self.factor, self._is_weighted_pass = weight, self._factor_of(weight), True
        self._is_positive = weight > 0.0

    def end_pass(self, *, has_gradients: bool) -> bool:
        """End a backward pass, and return whether it was of a weighted loss. No collective call.

        The passes of a micro-batch have a weight, or none has.
        """
        self._is_inside_pass = False
        self._has_unweighted_pass |= has_gradients and not self._is_weighted_pass
        if self._weight is not None and self._has_unweighted_pass:
            raise self._mixed_here()
        return self._is_weighted_pass

    def of_pass(self) -> float:
        """Return by what the loss of the last backward pass was multiplied, in the mean over the processes.

        A collective call in the replica, except in a generation whose steps have no weights.
        """
        count = self._group.processes
        if count == 1 or self._are_used is False:
            return self.factor
        weight, weighted = self._group.own.sum([self.factor, float(self._is_weighted_pass)])
        if weighted not in (0.0, float(count)):
            raise WorkerError(
                f"trainer.weighted() was used on {weighted:.0f} of the {count} processes of a replica: use "
                "it for the loss of every micro-batch on all of them, or on none"
            )
        self._is_positive = weighted > 0.0 and weight > 0.0 and self._group.own.is_leader
        return weight / count

    # -- the weights of a step ----------------------------------------------------------------------------

    @property
    def of_step(self) -> StepWeights | None:
        """The weights of the step in its last micro-batch; None if each micro-batch counts the same."""
        if self._exchanged is not None or not self.left_out:
            return self._exchanged
        kept = self._plan.accumulation - self.left_out
        return StepWeights(float(kept), kept * self._group.replicas)

    def sums(self) -> tuple[float, ...]:
        """Return the numbers that `agree` sums over the replicas.

        Where micro-batches are weighted, one that is left out has the weight 0.
        """
        weights, weighted, positive, unweighted = self._present()
        return weights, weighted and weighted + self.left_out, positive, unweighted

    def exchange(self) -> None:
        """Exchange the weights of this step, once. A collective call, in the last micro-batch."""
        if self._exchanged is None:
            if self._earlier[1] + self.left_out < self._plan.accumulation - 1:
                raise self._mixed_here()
            self.agree(self._sum(self.sums()))

    def check_step(self) -> None:
        """Check that all micro-batches of this step have a weight, or none has. No collective call."""
        known = self.sums()[1]
        if self._exchanged is None and (self._are_used or known) and known < self._plan.accumulation:
            raise self._mixed_here()

    def exchange_later(self) -> None:
        """Agree that the steps have no weights, if that is not known. A collective call."""
        unagreed, self._unagreed = self._unagreed, None
        if unagreed is not None and self._are_used is not False:
            self.agree(self._sum(unagreed))

    def _sum(self, numbers: Sequence[float]) -> Sequence[float]:
        return self._group.sum(self._group.own.sum(numbers))

    def agree(self, sums: Sequence[float]) -> None:
        """Use the sums over all processes of `sums`."""
        total, weighted, positive, unweighted = sums
        if weighted == unweighted == 0.0:
            return  # No pass has reached the parameters of an optimizer yet, perhaps none in this step.
        if weighted == 0.0 and not self._are_used:
            self._are_used, self.total = False, None
            return
        if weighted != self._micro_batches or unweighted > 0.0:
            raise _mixed(weighted, self._micro_batches, "over all replicas", unweighted)
        self._are_used, self.total = True, total
        processes = self._group.replicas * self._group.processes
        divisor = 1.0 if self._micro_batches == 1 else total / (self._scale * processes)
        # Without any weight the gradient is zero.
        self._exchanged = StepWeights(divisor or 1.0, round(positive))
        if total > 0.0:
            self._next_unit = total / self._plan.global_bsz

    # -- micro-batches ------------------------------------------------------------------------------------

    def begin_micro_batch(self) -> None:
        """Begin with a micro-batch, or begin it again because its gradients were deleted."""
        self._weight = self._exchanged = None
        self.factor = 1.0
        self._is_positive = self._has_unweighted_pass = False

    def finish_micro_batch(self, *, completes_step: bool) -> None:
        """Count a micro-batch."""
        if completes_step:
            self._unagreed = self.sums() if self._exchanged is None else None
            if self._exchanged is not None and self._unit is None:
                self._unit = self._next_unit
            self.restart_step()
        else:
            self._earlier = self._present()
            self.begin_micro_batch()

    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step."""
        self._earlier, self.left_out = (0.0, 0.0, 0.0, 0.0), 0
        self.begin_micro_batch()

    def _present(self) -> _Sums:
        weights, weighted, positive, unweighted = self._earlier
        return (
            weights + (self._weight or 0.0),
            weighted + (self._weight is not None),
            positive + self._is_positive,
            unweighted + self._has_unweighted_pass,
        )

    def _mixed_here(self) -> WorkerError:
        _, weighted, _, unweighted = self._present()
        return _mixed(weighted, self._plan.accumulation, "on this replica", unweighted)


def _mixed(weighted: float, micro_batches: int, where: str, unweighted: float) -> WorkerError:
    """Return the error of a step of which only some micro-batches have a weight."""
    others = ", and some have made another backward pass without it" if unweighted else ""
    return WorkerError(
        f"trainer.weighted() was used in {weighted:.0f} of the {micro_batches} micro-batches of a step, "
        f"{where}{others}. {_REMEDY}"
    )
