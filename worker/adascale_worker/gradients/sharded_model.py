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

from adascale_worker.errors import WorkerError
from adascale_worker.gradients.data_parallel import ForwardRecord
from adascale_worker.gradients.model_set import ModelSet
from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.membership.lane_group import LaneGroup
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.torch_private.fsdp import is_fully_sharded, sharded_parameter_groups


class ShardedModel(ModelSet):
    """The calls of a sharded model while it trains, and the averages of its gradients."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        group: LaneGroup,
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

    def end_backward(self) -> None:
        """Nothing depends on the number of backward passes."""

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace the gradients of `parameters` by their means over the replicas, in place.

        A gradient that some replicas have and others do not have counts as zero where it is missing. A
        collective call of the lane; a failure counts at the next `settle` of the group.
        """
        if self._group.replicas == 1:
            return
        shards = shards_of(parameters)
        presence = torch.tensor([float(parameter in shards) for parameter in parameters])
        with self._measured_exchange():
            self._group.average([presence])
            means = presence.tolist()
            if not all(mean in (0.0, 1.0) for mean in means):
                for parameter, mean in zip(parameters, means, strict=True):
                    if mean > 0.0 and parameter not in shards:
                        parameter.grad = torch.zeros_like(parameter)
                # The gradients of the same parameters are in other buffers on other replicas.
                self._group.average([shard for shard in shards_of(parameters).values() if shard.numel()])
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


def require_sharded(model: torch.nn.Module, group: LaneGroup) -> None:
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
