"""The one small all-reduce of a measured step.

One vector carries the statistics of all parameter groups and the flags of whoever trains. It starts when
the last backward pass ends and is waited for when somebody asks, so that it overlaps with what lies
between. All ranks read the same sums, to the bit, and so compute the same gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from adascale_worker.statistics.norms import Gradients, sqr_norms

AGREEMENT = 1e-8
"""Relative variance up to which ranks hold the same averaged gradients; kernels differ by less."""

HEADER = 2


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a step said, the same on all ranks, as tensors where the estimates lie.

    Attributes:
        first: per group, the sum over ranks of the first numbers given to `Exchange`: shape (groups,).
        second: per group, the mean over ranks of the second ones: shape (groups,).
        flags: sums over ranks, shape (flags,).
        complete: whether all ranks took part with all their gradients: no dimension.
        agreed: whether the second numbers were the same on all ranks: no dimension.
        now: what was read along with them, if anything: shape (groups,).
    """

    first: Tensor
    second: Tensor
    flags: Tensor
    complete: Tensor
    agreed: Tensor
    now: Tensor | None = None

    @property
    def finite(self) -> Tensor:
        """Whether all gradients were: no dimension."""
        return torch.isfinite(self.first.sum() + self.second.sum())


class Exchange:
    """Statistics on their way.

    Args:
        first: local numbers per parameter group, to be summed over ranks: shape (groups,).
        second: numbers per parameter group that are the same on all ranks: shape (groups,).
        flags: local flags, to be summed.
        ranks: number of ranks; 1 exchanges nothing.
        complete: whether this rank has seen all its gradients.
        replicated: whether the second numbers should be the same on all ranks; otherwise it is their mean
            that counts.
        process_group: of the ranks; None for the default one.
    """

    def __init__(
        self,
        first: Tensor,
        second: Tensor,
        flags: Sequence[float],
        *,
        ranks: int,
        complete: bool,
        replicated: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._replicated = replicated
        self._groups = first.numel()
        self._ranks = ranks
        total = second.sum()
        header = torch.stack([total * total, torch.full_like(total, float(complete))])
        parts = [header, first, second]
        if flags:
            # Each filled in: to make a tensor of them on a GPU is to wait for it.
            parts.append(torch.stack([torch.full_like(total, flag) for flag in flags]))
        self._vector = torch.cat(parts)
        self._work: dist.Work | None = None
        self._statistics: Statistics | None = None
        if ranks > 1:
            self._work = dist.all_reduce(self._vector, group=process_group, async_op=True)

    def statistics(self, home: torch.device, now: Tensor | None = None) -> Statistics:
        """Wait for the sums, and return them.

        Args:
            home: where to; from a GPU to the host this is the one synchronisation of a measured step.
            now: local numbers of the moment, to be read in the same transfer.
        """
        if self._statistics is None or now is not None or self._statistics.first.device != home:
            self.finish()
            numbers = (self._vector if now is None else torch.cat([self._vector, now])).to(home)
            end = self._vector.numel()
            self._statistics = self._interpret(numbers[:end], None if now is None else numbers[end:])
        return self._statistics

    def _interpret(self, sums: Tensor, now: Tensor | None) -> Statistics:
        middle, end = HEADER + self._groups, HEADER + 2 * self._groups
        second = sums[middle:end] / self._ranks
        complete = sums[1] == self._ranks
        agreed = torch.ones_like(complete)
        if self._replicated:
            sqr_of_mean = second.sum().square()
            agreed = (sums[0] / self._ranks - sqr_of_mean).abs() <= AGREEMENT * sqr_of_mean
        return Statistics(sums[HEADER:middle], second, sums[end:], complete, agreed, now)

    def finish(self) -> None:
        """Wait without reading, so that the buffer outlives the collective."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def sqr_norms_of_mean(
    gradients: Gradients,
    device: torch.device,
    *,
    ranks: int,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the squared norm of the mean over ranks of local gradients, per group: shape (groups,).

    An all-reduce of copies of all gradients: for a model whose own all-reduce loses some of them.
    """
    means: list[list[Tensor]] = []
    for group in gradients:
        if not group:
            means.append([])
            continue
        whole = torch.cat([gradient.reshape(-1) for gradient in group])
        dist.all_reduce(whole, group=process_group)
        means.append([whole])
    return sqr_norms(means, device) / ranks**2
