"""A model with `fully_shard` (FSDP2) over the processes of a replica, data-parallel over the replicas.

FSDP reduces the gradients of a micro-batch inside the replica: `.grad` is then this process's shard of the
replica's gradient. The shards are averaged over the lanes as the gradients of a whole model are over the
replicas, after the last backward pass of a step: once for each step, and for the same parameters on all
replicas, also if a branch of the model had no gradients on some of them.

FSDP's all-reduce hook (`FSDPModule.set_all_reduce_hook`) was tried. It gets the gradient of each micro-batch
alone, in the type of the reduce-scatter, so accumulation exchanges more, or needs a second buffer; and it is
not called for a module without gradients, where the other replicas would wait, nor for one whose parameters
are on several meshes.
"""

from __future__ import annotations

import torch

from adascale_worker.errors import WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
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
        if mesh.mesh.flatten().tolist() != ranks:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is sharded over a mesh of the "
                f"processes {mesh.mesh.tolist()}, but a replica has {group.processes} processes: pass "
                "mesh=trainer.mesh to fully_shard, or a mesh of all of these processes in two dimensions. "
                "The trainer averages over the replicas itself"
            )
        if parameter.device.type != group.device.type:
            raise WorkerError(
                f"program_reentry got a model whose parameter {name!r} is on {parameter.device}, and not on "
                f"{group.device}: offload_policy of fully_shard is not supported"
            )
