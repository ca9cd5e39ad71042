"""The order of samples, which does not depend on the number of replicas.

A job reads one endless stream: pass after pass over the data set, each pass in its own order. A step takes
the next K*b*a samples of the stream, for any K, b and a. So the number of samples consumed is the complete
position in the data. Each pass contains every sample exactly once, across all changes of replicas, and
every step is full: a step in which a pass ends continues with samples of the next pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
from torch.utils.data import Sampler

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.order import Order, SequentialOrder, ShuffledOrder
from adascale_worker.batches.permutation import Indices
from adascale_worker.batches.seeding import seed_generators
from adascale_worker.gradients.step_division import StepDivision, StepPlan

_READ_AHEAD = 1024
"""Samples whose indices are computed at once, because a call takes 0.2 ms for 1 or for 1,000."""


@dataclass(frozen=True)
class Origin:
    """Where training on the present data set began."""

    consumed: int = 0
    number: int = 0  # number of the pass that begins there
    epoch: int = 0  # number of the epoch that begins there
    progress: float = 0.0


class SampleStream:
    """The endless sequence of sample indices of a data set."""

    def __init__(
        self,
        length: int,
        seed: int,
        *,
        shuffle: bool = True,
        order: Order | None = None,
        origin: Origin | None = None,
    ) -> None:
        if order is None:
            order = ShuffledOrder(length, seed) if shuffle else SequentialOrder(length)
        self._order = order
        self._origin = origin or Origin()
        self.seed = seed
        self.length = order.length
        """Number of samples of a pass."""
        self._pass: tuple[int, Indices] | None = None
        """The last pass, if it is short."""

    @property
    def sequence(self) -> tuple[Order, Origin, int]:
        """What determines the sequence, and the random numbers that are drawn for it."""
        return self._order, self._origin, self.seed

    def __getitem__(self, span: slice) -> list[int]:
        """Return the sample indices at positions `span.start` to `span.stop` of the stream."""
        indices: list[int] = self.indices(numpy.arange(span.start, span.stop)).tolist()
        return indices

    def indices(self, positions: Indices) -> Indices:
        """Return the sample indices at positions of the stream, of any shape."""
        passes, offsets = numpy.divmod(positions - self._origin.consumed, self.length)
        indices = numpy.empty_like(positions)
        for number in range(int(passes.min()), int(passes.max()) + 1) if passes.size else ():
            inside = passes == number
            indices[inside] = self._indices(self._origin.number + number, offsets[inside])
        return indices

    def _indices(self, number: int, offsets: Indices) -> Indices:
        if self.length > _READ_AHEAD:
            return self._order.indices(number, offsets)
        if self._pass is None or self._pass[0] != number:
            self._pass = number, self._order.indices(number, numpy.arange(self.length))
        return self._pass[1][offsets]


class Batch(list[int]):
    """The sample indices of a micro-batch.

    A worker process of a DataLoader seeds its random number generators when it receives them, which is just
    before it loads the samples. So the numbers that a data set draws there depend on the position in the
    data, and not on what the process has loaded before. Without worker processes, the trainer seeds.
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
    """A place in the micro-batches of a replica."""

    sequence: tuple[object, ...]  # what determines the sequence of samples
    position: int  # position in the stream of the next step's, or micro-batch's, first sample of all replicas
    plan: BatchPlan  # replicas, local batch size and accumulation
    rank: int  # index of the replica

    def after(self, micro_batch: BatchPlan) -> Place:
        """Return the place after a micro-batch of a plan."""
        return replace(self, position=self.position + micro_batch.replicas * micro_batch.local_bsz)


class MicroBatches(Sampler[list[int]]):
    """The endless sequence of a replica's micro-batches, as lists of sample indices."""

    def __init__(
        self,
        stream: SampleStream,
        start: int,
        plan: BatchPlan,
        rank: int,
        division: StepDivision | None = None,
    ) -> None:
        self._division = division
        self.drawn: deque[tuple[StepPlan, int]] = deque()
        self.begin(stream, start, plan, rank)

    def begin(self, stream: SampleStream, start: int, plan: BatchPlan, rank: int) -> None:
        """Let the next iteration begin at another place. The arguments are the constructor's."""
        self._stream = stream
        self.place = Place(stream.sequence, start, plan, rank)

    def __iter__(self) -> Iterator[list[int]]:
        stream, place, division = self._stream, self.place, self._division
        plan = place.plan
        self.drawn.clear()
        together = plan.replicas * plan.local_bsz
        count = max(1, min(_READ_AHEAD // plan.local_bsz, stream.length // together))
        offsets = numpy.arange(count)[:, None] * together + numpy.arange(plan.local_bsz)
        while True:
            positions = place.position + place.rank * plan.local_bsz + offsets
            for first, indices in zip(
                positions[:, 0].tolist(), stream.indices(positions).tolist(), strict=True
            ):
                step = StepPlan(plan) if division is None else division.step_at(place.position, plan)
                size = step.plan.local_bsz
                for index in range(plan.local_bsz // size):
                    part = slice(index * size, (index + 1) * size)
                    self.drawn.append((step, index))
                    yield Batch(indices[part], stream.seed, first + part.start)
                place = place.after(plan)

    def __len__(self) -> int:
        raise TypeError("an epoch of an elastic trainer has no fixed number of batches")


class LoadedBatches(Iterator[Any]):
    """A replica's micro-batches as they are loaded, without end."""

    def __init__(
        self, batches: Iterator[Any], plan: BatchPlan, drawn: deque[tuple[StepPlan, int]] | None = None
    ) -> None:
        self._loaded = batches
        self._drawn = drawn
        self.step = StepPlan(plan)
        self.index = 0

    def __next__(self) -> Any:
        batch = next(self._loaded)
        if self._drawn is not None:
            self.step, self.index = self._drawn.popleft()
        return batch
