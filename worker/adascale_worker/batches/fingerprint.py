"""A number that tells records of a data set apart, the same in each process.

Python's `hash` and `pickle` differ between processes for equal values, such as sets of strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

_MAX_DEPTH = 20
_PART = 2**14
"""Bytes of each part of a large value: its begin, its end, and as many with equal distances in between."""


def fingerprint(record: object) -> int:
    """Return 63 bits that depend on the contents of a record.

    Of large arrays, a part counts. Of an object whose contents are unknown, such as an open file, the type
    counts only.
    """
    digest = blake2b(digest_size=8)
    _add(record, digest.update, 0)
    return int.from_bytes(digest.digest(), "big") >> 1


def _add(value: object, update: Callable[[bytes], None], depth: int) -> None:
    update(type(value).__name__.encode() + b"(")
    if depth > _MAX_DEPTH:
        return
    if value is None or isinstance(value, bool | int | float | complex | str | numpy.generic):
        update(repr(value).encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        _add_bytes(numpy.frombuffer(value, numpy.uint8), update)
    elif isinstance(value, Tensor):
        _add_tensor(value, update)
    elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        _add_each(value.tolist(), update, depth)
    elif isinstance(value, Mapping):
        _add_each(sorted(value.items(), key=_key_of), update, depth)
    elif isinstance(value, list | tuple):
        _add_each(value, update, depth)
    elif isinstance(value, set | frozenset):
        _add_each(sorted(map(fingerprint, value)), update, depth)
    elif callable(getattr(value, "tobytes", None)):
        # Also images of PIL, and arrays.
        update(repr(getattr(value, "shape", getattr(value, "size", ""))).encode())
        _add_bytes(numpy.frombuffer(value.tobytes(), numpy.uint8), update)  # type: ignore[attr-defined]
    elif hasattr(value, "__dict__"):
        _add(vars(value), update, depth + 1)
    update(b")")


def _add_each(values: Any, update: Callable[[bytes], None], depth: int) -> None:
    for value in values:
        _add(value, update, depth + 1)


def _key_of(item: tuple[object, object]) -> tuple[str, str]:
    return type(item[0]).__name__, repr(item[0])


def _add_tensor(tensor: Tensor, update: Callable[[bytes], None]) -> None:
    update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.layout is torch.strided and not tensor.is_quantized:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        _add_bytes(plain.view(torch.uint8).numpy(), update)


def _add_bytes(content: NDArray[numpy.uint8], update: Callable[[bytes], None]) -> None:
    size = len(content)
    update(str(size).encode())
    if size > 4 * _PART:
        content = numpy.concatenate([content[:_PART], content[:: size // _PART], content[-_PART:]])
    update(content.tobytes())
