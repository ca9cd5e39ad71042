"""Reads the local gradients of a model whose parameters `fully_shard` has sharded (FSDP2).

With FSDP2 a rank never has its own gradient in `.grad`: the gradient goes into a reduce-scatter, and `.grad`
is the shard of the mean that the rank owns. So the norm of the input of the reduce-scatter is read, exactly.

Gradients of a pass without synchronisation stay on the rank, and the next reduce-scatter takes their sum. Its
input is a micro-gradient too, of the batches of all these passes together: such a step has fewer
micro-gradients, of larger batches. The passes that went into each reduce-scatter are recorded for each FSDP2
parameter group, the parameters that are reduced together.

A rank has the second moments of its shards only. So for Adam the squares of the local gradients are
reduce-scattered too, and each rank divides their sums by the second moments of its shards.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adascale_worker.scaling.statistics.metric import Metric
from adascale_worker.scaling.statistics.norms import local_shard, norm
from adascale_worker.scaling.statistics.parameters import OptimizerParameters
from adascale_worker.scaling.statistics.reader import HookedGradients
from adascale_worker.scaling.statistics.steps import GainOptions
from adascale_worker.torch_private.autograd import backward_pass_id
from adascale_worker.torch_private.distributed import (
    ShardedParameterGroup,
    micro_gradient_factor,
    sharded_parameter_groups,
)


class ShardedGradients(HookedGradients):
    """Norms of the inputs of the reduce-scatters in the backward passes of a step."""

    def __init__(
        self,
        parameters: OptimizerParameters,
        options: GainOptions,
        metric: Metric,
        model: nn.Module | None,
        on_pass_start: Callable[[], None],
        on_pass_end: Callable[[], None],
    ) -> None:
        super().__init__(parameters, options, metric, model, on_pass_start, on_pass_end)
        assert model is not None
        groups = parameters.groups()
        # ids of the parameters that `fully_shard` alone has sharded, over all ranks
        self._readable: set[int] = set()
        group_of = {id(p): number for number, group in enumerate(groups) for p in group}
        self._fsdp_groups = sharded_parameter_groups(model)
        for fsdp_group in self._fsdp_groups:
            optimizer_groups = [group_of.get(id(parameter)) for parameter in fsdp_group.parameters]
            fsdp_group.observe(partial(self._on_reduce_scatter, fsdp_group, optimizer_groups))
            if fsdp_group.mesh.size() == options.world_size:
                self._readable |= set(map(id, fsdp_group.sharded_by_fsdp_alone))

    def unreadable_parameters(self) -> list[Tensor]:
        """Return the parameters that `fully_shard` did not shard alone over all ranks."""
        return [p for group in self._parameters.groups() for p in group if id(p) not in self._readable]

    # FSDP2 writes .grad, and calls the hooks on accumulated gradients itself: they show the ends of passes.

    def _comes_last(self, index: int) -> bool:  # noqa: ARG002
        return True

    def _add_hook(self, index: int, parameter: Tensor) -> RemovableHandle:  # noqa: ARG002
        def on_accumulated(_: Tensor) -> None:
            if backward_pass_id() not in self._pass_ids:
                self._begin_pass()

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(on_accumulated)
        return handle

    def begin_step(self, *, measuring: bool) -> None:
        """Discard the passes so far, and read the next ones if `measuring`."""
        super().begin_step(measuring=measuring)
        self._measuring = measuring
        for fsdp_group in self._fsdp_groups:
            fsdp_group.reduced.clear()
        self._is_incomplete = False
        self._began_with_unreduced = self._awaits_all_reduce

    def mark_incomplete(self) -> None:
        """Leave this step out: FSDP2 calls a hook when the first gradients of a pass are reduced already."""
        self._is_incomplete = True

    @property
    def passes(self) -> int:
        """Backward passes whose gradients were reduced in this step."""
        return max((len(set().union(*group.reduced)) for group in self._fsdp_groups), default=0)

    @property
    def micro_gradients(self) -> int:
        """Micro-gradients that were read in this step on all ranks, each of as many passes; 0 if unknown."""
        if self._is_incomplete or self.problem() is not None:
            return 0
        shapes = {tuple(map(len, group.reduced)) for group in self._trained}
        # If a pass did not use all modules, the reductions do not add up to whole micro-gradients.
        shape = shapes.pop() if len(shapes) == 1 else ()
        return self._options.world_size * len(shape) if sum(shape) == self.passes else 0

    @property
    def has_read_all(self) -> bool:
        """Whether all micro-gradients of this rank were read, if the step has several."""
        return self._options.micro_gradients == 1 or self.micro_gradients > 1

    def problem(self) -> str | None:
        """Return why micro-gradients cannot be read from this loop, and what to change; None if they can."""
        if self._options.micro_gradients == 1:
            return None
        if any(group.mesh.size(-1) == 1 for group in self._fsdp_groups):
            return (
                "got fully_shard over 1 rank, which has no reduce-scatter to read gradients from; shard over "
                "more ranks, or use DistributedDataParallel instead of fully_shard"
            )
        if self._began_with_unreduced or self._awaits_all_reduce:
            return (
                "got set_requires_all_reduce(False) on the last backward pass of a step: its gradients are "
                "not reduced; set it to True for the last pass"
            )
        if any(len(set(map(len, group.reduced))) > 1 or group.unreduced for group in self._trained):
            return (
                "got reduce-scatters of unequal numbers of backward passes in a step; synchronise gradients "
                "on every pass, or set_requires_gradient_sync(True) on the last pass only"
            )
        return None

    def averaged_sqr_norms(self) -> Tensor:
        """Return those of the shards of this rank, times the number of ranks: shape (groups,)."""
        return super().averaged_sqr_norms() * self._options.world_size

    @property
    def _trained(self) -> list[ShardedParameterGroup]:
        return [group for group in self._fsdp_groups if group.has_trainable_parameter]

    @property
    def _awaits_all_reduce(self) -> bool:
        return any(group.awaits_all_reduce for group in self._fsdp_groups)

    def _on_reduce_scatter(
        self,
        fsdp_group: ShardedParameterGroup,
        optimizer_groups: Sequence[int | None],
        gradients: Tensor,
        ranks: dist.ProcessGroup,
    ) -> None:
        """Read the gradients of an FSDP2 group: for each rank, a piece of each parameter with a gradient."""
        if not self._measuring:
            return
        ranks_of_step = self._options.world_size
        factor = micro_gradient_factor(ranks_of_step, gradients.dtype, fsdp_group.gradient_divisor)
        defined = self._metric.defined_groups()
        if defined is None and len(set(optimizer_groups)) == 1:
            if optimizer_groups[0] is not None:
                self._norms.append((optimizer_groups[0], norm(gradients) * factor))
            return
        parameters = zip(fsdp_group.parameters, optimizer_groups, fsdp_group.shard_sizes, strict=True)
        trained = [each for each in parameters if each[0].requires_grad]
        sizes = [size for *_, size in trained]
        if gradients.numel() != sum(sizes) * fsdp_group.mesh.size(-1):
            # A parameter was not used, so the pieces of the others cannot be located.
            self._is_incomplete = True
            return
        whole = gradients.view(-1, sum(sizes))
        if defined is not None:
            squares = whole.to(torch.promote_types(whole.dtype, torch.float32)).square()
            own = squares.new_empty(sum(sizes))
            dist.reduce_scatter_tensor(own, squares.view(-1), group=ranks)
            whole = own.sqrt_().view(1, -1)
        for (parameter, group, _), piece in zip(trained, whole.split(sizes, dim=1), strict=True):
            if group is None:
                continue
            if defined is None:
                self._norms.append((group, norm(piece) * factor))
            elif group in defined:
                shard = piece[0, : local_shard(parameter).numel()]
                self._norms.append((group, self._metric.norm(group, parameter, shard) * factor))
