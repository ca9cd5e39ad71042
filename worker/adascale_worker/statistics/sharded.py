"""Local gradients of a model whose parameters `fully_shard` has sharded (FSDP2).

There a rank never holds its own gradient in `.grad`: it goes straight into a reduce-scatter, and `.grad`
is the rank's shard of the mean. So the norm is taken of what goes into the reduce-scatter. That is exact,
as it is under DistributedDataParallel.

Gradients of a pass without synchronisation stay on the rank, and the next reduce-scatter takes the sum. What
goes into one is a micro-gradient all the same, of the batches of all these passes together: a step then has
fewer micro-gradients, of larger batches. Which passes went into which is counted for each unit, a module
that `fully_shard` was applied to.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from adascale_worker.statistics.backward import current_task
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
        self._units: list[_Unit] = []
        self._unknown = False
        self._stale = False
        self._watching = False
        self.shards = 1
        """Ranks that one copy of the parameters is spread over."""
        self.known: set[int] = set()
        """Ids of the parameters that `fully_shard` alone has sharded."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._wrap(module)

    def _wrap(self, module: FSDPModule) -> None:
        for own in module._get_fsdp_state()._fsdp_param_groups:
            groups = [self._group_of.get(id(parameter.sharded_param)) for parameter in own.fsdp_params]
            unit = _Unit(own, groups)
            self.known |= {id(one.sharded_param) for one in own.fsdp_params if not one.is_dtensor}
            mesh = getattr(own.fsdp_params[0].sharded_param, "device_mesh")  # noqa: B009 (typed as a Parameter)
            self.shards = mesh.size(-1)
            module.set_custom_reduce_scatter(_Measured(own._reduce_scatter_comm, self, unit))
            self._units.append(unit)

    def begin_step(self, *, watching: bool) -> None:
        """Forget the passes so far, and read the next ones if `watching`."""
        self._watching = watching
        for norms in self._norms:
            norms.clear()
        for unit in self._units:
            unit.carried.clear()
        self._unknown = False
        self._stale = any(unit.awaits_all_reduce for unit in self._units)

    def miss(self) -> None:
        """Take this step for one that was not seen from its start."""
        self._unknown = True

    @property
    def passes(self) -> int:
        """Backward passes whose gradients were reduced in this step."""
        return max((len(set().union(*unit.carried)) for unit in self._units), default=0)

    @property
    def parts(self) -> int:
        """Micro-gradients of this rank that were seen in this step, each of as many passes; 0 if unknown."""
        if self._unknown or self.obstacle() is not None:
            return 0
        shapes = {unit.shape() for unit in self._units if unit.trained}
        # Units that differ, since some pass did not use one, do not add up to whole micro-gradients.
        shape = shapes.pop() if len(shapes) == 1 else ()
        return len(shape) if sum(shape) == self.passes else 0

    def obstacle(self) -> str | None:
        """Return why the loop does not show its micro-gradients, and what to do; None if it may well."""
        if self.shards == 1:
            return (
                "got fully_shard over 1 rank, which has no reduce-scatter to read gradients at; shard over "
                "more ranks, or leave fully_shard out and use DistributedDataParallel"
            )
        if self._stale or any(unit.awaits_all_reduce for unit in self._units):
            return (
                "got set_requires_all_reduce(False) on the last backward pass of a step, whose gradients are "
                "not reduced then; set it to True for the last one"
            )
        if any(len(set(unit.shape())) > 1 or unit.waiting for unit in self._units if unit.trained):
            return (
                "got reduce-scatters of unequal numbers of backward passes in a step; synchronise gradients "
                "on every pass, or set_requires_gradient_sync(True) on the last one only"
            )
        return None

    def local_sqr(self, device: torch.device) -> Tensor:
        """Return the sum of the squared norms of this rank's micro-gradients: shape (groups,)."""
        return torch.stack([sum_of_squares(norms, device) for norms in self._norms])

    def take(self, unit: "_Unit", gradients: Tensor) -> None:
        """Read a unit's gradients: for each rank, a piece of each of its parameters."""
        unit.carry()
        if not self._watching:
            return
        divisor = _divisor(self._ranks, gradients.dtype)
        if len(set(unit.groups)) == 1:
            if unit.groups[0] is not None:
                self._norms[unit.groups[0]].append(norm(gradients) * divisor)
            return
        width = sum(unit.sizes)
        pieces = gradients.view(-1, width) if gradients.numel() % width == 0 else None
        if pieces is None:  # without a parameter that was not used, the rest cannot be told apart
            self._unknown = True
            return
        for piece, group in zip(torch.split(pieces, unit.sizes, dim=1), unit.groups, strict=True):
            if group is not None:
                self._norms[group].append(norm(piece) * divisor)


class _Unit:
    """Parameters whose gradients are reduced together, and the passes that these gradients are from.

    Attributes:
        groups: of each parameter, the optimizer's group.
        sizes: of each parameter, the elements that a rank has of it.
        waiting: passes whose gradients are on the rank still. Not even `zero_grad()` forgets those.
        carried: of each reduce-scatter of this step, the passes that it took the sum of.
    """

    def __init__(self, own: FSDPParamGroup, groups: Sequence[int | None]) -> None:
        self._own = own
        self.groups = groups
        self.sizes = [parameter.padded_sharded_param_size.numel() for parameter in own.fsdp_params]
        self.waiting: set[int] = set()
        self.carried: list[set[int]] = []
        inner = own.post_backward

        def post_backward(*arguments: Any) -> None:
            if not own.reduce_grads:
                self.waiting.add(current_task())
            inner(*arguments)
            if own.reduce_grads:  # they are reduced now, or there were none
                self.waiting.clear()

        setattr(own, "post_backward", post_backward)  # noqa: B010 (a method, to the type checker)

    @property
    def trained(self) -> bool:
        """Whether not all of its parameters are frozen."""
        return any(parameter.sharded_param.requires_grad for parameter in self._own.fsdp_params)

    @property
    def awaits_all_reduce(self) -> bool:
        """Whether there are gradients still to be averaged over replicas (HSDP)."""
        return self._own._partial_reduce_output is not None

    def carry(self) -> None:
        """Note that the gradients of this pass, and those that wait, are reduced now."""
        self.carried.append(self.waiting | {current_task()})

    def shape(self) -> tuple[int, ...]:
        """Return how many passes each reduce-scatter of this step took the sum of."""
        return tuple(map(len, self.carried))


def _divisor(ranks: int, dtype: torch.dtype) -> int:
    """Return what FSDP has divided gradients by already: about the root of `ranks`, lest they overflow."""
    divisor = 1
    if dtype not in (torch.float32, torch.bfloat16):
        while ranks % divisor == 0 and ranks / divisor > divisor:
            divisor *= 2
    return divisor


class _Measured(ReduceScatter):
    """A reduce-scatter that shows its input before it starts."""

    def __init__(self, inner: ReduceScatter, owner: ShardedGradients, unit: _Unit) -> None:
        self._inner = inner
        self._owner = owner
        self._unit = unit

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
        self._owner.take(self._unit, input_tensor)
        return self._inner(output_tensor, input_tensor, group, op, async_op)
