"""A model with `fully_shard` (FSDP2) over the processes of a replica, data-parallel over the replicas.

FSDP reduces the gradients of a micro-batch inside the replica: `.grad` is then this process's shard of the
replica's gradient. The shards are averaged over the lanes as the gradients of a whole model are over the
replicas, after the last backward pass of a step: once for each step, and for the same parameters on all
replicas, also if a branch of the model had no gradients on some of them.

FSDP's all-reduce hook (`FSDPModule.set_all_reduce_hook`) was tried. It gets the gradient of each micro-batch
alone, in the type of the reduce-scatter, so accumulation exchanges more, or needs a second buffer; and it is
not called for a module without gradients, where the other replicas would wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adascale_worker.errors import WorkerError
from adascale_worker.gradients.micro_batch_weights import MicroBatchWeights
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.scaling.statistics.steps import StepWeights
from adascale_worker.torch_private.distributed import is_fully_sharded, sharded_parameter_groups


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

    def of_pass(self) -> float:
        """Return the weight of the replica's present micro-gradient. A collective call in the replica."""
        if self._are_used is False:
            return 1.0  # The steps of this generation have no weights, which all processes know.
        count = self._lanes.processes
        weight, weighted = self._lanes.own.sum([self.factor, float(self._is_weighted_pass)])
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

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the elementwise sums of the `numbers` of all processes."""
        return self._group.sum(self._group.own.sum(numbers))

    def gather(self, value: float) -> list[float]:
        """Return the values of the replicas, whose processes have the same."""
        return self._group.gather(value)
