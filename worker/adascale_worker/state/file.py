"""The file with a state, in the format of safetensors: https://github.com/huggingface/safetensors.

The file begins with the length of a JSON header (8 bytes, little-endian) and the header, which has the name,
type, shape and position of each tensor. The tensors follow. `__metadata__` of the header contains the rest of
the state (see `tree`). The library `safetensors` reads the file too, and returns the tensors by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from adascale_worker.state import tree
from adascale_worker.state.tree import InvalidSpecError, TensorLayout

METADATA_KEY: Final = "adascale"
_ALIGNMENT: Final = 8

TYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the types in the header. Tensors of other types, such as complex128, are saved as bytes."""


@dataclass(frozen=True)
class StateFileLayout:
    """Where the parts of a state are in its file."""

    header: bytes  # the first bytes of the file, up to the tensors
    spec: bytes
    layouts: Sequence[TensorLayout]  # type and shape of each tensor, in the order of `tree.flatten`
    # position of each tensor behind the header, in bytes; a multiple of its element's size
    offsets: Sequence[int]
    data_bytes: int  # length of the part behind the header

    def names_between(self, start: int, end: int) -> list[str]:
        """Return the names of the tensors that have bytes from `start` to `end` behind the header."""
        names = _names(self.spec, len(self.layouts))
        return [
            name
            for name, layout, offset in zip(names, self.layouts, self.offsets, strict=True)
            if offset < end and offset + layout.bytes > start
        ]


def offsets_of(layouts: Sequence[TensorLayout]) -> list[int]:
    """Return the position of each tensor behind the header, in bytes."""
    offsets, position = [0] * len(layouts), 0
    for index in _order(layouts):
        offsets[index] = position
        position += layouts[index].bytes
    return offsets


def data_bytes(layouts: Sequence[TensorLayout]) -> int:
    """Return the length of all tensors together."""
    return sum(layout.bytes for layout in layouts)


def _order(layouts: Sequence[TensorLayout]) -> list[int]:
    # Largest elements first: then each tensor is aligned without gaps, which the format does not allow.
    return sorted(range(len(layouts)), key=lambda index: -layouts[index].dtype.itemsize)


def lay_out(spec: bytes) -> StateFileLayout:
    """Return the layout of the file for a state."""
    layouts = tree.layouts(spec)
    order, offsets = _order(layouts), offsets_of(layouts)
    names = _names(spec, len(layouts))
    entries: dict[str, Any] = {"__metadata__": {METADATA_KEY: spec.decode("ascii")}}
    for index in order:
        layout, offset = layouts[index], offsets[index]
        is_known = layout.dtype in TYPE_NAMES
        entries[names[index]] = {
            "dtype": TYPE_NAMES[layout.dtype] if is_known else "U8",
            "shape": list(layout.shape) if is_known else [layout.bytes],
            "data_offsets": [offset, offset + layout.bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    return StateFileLayout(
        len(text).to_bytes(8, "little") + text, spec, layouts, offsets, data_bytes(layouts)
    )


def read_layout(header: bytes) -> StateFileLayout:
    """Return the layout that a file's header describes."""
    try:
        spec = json.loads(header[8:])["__metadata__"][METADATA_KEY].encode("ascii")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSpecError(f"its header is not that of a state: {error!r}") from error
    layout = lay_out(spec)
    if layout.header != header:
        raise InvalidSpecError("its header does not describe its tensors as this version does")
    return layout


def _names(spec: bytes, count: int) -> list[str]:
    """Return the name of each tensor: its path in the state, the parts separated by dots."""
    names = [f"tensor {index}" for index in range(count)]
    used: set[str] = set()

    def visit(encoded: Any, path: str) -> None:
        if isinstance(encoded, list):
            for index, value in enumerate(encoded):
                visit(value, f"{path}.{index}")
            return
        if not isinstance(encoded, dict):
            return
        for kind, content in encoded.items():
            if kind in ("dict", "ordered_dict"):
                for key, value in content:
                    visit(value, f"{path}.{key}" if isinstance(key, (str, int)) else f"{path}.key")
            elif isinstance(content, list):
                visit(content, path)
            elif kind in ("tensor", "parameter", "array", "scalar", "bytes", "bytearray"):
                name = path.removeprefix(".") or "state"
                name = name if name not in used else f"{name} {content}"
                used.add(name)
                if names[content].startswith("tensor "):
                    names[content] = name

    visit(json.loads(spec)["tree"], "")
    return names
