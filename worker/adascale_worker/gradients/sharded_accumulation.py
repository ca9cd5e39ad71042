"""The micro-batches of a step of a sharded model.

Each backward pass comes alone: `.grad` is this process's shard of the gradient of the replica's micro-batch,
which is read for the statistics, and added to the shards of the earlier micro-batches. After the last pass
the sum is averaged over the lanes.

A micro-batch is divided among the processes of a replica, and each weighs its part. With w_ij the weight of
process j in micro-batch i, FSDP has computed the mean over j of w_ij g_ij / s, so that the replica's
micro-gradient has the weight sum_j(w_ij) / (s G); see `micro_batch_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adascale_core.batch.plans import BatchPlan
from adascale_worker.errors import WorkerError
from adascale_worker.gradients.accumulation import GradientAccumulation
from adascale_worker.gradients.micro_batch_weights import MicroBatchWeights
from adascale_worker.gradients.sharded_model import ShardedModel, shards_of
from adascale_worker.gradients.step_division import StepDivision
from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.membership.lane_group import LaneGroup
from adascale_worker.program.optimizers import ElasticAdaScale
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.scaling.statistics.steps import StepWeights


class ShardedAccumulation(GradientAccumulation):
    """Counts the micro-batches of a step, and averages the gradients of a sharded model after the last."""

    def __init__(
        self,
        optimizer: ElasticAdaScale,
        model: ShardedModel,
        program_model: torch.nn.Module,
        group: LaneGroup,
        failure: StepFailure,
        division: StepDivision,
        observe_pass: Callable[[Tensor | None], None],
    ) -> None:
        super().__init__(optimizer, model, program_model, group, failure, division)
        self.weights = self._sharded_weights = ShardedWeights(group)
        self._sharded_model = model
        self._group = group
        self._observe_pass = observe_pass
        self._before: list[tuple[Tensor, Tensor]] = []
        """Gradients that were there before the present backward pass."""
        self._has_measured = False

    def set_plan(self, plan: BatchPlan, scale: float) -> None:
        """Use the accumulation of `plan` from the next step on. See `GradientAccumulation`."""
        super().set_plan(plan, scale)
        self.weights.set_plan(plan.per_process(self._group.processes))

    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step; discard the gradients of an unfinished step."""
        self._before.clear()
        self._has_measured = False
        super().restart_step()

    def before_backward(self) -> None:
        """Let the gradients of the next backward pass come alone."""
        self.require_passes()
        self._optimizer.sum_gradients_again()
        self._before = [(p, p.grad) for p in self._parameters if p.grad is not None]
        self._observe_pass(local_shard(self._before[0][1]) if self._before else None)
        for parameter, _ in self._before:
            parameter.grad = None
        self.weights.begin_pass()

    def after_backward(self) -> None:
        """Let the program see the mean gradient of the step in its last micro-batch, else none.

        A collective call of all processes in the last micro-batch, else of those of the replica.
        """
        shards = shards_of(self._parameters)
        if shards:
            self.weights.gradient_arrived()
        is_weighted = self.weights.end_pass()
        self.weights.check_pass()
        if not shards:
            # As of another model.
            self._add(self._before)
            self._before.clear()
            return
        weight = self._sharded_weights.of_replica(is_weighted=is_weighted)
        if self._has_pass:
            # The micro-gradient is the sum of several passes, which was not read.
            self._optimizer.leave_out_step()
        self._has_pass = True
        if not self.at_last_micro_batch:
            self._optimizer.read_micro_gradient(shards, weight)
            self._set_gradients_aside()
            self._before.clear()
            return
        self._optimizer.read_last_gradient(shards, weight)
        self.put_back()
        self._sharded_model.average_gradients([p for p in self._parameters if p.requires_grad])
        self._add(self._before)
        self._before.clear()
        self._group.settle()
        if is_weighted:
            self.weights.exchange()
            assert self.weights.of_step is not None
            self._optimizer.weigh_step(self.weights.of_step)
        self._optimizer.measure_averaged()
        if self._accumulation > 1 or self.weights.of_step is not None:
            self._optimizer.scale_grad_by_num_grads_to_accum()

    def put_back(self) -> None:
        """Put back the gradients that were set aside, and add what has come since, in place."""
        self._add(self._set_aside)
        self._set_aside.clear()

    def begin_generation(self) -> None:
        """Begin with other replicas. A collective call."""
        self.weights.begin_generation()

    def check_exchange(self) -> None:
        """Agree on whether the steps have weights. A collective call in the first steps of a generation."""
        self.weights.exchange_later()

    @staticmethod
    def _add(gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        for parameter, gradient in gradients:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                local_shard(parameter.grad).add_(local_shard(gradient))


class ShardedWeights(MicroBatchWeights):
    """The weights of the micro-batches of all processes of all replicas."""

    def __init__(self, group: LaneGroup) -> None:
        super().__init__(AllProcesses(group))
        self._lanes = group
        self._positive = 0.0
        """Micro-batches of this replica with a weight above 0 in this step."""

    def of_replica(self, *, is_weighted: bool) -> float:
        """Return the weight of the replica's present micro-gradient. A collective call in the replica."""
        if self._are_used is False:
            return 1.0  # The steps of this generation have no weights, which all processes know.
        count = self._lanes.processes
        weight, weighted = self._lanes.own.sum([self.factor, float(is_weighted)])
        if weighted not in (0.0, float(count)):
            raise WorkerError(
                f"trainer.weighted() was used on {weighted:.0f} of the {count} processes of a replica: use "
                "it for the loss of every micro-batch on all of them, or on none"
            )
        if weighted:
            self._positive += weight > 0.0
        return weight / count

    def exchange(self) -> None:
        """Exchange the weights of this step. See `MicroBatchWeights`."""
        super().exchange()
        (positive,) = self._lanes.sum([self._positive])
        if self.of_step is not None:
            self.of_step = StepWeights(self.of_step.divisor, round(positive))

    def finish_micro_batch(self, *, completes_step: bool) -> None:
        """Count a micro-batch."""
        super().finish_micro_batch(completes_step=completes_step)
        if completes_step:
            self._positive = 0.0

    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step."""
        super().restart_step()
        self._positive = 0.0


class AllProcesses:
    """All processes of all replicas, as the replicas of a program whose processes are replicas."""

    def __init__(self, group: LaneGroup) -> None:
        self._group = group

    @property
    def replicas(self) -> int:
        """The number of processes of all replicas."""
        return self._group.replicas * self._group.processes

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Return the elementwise sums of the `numbers` of all processes."""
        return self._group.sum(self._group.own.sum(numbers))

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the elementwise least and greatest of the `values` of the leaders, on the host.

        The processes of a replica have the same.
        """
        rows = self._group.gather(values.tolist())
        table = torch.tensor(rows)
        return table.min(dim=0).values, table.max(dim=0).values
