"""Random numbers and permutations that are functions of the program's seed and the position in the data.

So a step draws the same numbers when it is made again, also by another process, and nothing of the generators
has to be saved. The generators of a process are seeded at each step.

A permutation is computed for each position by itself, and needs no memory. A Feistel network over Z_a x Z_b,
with a*b only a little above n, permutes at least n numbers. A result of n or more is permuted again until it
is below n (cycle walking): Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002. The halves
are added modulo a and b, as in their generalized construction. The round function is a hash of 32 bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import isqrt
from typing import Any

import numpy
import torch
from numpy.random import mtrand
from numpy.typing import NDArray

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
    # `torch.manual_seed` takes 20 times as long, and records its call until CUDA is initialized.
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    numpy.random.seed(mixed & 0xFFFFFFFF)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)


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
        torch.default_generator.manual_seed(number)
        random.seed(number)
        numpy.random.seed(number & 0xFFFFFFFF)

    def _get(self) -> tuple[Any, Any]:
        return random.getstate(), torch.default_generator.get_state()

    def _set(self, states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        torch.default_generator.set_state(states[1])
