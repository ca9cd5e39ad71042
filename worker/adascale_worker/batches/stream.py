"""The order of samples, which does not depend on the number of replicas.

A job reads one endless stream: pass after pass over the data set, each pass in its own order. A step takes
the next K*b*a samples of the stream, for any K, b and a. So the number of samples consumed is the complete
position in the data. Each pass contains every sample exactly once, across all changes of replicas, and
every step is full: a step in which a pass ends continues with samples of the next pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Sampler

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.seeding import seed_generators


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

    @property
    def order(self) -> tuple[int, int, bool]:
        """What determines the sequence."""
        return self.length, self._seed, self._shuffle

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


class Batch(list[int]):
    """The sample indices of a micro-batch.

    A worker process of a DataLoader seeds its random number generators when it receives them, which is just
    before it loads the samples. So the numbers that a data set draws there depend on the position in the
    data, and not on what the process has loaded before. Without worker processes, the trainer seeds.

    Args:
        indices: the sample indices.
        seed: the seed of the stream.
        position: position in the stream of the first sample.
    """

    def __init__(self, indices: list[int], seed: int, position: int) -> None:
        super().__init__(indices)
        self._seed = seed
        self._position = position

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_batch, (list(self), self._seed, self._position)


def _receive_batch(indices: list[int], seed: int, position: int) -> list[int]:
    # Other numbers than those of a replica, whose training draws from the same seed and position.
    seed_generators(seed, position, rank=-1)
    return indices


@dataclass(frozen=True)
class Place:
    """A place in the micro-batches of a replica.

    Args:
        order: what determines the sequence of samples.
        position: position in the stream of the next step's, or micro-batch's, first sample of all replicas.
        plan: replicas, local batch size and accumulation.
        rank: index of the replica.
    """

    order: tuple[int, int, bool]
    position: int
    plan: BatchPlan
    rank: int

    def after_micro_batch(self) -> Place:
        """Return the place after the next micro-batch."""
        return replace(self, position=self.position + self.plan.replicas * self.plan.local_bsz)


class MicroBatches(Sampler[list[int]]):
    """The endless sequence of a replica's micro-batches, as lists of sample indices.

    Args:
        stream: the job's stream of samples.
        start: position in the stream of the first step's first sample.
        plan: replicas, local batch size and accumulation.
        rank: index of the replica.
    """

    def __init__(self, stream: SampleStream, start: int, plan: BatchPlan, rank: int) -> None:
        self.begin(stream, start, plan, rank)

    def begin(self, stream: SampleStream, start: int, plan: BatchPlan, rank: int) -> None:
        """Let the next iteration begin at another place. The arguments are those of the constructor."""
        self._stream = stream
        self.place = Place(stream.order, start, plan, rank)

    def __iter__(self) -> Iterator[list[int]]:
        stream, place = self._stream, self.place
        local_bsz = place.plan.local_bsz
        while True:
            first = place.position + place.rank * local_bsz
            yield Batch(stream[first : first + local_bsz], stream.order[1], first)
            place = place.after_micro_batch()

    def __len__(self) -> int:
        raise TypeError("an epoch of an elastic trainer has no fixed number of batches")
