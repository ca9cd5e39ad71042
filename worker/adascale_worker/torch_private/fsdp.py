"""`fully_shard` (FSDP2).

FSDP2 and DTensor take a third of a second to import, so they are imported only where a model uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from adascale_worker.torch_private import private_part

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def is_fully_sharded(model: torch.nn.Module | None) -> bool:
    """Whether `fully_shard` was applied to `model` itself. Does not import FSDP2."""
    return hasattr(model, "set_requires_gradient_sync")


def reshard(model: torch.nn.Module) -> None:
    """Replace whole parameters of a model, after a forward pass without gradients, by their shards."""
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


class ShardedParameterGroup:
    """The parameters of a module whose gradients FSDP2 reduces together.

    Public interfaces show neither the gradients of this rank nor which backward passes were synchronized.
    """

    def __init__(self, module: FSDPModule, group: Any) -> None:
        self._module = module
        self._group = group
        self._parameters = private_part(group, "fsdp_params", "to measure a model with fully_shard")

    @property
    def parameters(self) -> list[Tensor]:
        """Shards that the module has as parameters."""
        return [parameter.sharded_param for parameter in self._parameters]

    @property
    def sharded_by_fsdp_alone(self) -> list[Tensor]:
        """The `parameters` that were ordinary tensors before `fully_shard`, and not DTensors."""
        return [parameter.sharded_param for parameter in self._parameters if not parameter.is_dtensor]

    @property
    def shard_sizes(self) -> list[int]:
        """The number of elements of each parameter that a rank has, with padding."""
        return [parameter.padded_sharded_param_size.numel() for parameter in self._parameters]

    @property
    def shard_count(self) -> int:
        """Number of ranks over which one copy of the parameters is sharded."""
        return int(self._parameters[0].sharded_param.device_mesh.size(-1))

    @property
    def gradient_divisor(self) -> float | None:
        """The divisor of the gradients that the program has set; None for the number of ranks.

        None also with versions of torch that have it in another place.
        """
        return getattr(self._group, "gradient_divide_factor", None)

    @property
    def has_trainable_parameter(self) -> bool:
        """Whether at least one parameter is trained."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def awaits_all_reduce(self) -> bool:
        """Whether gradients were reduce-scattered and not yet averaged over replicas (HSDP)."""
        purpose = "to measure a model with fully_shard over replicas of shards"
        return private_part(self._group, "_partial_reduce_output", purpose) is not None

    def on_post_backward(self, before: Callable[[bool], None], after: Callable[[bool], None]) -> None:
        """Call functions before and after `post_backward`, which ends the group's part of a backward pass.

        FSDP2 calls it in passes with and without a reduce-scatter. If it raises an error, `after` is not
        called.
        """
        group = self._group
        post_backward = private_part(group, "post_backward", "to count the backward passes of fully_shard")

        def observed_post_backward(*arguments: Any) -> None:
            before(group.reduce_grads)
            post_backward(*arguments)
            after(group.reduce_grads)

        group.post_backward = observed_post_backward

    def on_reduce_scatter(self, observe: Callable[[Tensor], None]) -> None:
        """Call `observe` with the input of each reduce-scatter of the group, before it starts.

        The input has the gradients of this rank: for each rank in turn, its piece of each parameter with a
        gradient, padded to `shard_sizes`.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

        class ObservedReduceScatter(ReduceScatter):
            def __init__(self, inner: ReduceScatter) -> None:
                self._inner = inner

            def allocate(
                self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
            ) -> Tensor:
                return self._inner.allocate(size, dtype=dtype, device=device)

            def __call__(
                self,
                output_tensor: Tensor,
                input_tensor: Tensor,
                group: dist.ProcessGroup,
                op: Any,
                async_op: bool = False,
            ) -> dist.Work | None:
                observe(input_tensor)
                return self._inner(output_tensor, input_tensor, group, op, async_op)

        inner = private_part(self._group, "_reduce_scatter_comm", "to read gradients of fully_shard")
        self._module.set_custom_reduce_scatter(ObservedReduceScatter(inner))


def sharded_parameter_groups(model: torch.nn.Module) -> list[ShardedParameterGroup]:
    """Return the parameter groups of all modules in `model` that `fully_shard` was applied to."""
    from torch.distributed.fsdp import FSDPModule

    return [
        ShardedParameterGroup(module, group)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _parameter_groups_of(module)
    ]


def _parameter_groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return FSDP2's own objects: in older versions at most one for each module, under another name."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    group = private_part(state, "_fsdp_param_group", "to measure a model with fully_shard")
    return [] if group is None else [group]


def reduce_scatter_predivisor(ranks: int, dtype: torch.dtype) -> int:
    """Return the number by which FSDP2 divides gradients before the reduce-scatter.

    About the square root of `ranks` for float16, to avoid an overflow; 1 for types with a wide range.
    """
    divisor = 1
    if dtype not in (torch.float32, torch.bfloat16):
        while ranks % divisor == 0 and ranks / divisor > divisor:
            divisor *= 2
    return divisor
