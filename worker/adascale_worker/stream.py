"""The order of samples, the same for any number of replicas.

A job reads one endless stream: the data set in an order of its own for every pass, pass after pass. A
step takes the next K*b*a samples of it, whatever K, b and a are, so one number, how many samples were
consumed, is the whole position. Hence every pass has each sample exactly once across any changes, and
every step is full: where a pass ends within a step, the next one begins in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from adascale_core.batch import BatchPlan


class SampleStream:
    """The endless sequence of sample indices of a data set.

    Args:
        length: samples in the data set.
        seed: with the number of a pass, determines its order.
        shuffle: whether passes are shuffled; otherwise each is in the data set's order.
    """

    def __init__(self, length: int, seed: int, *, shuffle: bool = True) -> None:
        self.length = length
        self._seed = seed
        self._shuffle = shuffle
        self._pass = -1
        self._order: list[int] = []

    def __getitem__(self, span: slice) -> list[int]:
        """The sample indices at positions `span.start` to `span.stop` of the stream."""
        indices: list[int] = []
        position: int = span.start
        while position < span.stop:
            number, offset = divmod(position, self.length)
            piece = self._order_of(number)[offset : offset + span.stop - position]
            indices += piece
            position += len(piece)
        return indices

    def _order_of(self, number: int) -> list[int]:
        if number != self._pass:
            if self._shuffle:
                generator = torch.Generator().manual_seed(_mix(self._seed, number))
                self._order = torch.randperm(self.length, generator=generator).tolist()
            else:
                self._order = list(range(self.length))
            self._pass = number
        return self._order


def _mix(seed: int, number: int) -> int:
    """One seed out of two numbers, so that near ones are not alike (Weyl steps of odd 64-bit constants)."""
    return ((seed + 1) * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**63


class MicroBatches(Sampler[list[int]]):
    """One replica's share of the stream, micro-batch by micro-batch, without end.

    Args:
        stream: the sequence of samples.
        start: samples consumed before the first step.
        plan: replicas, local batch size and accumulation.
        rank: which replica.
    """

    def __init__(self, stream: SampleStream, start: int, plan: BatchPlan, rank: int) -> None:
        self._stream = stream
        self._start = start
        self._plan = plan
        self._rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        share = self._plan.replicas * self._plan.local_bsz
        first = self._start + self._rank * self._plan.local_bsz
        while True:
            yield self._stream[first : first + self._plan.local_bsz]
            first += share

    def __len__(self) -> int:
        raise TypeError("an epoch of an elastic trainer has no fixed number of batches")
