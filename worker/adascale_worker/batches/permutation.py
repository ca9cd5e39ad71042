"""A pseudorandom permutation that is computed for each position by itself, and needs no memory.

A Feistel network over Z_a x Z_b, with a*b only a little above n, permutes at least n numbers. A result of n
or more is permuted again until it is below n (cycle walking), which gives a permutation of the numbers below
n: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002. The halves are added modulo a and b,
as in their generalized construction. The round function is a hash of 32 bits by two multiplications.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy
from numpy.typing import NDArray

from adascale_worker.batches.seeding import mix

Indices = NDArray[numpy.int64]

_ROUNDS = 16
"""Fewer are enough for large n. With so many, each order of 6 samples is as frequent as the others."""

_FACTORS = numpy.uint64(0x9E3779B97F4A7C15), numpy.uint64(0xD1B54A32D192ED03)
_HALF = numpy.uint64(32)


def permute(positions: Indices, length: int, key: int) -> Indices:
    """Return the images of positions under a permutation of the numbers below `length`."""
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
