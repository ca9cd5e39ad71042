"""The order of samples: a function of the seed, the pass and the position in it, for any number of replicas.

A job reads one endless sequence: pass after pass over the data set, each pass in its own order. A step takes
the next K*b*a samples of it, for any K, b and a. So the number of samples consumed is the complete position
in the data. Each pass contains every sample exactly once, across all changes of replicas, and every step is
full: a step in which a pass ends continues with samples of the next pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from adascale_worker.batches.seeding import Indices, mix, pass_seed, permute
from adascale_worker.errors import DatasetError

OrderFunction = Callable[[int, int], Any]
"""Returns the indices of the samples of a pass. Gets the number of the pass, from 0, and a seed."""

Lengths = Sequence[float] | NDArray[Any] | Tensor
"""The length of each sample."""

READ_AHEAD = 1024
"""Samples whose indices are computed at once, because a call takes 0.2 ms for 1 or for 1,000."""
_GROUPS_PER_WINDOW = 50
_LARGEST_WINDOW = 2**16

RANDOM_ORDER = (
    "trainer.dataloader(dataset, order=lambda number, seed: torch.multinomial(weights, len(dataset), "
    "replacement=True, generator=torch.Generator().manual_seed(seed)))"
)


class Order(ABC):
    """The order of samples. Two that are equal have the same samples at the same positions."""

    kind: str  # for messages
    samples: int  # of the data set

    @property
    def length(self) -> int:
        """The number of samples of a pass."""
        return self.samples

    @abstractmethod
    def indices(self, number: int, offsets: Indices) -> Indices:
        """Return the indices of the samples at positions in a pass, whose number counts from 0."""


@dataclass(frozen=True)
class SequentialOrder(Order):
    """The order of the data set, in each pass."""

    samples: int
    kind = "sequential"

    def indices(self, number: int, offsets: Indices) -> Indices:  # noqa: ARG002
        """Return the positions themselves."""
        return offsets


@dataclass(frozen=True)
class ShuffledOrder(Order):
    """Another pseudorandom permutation in each pass."""

    samples: int
    seed: int
    kind = "shuffled"

    def indices(self, number: int, offsets: Indices) -> Indices:
        """Return indices of a pass, computed for each position by itself."""
        return permute(offsets, self.samples, pass_seed(self.seed, number))


class GroupedOrder(Order):
    """Groups of samples of similar length, in another order in each pass, with each sample once.

    The shuffled samples are divided into windows of 50 groups. Those of a window are sorted by length and
    divided into groups, which are shuffled. So only a window is sorted at once.
    """

    kind = "grouped by length"

    def __init__(self, lengths: Lengths, seed: int, group_size: int) -> None:
        self.samples = len(lengths)
        self._source = lengths
        self._lengths = numpy.asarray(lengths)
        self._shuffled = ShuffledOrder(len(lengths), seed)
        self._group_size = group_size
        groups = max(1, min(_GROUPS_PER_WINDOW, _LARGEST_WINDOW // group_size))
        self._window_size = groups * group_size
        self._window: tuple[int, int, Indices] | None = None

    def indices(self, number: int, offsets: Indices) -> Indices:
        """Return indices of a pass. The window that was used last stays in memory."""
        windows, places = numpy.divmod(offsets, self._window_size)
        indices = numpy.empty_like(offsets)
        for window in numpy.unique(windows):
            inside = windows == window
            indices[inside] = self._sorted_window(number, int(window))[places[inside]]
        return indices

    def _sorted_window(self, number: int, window: int) -> Indices:
        if self._window is None or self._window[:2] != (number, window):
            start = window * self._window_size
            offsets = numpy.arange(start, min(start + self._window_size, self.length))
            shuffled = self._shuffled.indices(number, offsets)
            ordered = shuffled[numpy.argsort(self._lengths[shuffled], kind="stable")]
            groups = [
                ordered[first : first + self._group_size]
                for first in range(0, len(ordered), self._group_size)
            ]
            key = mix(pass_seed(self._shuffled.seed, number) + window)
            places = permute(numpy.arange(len(groups)), len(groups), key)
            self._window = number, window, numpy.concatenate([groups[place] for place in places])
        return self._window[2]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, GroupedOrder)
            and other._source is self._source
            and other._shuffled == self._shuffled
            and other._group_size == self._group_size
        )

    __hash__ = None  # type: ignore[assignment]


class ProgramOrder(Order):
    """An order that the program gives."""

    kind = "given by the program"

    def __init__(self, function: OrderFunction, samples: int, seed: int, number: int) -> None:
        self._function = function
        self.samples = samples
        self._seed = seed
        self._pass = number, self._call(number)
        self._length = len(self._pass[1])

    @property
    def length(self) -> int:
        """The number of indices that the function returns."""
        return self._length

    def indices(self, number: int, offsets: Indices) -> Indices:
        """Return indices of a pass. All indices of the pass that was used last stay in memory."""
        if self._pass[0] != number:
            indices = self._call(number)
            if len(indices) != self._length:
                raise DatasetError(
                    f"order({number}, seed) returned {len(indices)} indices, but {self._length} in another "
                    "pass: return the same number for each pass, because the present pass follows from the "
                    "number of samples consumed so far"
                )
            self._pass = number, indices
        return self._pass[1][offsets]

    def _call(self, number: int) -> Indices:
        returned = self._function(number, pass_seed(self._seed, number))
        if isinstance(returned, Iterable) and not hasattr(returned, "__len__"):
            returned = list(returned)
        try:
            indices = numpy.asarray(returned)
        except (TypeError, ValueError, RuntimeError):
            indices = numpy.empty(0, dtype=object)
        if indices.ndim != 1 or (len(indices) and indices.dtype.kind not in "iu"):
            raise DatasetError(
                f"order({number}, seed) returned an object of type {type(returned).__name__}: it must "
                "return the indices of the samples of a pass, as a list of integers, a NumPy array or a "
                "tensor of dimension 1 on the CPU"
            )
        if len(indices) and (indices.min() < 0 or indices.max() >= self.samples):
            wrong = indices.min() if indices.min() < 0 else indices.max()
            raise DatasetError(
                f"order({number}, seed) returned the index {wrong}, but the data set has {self.samples} "
                f"samples: it must return indices from 0 to {self.samples - 1}"
            )
        return indices.astype(numpy.int64, copy=False)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ProgramOrder)
            and other._function == self._function
            and (other.samples, other._seed, other._length) == (self.samples, self._seed, self._length)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Origin:
    """Where training on the present data set began."""

    consumed: int = 0
    number: int = 0  # number of the pass that begins there
    epoch: int = 0  # number of the epoch that begins there
    progress: float = 0.0


class SampleSequence:
    """The endless sequence of sample indices of a data set, beginning at an origin."""

    def __init__(
        self,
        length: int,
        seed: int,
        *,
        order: Order | None = None,
        origin: Origin | None = None,
    ) -> None:
        self._order = order = order or ShuffledOrder(length, seed)
        self._origin = origin or Origin()
        self.seed = seed
        self.length = order.length
        """Number of samples of a pass."""
        self.samples = order.samples
        """Number of samples of the data set."""
        self._pass: tuple[int, Indices] | None = None  # the last one, if passes are short

    @property
    def sequence(self) -> tuple[Order, Origin, int]:
        """What determines the sequence, and the random numbers that are drawn with it."""
        return self._order, self._origin, self.seed

    def __getitem__(self, span: slice) -> list[int]:
        """Return the sample indices at positions `span.start` to `span.stop` of the sequence."""
        indices: list[int] = self.indices(numpy.arange(span.start, span.stop)).tolist()
        return indices

    def indices(self, positions: Indices) -> Indices:
        """Return the sample indices at positions of the sequence, of any shape."""
        passes, offsets = numpy.divmod(positions - self._origin.consumed, self.length)
        indices = numpy.empty_like(positions)
        for number in range(int(passes.min()), int(passes.max()) + 1) if passes.size else ():
            inside = passes == number
            indices[inside] = self._indices(self._origin.number + number, offsets[inside])
        return indices

    def pass_at(self, position: int, offsets: Indices) -> tuple[int, list[int]]:
        """Return the number of the pass at a position, and the sample indices at offsets of it."""
        number = self._origin.number + (position - self._origin.consumed) // self.length
        return number, self._indices(number, offsets).tolist()

    def _indices(self, number: int, offsets: Indices) -> Indices:
        if self.length > READ_AHEAD:
            return self._order.indices(number, offsets)
        if self._pass is None or self._pass[0] != number:
            self._pass = number, self._order.indices(number, numpy.arange(self.length))
        return self._pass[1][offsets]


def order_of(
    dataset: Sized,
    shuffle: bool,
    order: OrderFunction | None,
    lengths: Lengths | None,
    *,
    seed: int,
    group: int,  # samples of similar length that come together
    number: int,  # of the present pass
) -> Order:
    """Return the order of the samples of a data set."""
    samples = indexed_length(dataset)
    if samples == 0:
        raise DatasetError(
            f"the data set (type {type(dataset).__name__}) has 0 samples: check the path of the data, "
            "and what filters it"
        )
    if (order is not None) + (lengths is not None) + (not shuffle) > 1:
        raise DatasetError(
            "dataloader() got more than one of order=, lengths= and shuffle=False, each of which "
            "determines the order of the samples: pass only one of them"
        )
    if order is not None:
        if not callable(order):
            raise DatasetError(
                f"dataloader() got order= of type {type(order).__name__}: it must be a function of the "
                "number of the pass and a seed that returns indices of samples, such as\n"
                f"    {RANDOM_ORDER}"
            )
        return ProgramOrder(order, samples, seed, number)
    if lengths is not None:
        if len(lengths) != samples:
            raise DatasetError(
                f"dataloader() got {len(lengths)} lengths=, but the data set has {samples} samples: pass "
                "the length of each sample"
            )
        return GroupedOrder(lengths, seed, group)
    return ShuffledOrder(samples, seed) if shuffle else SequentialOrder(samples)


def is_stream(dataset: object) -> bool:
    """Whether a data set is iterable, and has no length or no items by index."""
    if isinstance(dataset, DataLoader):
        return False
    has_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_index)


def indexed_length(dataset: Sized) -> int:
    """Return the length of a data set that has one, and items by index."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DatasetError(
            "got a DataLoader in place of a data set, but the trainer makes the DataLoader itself: pass "
            "loader.dataset, and options such as num_workers and collate_fn"
        )
    lacks = "length" if not hasattr(dataset, "__len__") else "items by index" if is_stream(dataset) else None
    if lacks is None:
        try:
            return len(dataset)
        except TypeError:
            lacks = "length"
    raise DatasetError(
        f"the data set (type {kind}) has no {lacks}: pass one with __len__ and __getitem__, or for training "
        "one with __iter__, which is read as a stream"
    )
