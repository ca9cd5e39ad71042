"""Local gradients of a model whose parameters `fully_shard` has sharded (FSDP2).

There a rank never holds its own gradient in `.grad`: it goes straight into a reduce-scatter, and `.grad`
is the rank's shard of the mean. So the norm is taken of what goes into the reduce-scatter. That is exact,
as it is under DistributedDataParallel.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from adascale_worker.statistics.norms import norm, sum_of_squares


class ShardedGradients:
    """Norms of what a step's backward passes put into reduce-scatters.

    Args:
        model: with `fully_shard` applied, before the optimizer was made.
        groups: the optimizer's parameters, by group.
        ranks: that gradients are averaged over.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[Tensor]], ranks: int) -> None:
        self._ranks = ranks
        self._group_of = {id(p): number for number, group in enumerate(groups) for p in group}
        self._norms: list[list[Tensor]] = [[] for _ in groups]
        self._units = 0
        self._calls = 0
        self._unknown = False
        self._watching = False
        self.shards = 1
        """Ranks that one copy of the parameters is spread over."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._wrap(module)

    def _wrap(self, module: FSDPModule) -> None:
        for unit in module._get_fsdp_state()._fsdp_param_groups:
            groups = [self._group_of.get(id(parameter.sharded_param)) for parameter in unit.fsdp_params]
            sizes = [parameter.padded_sharded_param_size.numel() for parameter in unit.fsdp_params]
            mesh = getattr(unit.fsdp_params[0].sharded_param, "device_mesh")  # noqa: B009 (typed as a Parameter)
            self.shards = mesh.size(-1)
            module.set_custom_reduce_scatter(_Measured(unit._reduce_scatter_comm, self, groups, sizes))
            self._units += 1

    def begin_step(self, *, watching: bool) -> None:
        """Forget the passes so far, and read the next ones if `watching`."""
        self._watching = watching
        for norms in self._norms:
            norms.clear()
        self._calls = 0
        self._unknown = False

    def complete(self, passes: int) -> bool:
        """Whether each of `passes` backward passes was seen, and all of it."""
        return not self._unknown and self._calls == passes * self._units

    def local_sqr(self, device: torch.device) -> Tensor:
        """Return the sum of the squared norms of this rank's micro-gradients: shape (groups,)."""
        return torch.stack([sum_of_squares(norms, device) for norms in self._norms])

    def take(self, gradients: Tensor, groups: Sequence[int | None], sizes: Sequence[int]) -> None:
        """Read a unit's gradients: for each rank, a piece of each of its parameters."""
        if not self._watching:
            return
        self._calls += 1
        divisor = _divisor(self._ranks, gradients.dtype)
        if len(set(groups)) == 1:
            if groups[0] is not None:
                self._norms[groups[0]].append(norm(gradients) * divisor)
            return
        pieces = gradients.view(-1, sum(sizes)) if gradients.numel() % sum(sizes) == 0 else None
        if pieces is None:  # without a parameter that was not used, the rest cannot be told apart
            self._unknown = True
            return
        for piece, group in zip(torch.split(pieces, list(sizes), dim=1), groups, strict=True):
            if group is not None:
                self._norms[group].append(norm(piece) * divisor)


def _divisor(ranks: int, dtype: torch.dtype) -> int:
    """Return what FSDP has divided gradients by already: about the root of `ranks`, lest they overflow."""
    divisor = 1
    if dtype not in (torch.float32, torch.bfloat16):
        while ranks % divisor == 0 and ranks / divisor > divisor:
            divisor *= 2
    return divisor


class _Measured(ReduceScatter):
    """A reduce-scatter that shows its input before it starts."""

    def __init__(
        self,
        inner: ReduceScatter,
        owner: ShardedGradients,
        groups: Sequence[int | None],
        sizes: Sequence[int],
    ) -> None:
        self._inner = inner
        self._owner = owner
        self._groups = groups
        self._sizes = sizes

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
        self._owner.take(input_tensor, self._groups, self._sizes)
        return self._inner(output_tensor, input_tensor, group, op, async_op)
