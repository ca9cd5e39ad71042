"""The small all-reduce of a measured step.

One vector carries the statistics of all parameter groups. It starts when the last backward pass ends, and is
waited for when a result is read, so that it overlaps with the code between. All ranks read the same sums,
equal to the bit, and so compute the same gain.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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
    """The numbers of one step after the all-reduce, the same on all ranks, by parameter group."""

    # the sums over ranks of the squared norms of the micro-gradients, or of the inner products with the
    # previous gradient
    summed: list[float]
    averaged: list[float]  # the means over ranks of the squared norms of the averaged gradients
    complete: bool  # whether all ranks took part with all their gradients
    agreed: bool  # whether `averaged` was the same on all ranks
    # of this rank alone: the squared norms of the averaged gradients, and of the gradients before the step
    # if they were read
    own: list[float]
    before_step: list[float] | None

    @property
    def finite(self) -> bool:
        """Whether all gradients were finite."""
        return math.isfinite(sum(self.summed) + sum(self.averaged))


class StatisticsAllReduce:
    """An all-reduce of statistics that has started."""

    def __init__(
        self,
        summed: Tensor,  # shape (groups,)
        averaged: Tensor,  # shape (groups,)
        *,
        complete: bool,  # whether this rank has read all its gradients
        ranks: int,
        same_on_all_ranks: bool,  # whether `averaged` should be; otherwise its mean over ranks is used
        process_group: dist.ProcessGroup | None,
        shards: Shards | None,
    ) -> None:
        self._same_on_all_ranks = same_on_all_ranks
        self._groups = groups = summed.numel()
        self._own = averaged
        self._ranks = ranks
        if shards is not None:
            vector = torch.cat([summed, averaged, averaged.new_tensor([float(not complete)])])
            shards.add_shards(vector)
            summed, averaged, missing = vector.split([groups, groups, 1])
            complete = missing.item() == 0.0
        total = averaged.sum()
        header = torch.stack([total * total, torch.full_like(total, float(complete))])
        self._vector = torch.cat([header, summed, averaged])
        self._work: dist.Work | None = None
        self._result: ReducedStatistics | None = None
        if ranks > 1 and shards is not None:
            shards.add_replicas(self._vector)
        elif ranks > 1:
            self._work = dist.all_reduce(self._vector, group=process_group, async_op=True)

    def result(self, before_step: Tensor | None = None) -> ReducedStatistics:
        """Wait for the sums, and return them with `before_step`, in one transfer from the device."""
        if self._result is None or before_step is not None:
            self.wait()
            parts = [self._vector, self._own, *([] if before_step is None else [before_step])]
            self._result = self._interpret(torch.cat(parts).tolist())
        return self._result

    def wait(self) -> None:
        """Wait for the collective without reading its result, because it still uses the buffer."""
        # If this raises an error because a rank is lost, there is nothing to wait for any more.
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def _interpret(self, numbers: list[float]) -> ReducedStatistics:
        groups, end = self._groups, self._vector.numel()
        (sum_of_squares, complete), rest = numbers[:HEADER_SIZE], numbers[HEADER_SIZE:end]
        summed, averaged = rest[:groups], [each / self._ranks for each in rest[groups:]]
        own, before_step = numbers[end : end + groups], numbers[end + groups :]
        agreed = True
        if self._same_on_all_ranks:
            sqr_of_mean = sum(averaged) * sum(averaged)
            difference = abs(sum_of_squares / self._ranks - sqr_of_mean)
            agreed = difference <= AGREEMENT_TOLERANCE * sqr_of_mean
        complete_ranks = complete == self._ranks
        return ReducedStatistics(summed, averaged, complete_ranks, agreed, own, before_step or None)
