"""The order of samples: a function of the seed, the pass and the position in it, for any number of replicas.

A job reads one endless sequence: pass after pass over the data set, each pass in its own order. A step takes
the next K*b*a samples of it, for any K, b and a. So the number of samples consumed is the complete position
in the data. Each pass contains every sample exactly once, across all changes of replicas, and every step is
full: a step in which a pass ends continues with samples of the next pass.

Random numbers are functions of the seed and the position, too: the generators of a process are seeded at each
step. So a step draws the same numbers when it is made again, also by another process, and nothing of the
generators has to be saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import isqrt
from typing import Any

import numpy
import torch
from numpy.random import mtrand
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from adascale_worker.errors import DatasetError

# A permutation is computed for each position by itself, and needs no memory. A Feistel network over Z_a x
# Z_b, with a*b only a little above n, permutes at least n numbers. A result of n or more is permuted again
# until it is below n (cycle walking): Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
# The halves are added modulo a and b, as in their generalized construction. The round function is a hash of
# 32 bits.

Indices = NDArray[numpy.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_ROUNDS = 16
"""Fewer are enough for large n. With so many, each order of 6 samples is as frequent as the others."""

_FACTORS = numpy.uint64(_GOLDEN), numpy.uint64(0xD1B54A32D192ED03)
_HALF = numpy.uint64(32)


def seed_generators(seed: int, position: int, rank: int) -> None:
    """Seed the generators of Python, NumPy and torch, on a GPU only if it is in use, in 8 microseconds."""
    mixed = mixed_seed(seed, position, rank)
    _seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)


def _seed(number: int) -> None:
    # `torch.manual_seed` takes 20 times as long, and records its call until CUDA is initialized.
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


def mixed_seed(seed: int, position: int, rank: int) -> int:
    """Return the number by which `seed_generators` seeds."""
    return mix(mix(mix(seed) + position) + rank)


def mix(number: int) -> int:
    """Return 64 bits that depend on all bits of `number` (splitmix64; Steele et al., OOPSLA 2014)."""
    mixed = (number + _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def permute(positions: Indices, length: int, key: int) -> Indices:
    """Return the images of positions under a permutation of the numbers below `length`, at most 2**62."""
    limit = numpy.uint64(length)
    images = _network(positions.astype(numpy.uint64).ravel(), length, key)
    outside = numpy.flatnonzero(images >= limit)
    while len(outside):
        images[outside] = _network(images[outside], length, key)
        outside = outside[images[outside] >= limit]
    return images.astype(numpy.int64).reshape(positions.shape)


def _network(numbers: NDArray[numpy.uint64], length: int, key: int) -> NDArray[numpy.uint64]:
    """Permute the numbers below a*b, the first product of its form that is at least `length`."""
    a = isqrt(length - 1) + 1
    b = numpy.uint64(-(-length // a))
    left, right = numpy.divmod(numbers, b)
    sizes = numpy.uint64(a), b
    for round_key in _round_keys(key):
        left += _below(right, sizes[0], round_key)
        left -= sizes[0] * (left >= sizes[0])
        left, right, sizes = right, left, (sizes[1], sizes[0])
    return left * b + right


def _below(numbers: NDArray[numpy.uint64], size: numpy.uint64, key: numpy.uint64) -> NDArray[numpy.uint64]:
    """Return a hash of each number, below `size`, which is at most 2**32."""
    hashed = (numbers ^ key) * _FACTORS[0]
    hashed ^= hashed >> _HALF
    hashed *= _FACTORS[1]
    hashed >>= _HALF
    hashed *= size
    hashed >>= _HALF
    return hashed


@lru_cache(maxsize=16)
def _round_keys(key: int) -> tuple[numpy.uint64, ...]:
    return tuple(numpy.uint64(mix(key + number)) for number in range(_ROUNDS))


def pass_seed(seed: int, number: int) -> int:
    """Combine a seed and the number of a pass, so that nearby numbers give unrelated seeds.

    The factors are odd 64-bit constants, the steps of two Weyl sequences. The result has 63 bits, which
    `torch.Generator.manual_seed` and `numpy.random.default_rng` accept.
    """
    return ((seed + 1) * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**63


class Generators:
    """The random generators of Python, NumPy and torch on the CPU, with states of their own for a stream."""

    def __init__(self) -> None:
        self._own: tuple[Any, Any] | None = None
        self._numpy = numpy.random.MT19937(0)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the generators have the states of the stream."""
        outer, numpy_outer = self._get(), mtrand.get_bit_generator()
        if self._own is not None:
            self._set(self._own)
        # This takes a tenth of the time of `numpy.random.set_state`.
        mtrand.set_bit_generator(self._numpy)
        try:
            yield
        finally:
            self._own = self._get()
            self._set(outer)
            mtrand.set_bit_generator(numpy_outer)

    def seed(self, number: int) -> None:
        """Seed the generators, inside `used`."""
        _seed(number)

    def _get(self) -> tuple[Any, Any]:
        return random.getstate(), torch.default_generator.get_state()

    def _set(self, states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        torch.default_generator.set_state(states[1])


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


@dataclass(frozen=True)
class Origin:
    """Where training on the present data set began."""

    consumed: int = 0
    number: int = 0  # number of the pass that begins there
    epoch: int = 0  # number of the epoch that begins there
    progress: float = 0.0


@dataclass
class SampleSequence:
    """The endless sequence of sample indices of a data set, beginning at an origin.

    Two that are equal have the same samples at the same positions, and the same random numbers.
    """

    kind: str  # of the order, for messages
    samples: int  # of the data set
    length: int  # samples of a pass
    seed: int
    # Returns indices of a pass, by its number, from 0, and positions in it.
    of_pass: Callable[[int, Indices], Indices] = field(compare=False)
    key: object = None  # what else determines the order
    origin: Origin = Origin()

    def __getitem__(self, span: slice) -> list[int]:
        """Return the sample indices at positions `span.start` to `span.stop` of the sequence."""
        indices: list[int] = self.indices(numpy.arange(span.start, span.stop)).tolist()
        return indices

    def indices(self, positions: Indices) -> Indices:
        """Return the sample indices at positions of the sequence, of any shape."""
        passes, offsets = numpy.divmod(positions - self.origin.consumed, self.length)
        indices = numpy.empty_like(positions)
        for number in range(int(passes.min()), int(passes.max()) + 1) if passes.size else ():
            inside = passes == number
            indices[inside] = self.of_pass(self.origin.number + number, offsets[inside])
        return indices

    def pass_at(self, position: int, offsets: Indices) -> tuple[int, list[int]]:
        """Return the number of the pass at a position, and the sample indices at offsets of it."""
        number = self.origin.number + (position - self.origin.consumed) // self.length
        return number, self.of_pass(number, offsets).tolist()


def sequential(samples: int, seed: int) -> SampleSequence:
    """Return the order of the data set, in each pass."""
    return SampleSequence("sequential", samples, samples, seed, lambda _, offsets: offsets)


def shuffled(samples: int, seed: int) -> SampleSequence:
    """Return another pseudorandom permutation in each pass, computed for each position by itself."""
    return SampleSequence(
        "shuffled",
        samples,
        samples,
        seed,
        lambda number, offsets: permute(offsets, samples, pass_seed(seed, number)),
    )


def grouped(lengths: Lengths, seed: int, group_size: int) -> SampleSequence:
    """Return groups of samples of similar length, in another order in each pass, with each sample once.

    The shuffled samples are divided into windows of 50 groups. Those of a window are sorted by length and
    divided into groups, which are shuffled. So only the window that was used last stays in memory.
    """
    samples, values = len(lengths), numpy.asarray(lengths)
    order = shuffled(samples, seed)
    window_size = max(1, min(_GROUPS_PER_WINDOW, _LARGEST_WINDOW // group_size)) * group_size

    @lru_cache(maxsize=1)
    def sorted_window(number: int, window: int) -> Indices:
        start = window * window_size
        chosen = order.of_pass(number, numpy.arange(start, min(start + window_size, samples)))
        ordered = chosen[numpy.argsort(values[chosen], kind="stable")]
        groups = [ordered[first : first + group_size] for first in range(0, len(ordered), group_size)]
        key = mix(pass_seed(seed, number) + window)
        places = permute(numpy.arange(len(groups)), len(groups), key)
        return numpy.concatenate([groups[place] for place in places])

    def of_pass(number: int, offsets: Indices) -> Indices:
        windows, places = numpy.divmod(offsets, window_size)
        indices = numpy.empty_like(offsets)
        for window in numpy.unique(windows):
            inside = windows == window
            indices[inside] = sorted_window(number, int(window))[places[inside]]
        return indices

    key = group_size, blake2b(values.tobytes()).digest()
    return SampleSequence("grouped by length", samples, samples, seed, of_pass, key)


BY_PROGRAM = "given by the program"


def by_program(function: OrderFunction, samples: int, seed: int, number: int) -> SampleSequence:
    """Return the order of a function of the program, whose first call is for the present pass.

    All indices of the pass that was used last stay in memory.
    """

    @lru_cache(maxsize=1)
    def call(number: int) -> Indices:
        returned = function(number, pass_seed(seed, number))
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
        if len(indices) and (indices.min() < 0 or indices.max() >= samples):
            wrong = indices.min() if indices.min() < 0 else indices.max()
            raise DatasetError(
                f"order({number}, seed) returned the index {wrong}, but the data set has {samples} "
                f"samples: it must return indices from 0 to {samples - 1}"
            )
        return indices.astype(numpy.int64, copy=False)

    length = len(call(number))

    def of_pass(number: int, offsets: Indices) -> Indices:
        indices = call(number)
        if len(indices) != length:
            raise DatasetError(
                f"order({number}, seed) returned {len(indices)} indices, but {length} in another "
                "pass: return the same number for each pass, because the present pass follows from the "
                "number of samples consumed so far"
            )
        return indices[offsets]

    return SampleSequence(BY_PROGRAM, samples, length, seed, of_pass, function)


def order_of(
    dataset: Sized,
    shuffle: bool,
    order: OrderFunction | None,
    lengths: Lengths | None,
    *,
    seed: int,
    group: int,  # samples of similar length that come together
    number: int,  # of the present pass
) -> SampleSequence:
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
        return by_program(order, samples, seed, number)
    if lengths is not None:
        if len(lengths) != samples:
            raise DatasetError(
                f"dataloader() got {len(lengths)} lengths=, but the data set has {samples} samples: pass "
                "the length of each sample"
            )
        return grouped(lengths, seed, group)
    return shuffled(samples, seed) if shuffle else sequential(samples, seed)


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
