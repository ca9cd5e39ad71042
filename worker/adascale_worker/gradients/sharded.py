"""A model with `fully_shard` (FSDP2) over the processes of a replica, data-parallel over the replicas.

FSDP reduces the gradients of a micro-batch inside the replica: `.grad` is then this process's shard of the
replica's gradient. The shards are averaged over the lanes by the trainer, in place, after the last backward
pass of a step: once for each step, in the type of `.grad`, and for the same parameters on all replicas, also
if a branch of the model had no gradients on some of them.

FSDP's all-reduce hook (`FSDPModule.set_all_reduce_hook`) was tried. It gets the gradient of each micro-batch
alone, in the type of the reduce-scatter, so accumulation exchanges more, or needs a second buffer; and it is
not called for a module without gradients, where the other replicas would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adascale_core.batch.plans import BatchPlan
from adascale_worker.errors import WorkerError
from adascale_worker.gradients.accumulation import GradientAccumulation
from adascale_worker.gradients.data_parallel import ForwardRecord
from adascale_worker.gradients.micro_batch_weights import MicroBatchWeights
from adascale_worker.gradients.model_set import ModelSet
from adascale_worker.gradients.step_division import StepDivision
from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.optimizers import ElasticAdaScale
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.scaling.statistics.steps import StepWeights
from adascale_worker.torch_private.fsdp import is_fully_sharded, sharded_parameter_groups


class ShardedModel(ModelSet):
    """The calls of a sharded model while it trains, and the averages of its gradients."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        group: ReplicaGroup,
        forward: ForwardRecord,
        trained: TrainedParameters,
        failure: StepFailure,
        before_forward: Callable[[], None],
        changed_trained: Callable[[list[Tensor]], None],
        steps: Callable[[], int],
    ) -> None:
        require_sharded(model, group)
        super().__init__([model], device, group, failure, lambda: 1, allows_shards=True)
        self._record = forward
        self._trained = trained
        self._before_forward = before_forward
        self._changed_trained = changed_trained
        self._steps = steps

    def follow_trained(self) -> None:
        """Train the parameters that require gradients now in the step that the optimizer makes next."""
        changed = self._trained.follow(self._steps())
        for parameter in changed:
            if not parameter.requires_grad:
                parameter.grad = None
        if changed:
            self._changed_trained(changed)

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace the gradients of those of `parameters` that are trained by their means over the replicas.

        A gradient that some replicas have and others do not have counts as zero where it is missing. A
        collective call of the lane; a failure counts at the next `settle` of the group.
        """
        if self._group.replicas == 1:
            return
        shards = shards_of([parameter for parameter in parameters if parameter.requires_grad])
        presence = torch.tensor([float(parameter in shards) for parameter in parameters])
        with self._measured_exchange():
            self._group.average([presence])
            means = presence.tolist()
            if not all(mean in (0.0, 1.0) for mean in means):
                used = [parameter for parameter, mean in zip(parameters, means, strict=True) if mean > 0.0]
                for parameter in used:
                    if parameter not in shards:
                        parameter.grad = torch.zeros_like(parameter)
                # The gradients of the same parameters are in other buffers on other replicas.
                self._group.average([shard for shard in shards_of(used).values() if shard.numel()])
            else:
                self._group.average(list(buffers_of(list(shards.values()))))

    def forward(
        self,
        model: torch.nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the model's original forward, on all processes of the replica. It has collective calls."""
        del model
        self.other_parallelism.check_call()
        self._before_forward()
        self._record.called = True
        return original(*args, **kwargs)


def shards_of(parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return the shards of the gradients of `parameters` that have one."""
    return {p: local_shard(p.grad) for p in parameters if p.grad is not None}


def buffers_of(shards: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield tensors of one dimension that together have the memory of `shards`, in as few as possible.

    FSDP makes the gradients of the parameters that it reduces together in one buffer.
    """
    together: dict[int, list[Tensor]] = {}
    for shard in shards:
        if shard.numel():
            together.setdefault(shard.untyped_storage().data_ptr(), []).append(shard)
    for parts in together.values():
        first = parts[0]
        size = first.untyped_storage().nbytes() // first.element_size()
        # FSDP pads shards of unequal size.
        is_buffer = 2 * sum(part.numel() for part in parts) >= size
        if is_buffer and all(part.dtype is first.dtype for part in parts):
            yield first.as_strided((size,), (1,), 0)
        else:
            yield from parts


def require_sharded(model: torch.nn.Module, group: ReplicaGroup) -> None:
    """Check that `fully_shard` was applied to a model over the processes of the replica, to all of it."""
    if not any(is_fully_sharded(module) for module in model.modules()):
        raise WorkerError(
            f"program_reentry got a model that is not sharded, but a replica has {group.processes} "
            "processes (processesPerReplica): call fully_shard(model, mesh=trainer.mesh) before the "
            "optimizer is made, or leave out processesPerReplica"
        )
    groups = sharded_parameter_groups(model)
    for each in groups:
        if each.gradient_divisor not in (None, group.processes):
            raise WorkerError(
                f"program_reentry got a model with set_gradient_divide_factor({each.gradient_divisor:g}), "
                f"but the trainer needs the mean gradient of the {group.processes} processes of a replica: "
                f"call set_gradient_divide_factor({group.processes}) of each FSDPModule after what has set "
                "it, and use the mean loss of the samples of a process"
            )
    alone = {id(p) for each in groups for p in each.sharded_by_fsdp_alone}
    ranks = list(range(group.processes))
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is not sharded, so its gradients "
                "would not be averaged over the processes of a replica: apply fully_shard to the root module "
                "too, without ignored_params, and before program_reentry"
            )
        if id(parameter) not in alone:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is a DTensor with placements "
                f"{tuple(getattr(parameter, 'placements', ()))}, which fully_shard alone has not made: "
                "tensor parallelism inside a replica is not supported, only fully_shard(model, "
                "mesh=trainer.mesh)"
            )
        if mesh.ndim != 1 or mesh.mesh.flatten().tolist() != ranks:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is sharded over a mesh of shape "
                f"{tuple(mesh.mesh.shape)}, but a replica has {group.processes} processes: pass "
                "mesh=trainer.mesh to fully_shard. The trainer averages over the replicas itself"
            )
        if parameter.device.type != group.device.type:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is on {parameter.device}, and not on "
                f"{group.device}: offload_policy of fully_shard is not supported"
            )


class ShardedAccumulation(GradientAccumulation):
    """Counts the micro-batches of a step, and averages the gradients of a sharded model after the last.

    Each backward pass comes alone, so that its gradient is read for the statistics, and is then added to the
    shards of the earlier micro-batches.
    """

    def __init__(
        self,
        optimizer: ElasticAdaScale,
        model: ShardedModel,
        program_model: torch.nn.Module,
        group: ReplicaGroup,
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

    def set_plan(self, plan: BatchPlan, scale: float) -> None:
        """Use the accumulation of `plan` from the next step on. See `GradientAccumulation`."""
        super().set_plan(plan, scale)
        self.weights.set_plan(plan.per_process(self._group.processes))

    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step; discard the gradients of an unfinished step."""
        self._before.clear()
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
        self.passes += 1
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
        self._sharded_model.average_gradients(self._parameters)
        self._add(self._before)
        self._before.clear()
        self._group.settle()
        self.weigh_step(is_weighted=is_weighted)
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

    # A micro-batch is divided among the G processes of a replica, and each weighs its part. With w_ij the
    # weight of process j in micro-batch i, FSDP has computed the mean over j of w_ij g_ij / s, so that the
    # replica's micro-gradient has the weight sum_j(w_ij) / (s G); see `micro_batch_weights`.

    def __init__(self, group: ReplicaGroup) -> None:
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
        if self._exchanged is not None:
            self._exchanged = StepWeights(self._exchanged.divisor, round(positive))

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

    def __init__(self, group: ReplicaGroup) -> None:
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

        The processes of a replica have the same values.
        """
        rows = self._group.gather(values.tolist())
        table = torch.tensor(rows)
        return table.min(dim=0).values, table.max(dim=0).values
