"""The order of samples, which does not depend on the number of replicas.

A job reads one endless stream: pass after pass over the data set, each pass in its own order. A step takes
the next K*b*a samples of the stream, for any K, b and a. So the number of samples consumed is the complete
position in the data. Each pass contains every sample exactly once, across all changes of replicas, and
every step is full: a step in which a pass ends continues with samples of the next pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from adascale_core.batch import BatchPlan


class SampleStream:
    """The endless sequence of sample indices of a data set.

    Args:
        length: number of samples in the data set.
        seed: determines the order of each pass, together with the number of the pass.
        shuffle: whether passes are shuffled; otherwise each pass is in the order of the data set.
    """

    def __init__(self, length: int, seed: int, *, shuffle: bool = True) -> None:
        self.length = length
        self._seed = seed
        self._shuffle = shuffle
        self._pass = -1
        self._order: list[int] = []

    def __getitem__(self, span: slice) -> list[int]:
        """Return the sample indices at positions `span.start` to `span.stop` of the stream."""
        indices: list[int] = []
        position: int = span.start
        while position < span.stop:
            number, offset = divmod(position, self.length)
            piece = self._order_of(number)[offset : offset + span.stop - position]
            indices += piece
            position += len(piece)
        return indices

    def _order_of(self, number: int) -> list[int]:
        """Return the sample indices of pass `number`."""
        if number != self._pass:
            if self._shuffle:
                generator = torch.Generator().manual_seed(_combine(self._seed, number))
                self._order = torch.randperm(self.length, generator=generator).tolist()
            else:
                self._order = list(range(self.length))
            self._pass = number
        return self._order


def _combine(seed: int, number: int) -> int:
    """Combine two numbers into one seed, so that nearby numbers give unrelated seeds.

    The factors are odd 64-bit constants, the steps of two Weyl sequences.
    """
    return ((seed + 1) * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**63


class MicroBatches(Sampler[list[int]]):
    """The endless sequence of a replica's micro-batches, as lists of sample indices.

    Args:
        stream: the job's stream of samples.
        start: position in the stream of the first step's first sample.
        plan: replicas, local batch size and accumulation.
        rank: index of the replica.
    """

    def __init__(self, stream: SampleStream, start: int, plan: BatchPlan, rank: int) -> None:
        self._stream = stream
        self._start = start
        self._plan = plan
        self._rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        stride = self._plan.replicas * self._plan.local_bsz
        first = self._start + self._rank * self._plan.local_bsz
        while True:
            yield self._stream[first : first + self._plan.local_bsz]
            first += stride

    def __len__(self) -> int:
        raise TypeError("an epoch of an elastic trainer has no fixed number of batches")
