"""The small all-reduce of a measured step, also by ranks that run out of data before others (`Join`).

One vector carries the statistics of all parameter groups and the flags of the training program. It starts
when the last backward pass ends, and is waited for when a result is read, so that it overlaps with the code
between. All ranks read the same sums, equal to the bit, and so compute the same gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.scaling.statistics.norms import Gradients, sqr_norms
from adascale_worker.torch_private.distributed import is_in_join

AGREEMENT_TOLERANCE = 1e-8
"""Relative variance up to which ranks have the same averaged gradients; kernels differ by less."""

HEADER_SIZE = 2


class Shards(Protocol):
    """The processes of a replica, each of which has a shard of all gradients, and the other replicas."""

    def add_shards(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the processes of this replica."""

    def add_replicas(self, tensor: Tensor) -> None:
        """Replace a tensor, the same on all processes of a replica, by its sum over the replicas."""


@dataclass(frozen=True, slots=True)
class ReducedStatistics:
    """The numbers of one step after the all-reduce, the same on all ranks."""

    # the sums over ranks of the squared norms of the micro-gradients, or of the inner products with the
    # previous gradient: shape (groups,)
    summed: Tensor
    averaged: Tensor  # the means over ranks of the squared norms of the averaged gradients: shape (groups,)
    flags: Tensor  # sums over ranks, shape (flags,)
    complete: Tensor  # whether all ranks took part with all their gradients: shape ()
    agreed: Tensor  # whether `averaged` was the same on all ranks: shape ()
    # squared norms of the gradients before the step, on this rank: shape (groups,), if they were read
    before_step: Tensor | None

    @property
    def finite(self) -> Tensor:
        """Whether all gradients were finite: shape ()."""
        return torch.isfinite(self.summed.sum() + self.averaged.sum())


class StatisticsAllReduce:
    """An all-reduce of statistics that has started."""

    def __init__(
        self,
        summed: Tensor,  # shape (groups,)
        averaged: Tensor,  # shape (groups,)
        flags: Sequence[float],
        *,
        complete: bool,  # whether this rank has read all its gradients
        ranks: int,
        same_on_all_ranks: bool,  # whether `averaged` should be; otherwise its mean over ranks is used
        process_group: dist.ProcessGroup | None,
        shards: Shards | None,
    ) -> None:
        self._same_on_all_ranks = same_on_all_ranks
        self._groups = groups = summed.numel()
        self._ranks = ranks
        if shards is not None:
            vector = torch.cat([summed, averaged, averaged.new_tensor([float(not complete)])])
            shards.add_shards(vector)
            summed, averaged, missing = vector.split([groups, groups, 1])
            complete = missing.item() == 0.0
        total = averaged.sum()
        header = torch.stack([total * total, torch.full_like(total, float(complete))])
        parts = [header, summed, averaged]
        if flags:
            # Filled on the device: making a tensor of numbers on a GPU waits for it. Few are not zero.
            numbers = total.new_zeros(len(flags))
            for index, flag in enumerate(flags):
                if flag:
                    numbers[index] = flag
            parts.append(numbers)
        self._vector = torch.cat(parts)
        self._work: dist.Work | None = None
        self._result: ReducedStatistics | None = None
        if ranks > 1 and shards is not None:
            shards.add_replicas(self._vector)
        elif ranks > 1:
            self._work = dist.all_reduce(self._vector, group=process_group, async_op=True)

    def result(self, device: torch.device, before_step: Tensor | None = None) -> ReducedStatistics:
        """Wait for the sums, and return them with `before_step`, in one transfer to `device`."""
        if self._result is None or before_step is not None or self._result.summed.device != device:
            self.wait()
            vector = self._vector if before_step is None else torch.cat([self._vector, before_step])
            numbers, end = vector.to(device), self._vector.numel()
            self._result = self._interpret(numbers[:end], None if before_step is None else numbers[end:])
        return self._result

    def wait(self) -> None:
        """Wait for the collective without reading its result, because it still uses the buffer."""
        # If this raises an error because a rank is lost, there is nothing to wait for any more.
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def _interpret(self, sums: Tensor, before_step: Tensor | None) -> ReducedStatistics:
        middle, end = HEADER_SIZE + self._groups, HEADER_SIZE + 2 * self._groups
        averaged = sums[middle:end] / self._ranks
        complete = sums[1] == self._ranks
        agreed = torch.ones_like(complete)
        if self._same_on_all_ranks:
            sqr_of_mean = averaged.sum().square()
            agreed = (sums[0] / self._ranks - sqr_of_mean).abs() <= AGREEMENT_TOLERANCE * sqr_of_mean
        return ReducedStatistics(
            sums[HEADER_SIZE:middle], averaged, sums[end:], complete, agreed, before_step
        )


def sqr_norms_of_mean(
    gradients: Gradients,
    device: torch.device,
    *,
    ranks: int,
    process_group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the squared norm of the mean over ranks of local gradients, per group: shape (groups,).

    An all-reduce of copies of all gradients, for a model whose own all-reduce compresses them.
    """
    means: list[list[Tensor]] = []
    for group in gradients:
        if not group:
            means.append([])
            continue
        flat = torch.cat([gradient.reshape(-1) for gradient in group])
        dist.all_reduce(flat, group=process_group)
        means.append([flat])
    return sqr_norms(means, device) / ranks**2


def joins_without(ddp: DistributedDataParallel | None, joinable: Joinable | None) -> bool:
    """Whether `ddp` takes uneven inputs now and `joinable` does not.

    Then peers may be without data, and an all-reduce for `joinable` would wait for them for ever.
    """
    if ddp is None or not is_in_join(ddp):
        return False
    return joinable is None or not is_in_join(joinable)
