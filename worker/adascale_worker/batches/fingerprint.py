"""Numbers that tell records of a data set apart, the same in each process.

Python's `hash` and `pickle` differ between processes for equal values, such as sets of strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

_MAX_DEPTH = 20
_MAX_VALUES = 10_000
"""Values in a sample, beyond which it has no summary."""
_PART = 2**14
"""Bytes of each part of a large value: its begin, its end, and as many with equal distances in between.
Also elements of a large array in a summary."""
_FEW = 16
"""Integers of an array that are compared exactly."""
_MAX_ARRAYS = 32
"""Arrays in a summary. Of more, the shapes count only."""
_TOLERANCE = 0.02
"""Of the length of an array, by which a projection may differ."""

Summary = list[Any]
"""The digest of what is exact in a sample, then for each array three projections and its length."""

Found = list[tuple[int, Summary | None]]
"""Summaries of samples by index. None for what cannot be compared."""


def fingerprint(record: object) -> int:
    """Return 63 bits that depend on the contents of a record.

    Of large arrays, a part counts. Of an object whose contents are unknown, such as an open file, the type
    counts only.
    """
    return _Fingerprint().of(record)


def summary(sample: object) -> Summary | None:
    """Return what `agree` compares of a sample; None if its contents cannot be read.

    As `fingerprint`, but arrays may differ as by rounding on another device, and of an absolute path the
    name counts only.
    """
    found = _Summary()
    with suppress(Exception):
        # What an object does when its contents are read is not known.
        return [found.of(sample), *found.arrays]
    return None


def agree(one: Summary, other: Summary) -> bool:
    """Whether two samples are the same, apart from rounding."""
    if one[0] != other[0] or len(one) != len(other):
        return False
    return all(
        abs(left - right) <= _TOLERANCE * max(first[-1], second[-1]) + 1e-6
        for first, second in zip(one[1:], other[1:], strict=True)
        for left, right in zip(first, second, strict=True)
    )


class _Fingerprint:
    """Adds the contents of a record to a digest."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=8)
        self.update: Callable[[bytes], None] = self._digest.update

    def of(self, record: object) -> int:
        self.add(record, 0)
        return int.from_bytes(self._digest.digest(), "big") >> 1

    def add(self, value: object, depth: int) -> None:
        self.update(type(value).__name__.encode() + b"(")
        if depth > _MAX_DEPTH:
            return
        if value is None or isinstance(value, bool | int | float | complex | str | numpy.generic):
            self.add_scalar(value)
        elif isinstance(value, bytes | bytearray | memoryview):
            self.add_bytes(numpy.frombuffer(value, numpy.uint8))
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
            self._add_each(value.tolist(), depth)
        elif isinstance(value, Mapping):
            self._add_each(sorted(value.items(), key=_key_of), depth)
        elif isinstance(value, list | tuple):
            self._add_each(value, depth)
        elif isinstance(value, set | frozenset):
            self._add_each(sorted(type(self)().of(each) for each in value), depth)
        elif callable(getattr(value, "tobytes", None)):
            # Also images of PIL, and arrays.
            self.update(repr(getattr(value, "shape", getattr(value, "size", ""))).encode())
            self.add_array(value)
        elif hasattr(value, "__dict__"):
            self.add(vars(value), depth + 1)
        self.update(b")")

    def _add_each(self, values: Any, depth: int) -> None:
        for value in values:
            self.add(value, depth + 1)

    def _add_tensor(self, tensor: Tensor) -> None:
        self.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout is torch.strided and not tensor.is_quantized:
            self.add_tensor(tensor.detach().reshape(-1))

    def add_scalar(self, value: object) -> None:
        self.update(repr(value).encode(errors="surrogatepass"))

    def add_bytes(self, content: NDArray[numpy.uint8]) -> None:
        size = len(content)
        self.update(str(size).encode())
        if size > 4 * _PART:
            content = numpy.concatenate([content[:_PART], content[:: size // _PART], content[-_PART:]])
        self.update(content.tobytes())

    def add_array(self, array: Any) -> None:
        """Add the elements of an array, or of an image."""
        self.add_bytes(numpy.frombuffer(array.tobytes(), numpy.uint8))

    def add_tensor(self, flat: Tensor) -> None:
        """Add the elements of a tensor of one dimension."""
        self.add_bytes(flat.cpu().contiguous().view(torch.uint8).numpy())


class _Summary(_Fingerprint):
    """Adds what is exact in a sample to a digest, and collects projections of its arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[list[float]] = []
        self._left = _MAX_VALUES

    def add(self, value: object, depth: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("the sample has too many values")
        if isinstance(value, list | tuple) and len(value) > _FEW and {*map(type, value)} <= {int, float}:
            value = numpy.asarray(value, numpy.float64)
        super().add(value, depth)

    def add_scalar(self, value: object) -> None:
        if isinstance(value, float | complex | numpy.inexact):
            self._add_numbers(numpy.asarray([value]))
        elif isinstance(value, str) and value.startswith("/"):
            # Machines may have the data in different folders.
            super().add_scalar(value.rpartition("/")[2])
        else:
            super().add_scalar(value)

    def add_array(self, array: Any) -> None:
        if not isinstance(array, numpy.ndarray):
            array = numpy.frombuffer(array.tobytes(), numpy.uint8)
        self._add_numbers(array.reshape(-1))

    def add_tensor(self, flat: Tensor) -> None:
        part = flat[:: 1 + len(flat) // _PART]
        part = torch.view_as_real(part).reshape(-1) if part.is_complex() else part
        part = part.float() if part.dtype is torch.bfloat16 else part
        self._add_numbers(part.cpu().numpy())

    def _add_numbers(self, flat: NDArray[Any]) -> None:
        kind = flat.dtype.kind
        if kind not in "biufc" or (kind in "biu" and len(flat) <= _FEW):
            super().add_bytes(numpy.frombuffer(flat.tobytes(), numpy.uint8))
        elif len(self.arrays) < _MAX_ARRAYS:
            part = flat[:: 1 + len(flat) // _PART]
            numbers = numpy.ascontiguousarray(part).view(part.real.dtype).astype(numpy.float64)
            numbers = numpy.clip(numpy.nan_to_num(numbers, posinf=0.0, neginf=0.0), -1e100, 1e100)
            projections = _factors()[:, : len(numbers)] @ numbers
            length = numpy.linalg.norm(numbers)
            self.arrays.append([float(f"{each:.6g}") for each in (*projections, length)])


@lru_cache(maxsize=1)
def _factors() -> NDArray[numpy.float64]:
    """Return factors by which arrays are projected. The numbers of `RandomState` never change."""
    return numpy.random.RandomState(0).standard_normal((3, 2 * _PART))


def _key_of(item: tuple[object, object]) -> tuple[str, str]:
    return type(item[0]).__name__, repr(item[0])
