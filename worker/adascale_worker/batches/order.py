"""The order of the samples in each pass: a function of the seed, the pass and the position in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from adascale_worker.batches.permutation import Indices, permute
from adascale_worker.batches.seeding import mix
from adascale_worker.errors import DatasetError

OrderFunction = Callable[[int, int], Any]
"""Returns the indices of the samples of a pass. Gets the number of the pass, from 0, and a seed."""

Lengths = Sequence[float] | NDArray[Any] | Tensor
"""The length of each sample."""

_GROUPS_PER_WINDOW = 50
_LARGEST_WINDOW = 2**16


class Order(ABC):
    """The order of samples. Two that are equal have the same samples at the same positions."""

    kind: str

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of samples of a pass."""

    @abstractmethod
    def indices(self, number: int, offsets: Indices) -> Indices:
        """Return the indices of samples of a pass."""


@dataclass(frozen=True)
class SequentialOrder(Order):
    """The order of the data set, in each pass."""

    samples: int
    kind = "sequential"

    @property
    def length(self) -> int:
        """The length of the data set."""
        return self.samples

    def indices(self, number: int, offsets: Indices) -> Indices:  # noqa: ARG002
        """Return the positions themselves."""
        return offsets


@dataclass(frozen=True)
class ShuffledOrder(Order):
    """Another pseudorandom permutation in each pass."""

    samples: int
    seed: int
    kind = "shuffled"

    @property
    def length(self) -> int:
        """The length of the data set."""
        return self.samples

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
        self._source = lengths
        self._lengths = numpy.asarray(lengths)
        self._shuffled = ShuffledOrder(len(lengths), seed)
        self._group_size = group_size
        groups = max(1, min(_GROUPS_PER_WINDOW, _LARGEST_WINDOW // group_size))
        self._window_size = groups * group_size
        self._window: tuple[int, int, Indices] | None = None

    @property
    def length(self) -> int:
        """The length of the data set."""
        return self._shuffled.samples

    def indices(self, number: int, offsets: Indices) -> Indices:
        """Return indices of a pass. The last window is kept."""
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
        self._samples = samples
        self._seed = seed
        self._pass = number, self._call(number)
        self._length = len(self._pass[1])

    @property
    def length(self) -> int:
        """The number of indices that the function returns."""
        return self._length

    def indices(self, number: int, offsets: Indices) -> Indices:
        """Return indices of a pass. Those of the last pass are kept."""
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
        if len(indices) and (indices.min() < 0 or indices.max() >= self._samples):
            wrong = indices.min() if indices.min() < 0 else indices.max()
            raise DatasetError(
                f"order({number}, seed) returned the index {wrong}, but the data set has {self._samples} "
                f"samples: it must return indices from 0 to {self._samples - 1}"
            )
        return indices.astype(numpy.int64, copy=False)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ProgramOrder)
            and other._function == self._function
            and (other._samples, other._seed, other._length) == (self._samples, self._seed, self._length)
        )

    __hash__ = None  # type: ignore[assignment]


def pass_seed(seed: int, number: int) -> int:
    """Combine a seed and the number of a pass, so that nearby numbers give unrelated seeds.

    The factors are odd 64-bit constants, the steps of two Weyl sequences. The result has 63 bits, which
    `torch.Generator.manual_seed` and `numpy.random.default_rng` accept.
    """
    return ((seed + 1) * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**63
