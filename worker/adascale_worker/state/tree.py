"""State as a JSON document and a list of tensors, without pickle.

`flatten` separates a tree of dicts, lists and values into its structure, a JSON document, and its tensors.
`unflatten` makes an equal tree of the two. Reading the document creates only the types that are listed in
`ALLOWED`, and runs no code from it.

The document has two members. `tensors` lists the type and shape of each tensor. `tree` is the tree: None,
bool, str, list, and numbers that JSON has are themselves, and every other value is an object with one member,
whose name is the value's type.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from adascale_worker.errors import CheckpointError, UnsupportedStateError

ALLOWED: Final = "tensors, numpy arrays, numbers, strings, bytes, lists, tuples, sets and dicts"
"""The types of values in a state, for messages. Subclasses are not allowed, except OrderedDict and Counter;
None, deque, torch.Size, torch.dtype and torch.device are."""

MAX_DEPTH: Final = 100
"""Levels of a tree. A tree that contains itself has more."""


Tree = dict[str, Any]
"""A state: dicts, lists and values of the types in `ALLOWED`, by names."""


class InvalidSpecError(CheckpointError):
    """A document is not one that `flatten` returns, or does not describe these tensors."""


@dataclass(frozen=True)
class TensorLayout:
    """Type and shape of a tensor, from which a receiver allocates it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def layout_of(tensor: Tensor) -> TensorLayout:
    """Return the type and shape of a tensor."""
    return TensorLayout(tensor.dtype, tuple(tensor.shape))


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor; that of a copy, if it is on a GPU."""
    flat = tensor.detach().cpu().reshape(-1)
    # A tensor without elements has no memory.
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def flatten(tree: Any) -> tuple[bytes, list[Tensor]]:
    """Separate a tree into its structure, a JSON document, and its tensors.

    These are detached, contiguous, on their own devices, and share memory with those of the tree wherever
    that is possible: copy them before they change.
    """
    encoder = _Encoder()
    encoded = encoder.encode(tree, "", 0)
    layouts = [[_name(tensor.dtype), list(tensor.shape)] for tensor in encoder.tensors]
    spec = json.dumps({"tree": encoded, "tensors": layouts}, separators=(",", ":"), allow_nan=False)
    return spec.encode("ascii"), encoder.tensors


def layouts(spec: bytes) -> list[TensorLayout]:
    """Return the type and shape of each tensor that belongs to a structure."""
    return _layouts(_parse(spec))


@dataclass(frozen=True)
class _Place:
    """A place of a tree that has a tensor."""

    path: tuple[str | int, ...]  # keys of mappings and positions in lists
    number: int
    # inside mappings only, in the order of its dimensions in memory, without gradients
    is_plain: bool


class TensorIndex:
    """Where the tensors of a structure are."""

    def __init__(self, spec: bytes) -> None:
        self._document = _parse(spec)
        self.layouts = _layouts(self._document)
        try:
            self._places = list(_places(self._document["tree"], (), is_plain=True))
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidSpecError(f"the description of the state is invalid: {error!r}") from error
        self.numbers = {place.path: place.number for place in self._places if place.is_plain}
        """The number of each tensor by its path, the keys of the mappings that lead to it.

        Without those inside other objects, in another order of dimensions, or that require gradients.
        """
        self.uses = Counter(place.number for place in self._places)
        """At how many places each tensor is, by its number."""
        if not all(type(each) is int and 0 <= each < len(self.layouts) for each in self.uses):
            raise InvalidSpecError("the description of the state has a tensor without a type")

    def value(self, key: str) -> Any:
        """Return the value of a key of the tree, which has no tensors; None if there is no such key."""
        try:
            ((_, items), *_) = self._document["tree"].items()
            return next((_decode(value, ()) for name, value in items if name == key), None)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InvalidSpecError(f"the description of the state is invalid: {error!r}") from error

    def names(self) -> list[str]:
        """Return a name for each tensor: its path in the state, the parts separated by dots."""
        names: dict[int, str] = {}
        used: set[str] = set()
        for place in self._places:
            if place.number not in names:
                name = ".".join(map(str, place.path)) or "state"
                names[place.number] = name = f"{name} {place.number}" if name in used else name
                used.add(name)
        return [names.get(number, f"tensor {number}") for number in range(len(self.layouts))]

    def with_layouts(self, layouts: Sequence[TensorLayout]) -> bytes:
        """Return the structure of an equal tree, whose tensors have other types and shapes."""
        tensors = [[_name(layout.dtype), list(layout.shape)] for layout in layouts]
        return json.dumps({**self._document, "tensors": tensors}, separators=(",", ":")).encode("ascii")


def _places(encoded: Any, path: tuple[str | int, ...], *, is_plain: bool) -> Iterator[_Place]:
    """Yield the places of an encoded value that have tensors."""
    if isinstance(encoded, list):
        for position, value in enumerate(encoded):
            yield from _places(value, (*path, position), is_plain=False)
    elif isinstance(encoded, dict):
        for kind, content in encoded.items():
            if kind in _TENSOR_TYPES:
                yield _Place(path, content, is_plain and encoded.keys() == {"tensor"})
            elif kind in _MAPPING_TYPES:
                for key, value in content:
                    part = key if isinstance(key, str | int) else "key"
                    yield from _places(value, (*path, part), is_plain=is_plain and part == key)
            else:
                yield from _places(content, path, is_plain=False)


def unflatten(spec: bytes, tensors: Sequence[Tensor]) -> Any:
    """Return the tree that `flatten` has separated into `spec` and `tensors`.

    The tree contains `tensors` themselves, or views of them, and arrays that share their memory.
    """
    document = _parse(spec)
    expected = _layouts(document)
    found = [layout_of(tensor) for tensor in tensors]
    if found != expected:
        raise InvalidSpecError(
            f"the state has {len(found)} tensors of other types or shapes than its description, "
            f"which has {len(expected)}"
        )
    try:
        return _decode(document["tree"], tensors)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InvalidSpecError(f"the description of the state is invalid: {error!r}") from error


def on_host(tree: Any) -> Any:
    """Return an equal tree whose tensors are on the host."""
    spec, tensors = flatten(tree)
    return unflatten(spec, [tensor.cpu() for tensor in tensors])


# -- encoding -------------------------------------------------------------------------------------------


class _Encoder:
    """Collects the tensors of a tree."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[object, int] = {}
        # Keeps what `_numbers` identifies by its address alive.
        self._sources: list[object] = []

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UnsupportedStateError(path, f"is more than {MAX_DEPTH} levels deep, or contains itself")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            # Python limits the length of decimal numbers in text.
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is list:
            return self._items(value, path, depth)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._items(value, path, depth)}
        if kind in _MAPPINGS:
            return self._mapping(value, path, depth)
        if kind is deque:
            return {"deque": [value.maxlen, self._items(value, path, depth)]}
        if kind in (Tensor, torch.nn.Parameter):
            return self._tensor(value, path)
        if kind is numpy.ndarray or isinstance(value, numpy.generic):
            return self._array(value, path)
        if kind in (bytes, bytearray):
            content = (
                torch.frombuffer(bytearray(value), dtype=torch.uint8)
                if value
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            return {kind.__name__: self._add(content)}
        if kind in _ATOMS:
            name, encode = _ATOMS[kind]
            return {name: encode(value)}
        raise UnsupportedStateError(
            path, f"is of type {_qualified(kind)}, which cannot be saved: use {ALLOWED}"
        )

    def _items(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.encode(value, f"{path}[{index}]", depth + 1) for index, value in enumerate(values)]

    def _mapping(self, value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
        items = []
        for key, member in value.items():
            if isinstance(key, (Tensor, numpy.ndarray)):
                raise UnsupportedStateError(
                    path, f"has a key of type {_qualified(type(key))}: use str or int"
                )
            encoded_key = self.encode(key, f"the key {key!r} of {path or 'the state'}", depth + 1)
            items.append([encoded_key, self.encode(member, f"{path}[{key!r}]", depth + 1)])
        name = _MAPPINGS[type(value)]
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        if not attributes:
            return {name: items}
        # torch.nn.Module.state_dict() keeps the versions of modules in an attribute of its OrderedDict.
        return {name: items, "attributes": self.encode(attributes, f"{path}.__dict__", depth + 1)}

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            kind = "quantized" if value.is_quantized else f"{value.layout}, on device {value.device}"
            raise UnsupportedStateError(
                path, f"is a tensor that cannot be saved ({kind}): use a dense tensor with data"
            )
        tensor = value.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        identity = (
            tensor.device,
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        self._sources.append(tensor)
        # A dense tensor in another order of dimensions, such as channels_last, keeps it, and is not copied.
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
        permuted = not tensor.is_contiguous() and tensor.permute(order).is_contiguous()
        number = self._numbers.get(identity)
        if number is None or tensor.numel() == 0:
            number = self._add(tensor.permute(order) if permuted else tensor.contiguous())
            self._numbers[identity] = number
        encoded: dict[str, Any] = {"parameter" if type(value) is torch.nn.Parameter else "tensor": number}
        if permuted:
            encoded["order"] = order
        if value.requires_grad:
            encoded["requires_grad"] = True
        return encoded

    def _array(self, value: Any, path: str) -> dict[str, Any]:
        try:
            # A copy, because a tensor cannot share the memory of a read-only array. A tensor's numbers have
            # their bytes in the order of this machine.
            native = value.dtype.newbyteorder("=")
            tensor = torch.from_numpy(numpy.array(value, dtype=native, order="C", copy=True))
        except TypeError:
            raise UnsupportedStateError(
                path, f"is a numpy value of dtype {value.dtype}, which cannot be saved: use a dtype of torch"
            ) from None
        return {"array" if isinstance(value, numpy.ndarray) else "scalar": self._add(tensor)}

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


_SEQUENCES: Final[dict[type, str]] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}
_ATOMS: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    complex: ("complex", lambda value: [str(value.real), str(value.imag)]),
    torch.dtype: ("dtype", lambda value: _name(value)),
    torch.device: ("device", str),
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _qualified(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# -- decoding -------------------------------------------------------------------------------------------


def _decode(encoded: Any, tensors: Sequence[Tensor]) -> Any:
    """Make the value of a tree that was encoded."""
    if isinstance(encoded, list):
        return [_decode(value, tensors) for value in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((name, content), *_) = encoded.items()
    if name in ("tensor", "parameter"):
        return _decode_tensor(name, tensors[content], encoded)
    if name in _MAPPING_TYPES:
        mapping: dict[Any, Any] = _MAPPING_TYPES[name]()
        for key, value in content:
            mapping[_decode(key, tensors)] = _decode(value, tensors)
        if "attributes" in encoded:
            vars(mapping).update(_decode(encoded["attributes"], tensors))
        return mapping
    if name in _SEQUENCE_TYPES:
        return _SEQUENCE_TYPES[name](_decode(content, tensors))
    if name == "deque":
        return deque(_decode(content[1], tensors), content[0])
    if name in ("array", "scalar"):
        array = tensors[content].cpu().numpy()
        return array if name == "array" else array[()]
    if name in ("bytes", "bytearray"):
        kind = bytes if name == "bytes" else bytearray
        return kind(tensors[content].cpu().numpy().tobytes())
    return _ATOM_DECODERS[name](content)


def _decode_tensor(name: str, tensor: Tensor, encoded: dict[str, Any]) -> Tensor:
    if "order" in encoded:
        order = encoded["order"]
        tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
    requires_grad = encoded.get("requires_grad", False)
    if name == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.detach().requires_grad_() if requires_grad else tensor


_TENSOR_TYPES: Final = {"tensor", "parameter", "array", "scalar", "bytes", "bytearray"}
_SEQUENCE_TYPES: Final[dict[str, type]] = {name: kind for kind, name in _SEQUENCES.items()}
_MAPPING_TYPES: Final[dict[str, type]] = {name: kind for kind, name in _MAPPINGS.items()}
_ATOM_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "dtype": lambda name: _dtype(name),
    "device": torch.device,
}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidSpecError(
            f"the description of the state has the type {name!r}, which torch does not have"
        )
    return dtype


def _parse(spec: bytes) -> dict[str, Any]:
    try:
        document = json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise InvalidSpecError(f"the description of the state is not JSON: {error}") from error
    if not isinstance(document, dict) or not {"tree", "tensors"} <= set(document):
        raise InvalidSpecError("the description of the state has no tree and tensors")
    return document


def _layouts(document: dict[str, Any]) -> list[TensorLayout]:
    try:
        return [
            TensorLayout(_dtype(name), tuple(int(length) for length in shape))
            for name, shape in document["tensors"]
        ]
    except (TypeError, ValueError) as error:
        raise InvalidSpecError(f"the description of the tensors is invalid: {error}") from error
