"""The file with a state, and the copy of a state in memory that is written to such a file.

The format is that of safetensors: https://github.com/huggingface/safetensors.

The file begins with the length of a JSON header (8 bytes, little-endian) and the header, which has the name,
type, shape and position of each tensor. The tensors follow. `__metadata__` of the header contains the rest of
the state (see `tree`). The library `safetensors` reads the file too, and returns the tensors by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from adascale_storage import Part
from adascale_worker.state import tree
from adascale_worker.state.tree import InvalidSpecError, TensorIndex, TensorLayout, layout_of

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
    spec: bytes  # the structure of the state, from `tree.flatten`
    layouts: Sequence[TensorLayout]  # type and shape of each tensor, in the order of `tree.flatten`
    offsets: Sequence[
        int
    ]  # bytes behind the header at which each tensor begins; multiples of its element's size
    data_bytes: int  # length of the part behind the header

    def names_between(self, start: int, end: int) -> list[str]:
        """Return the names of the tensors that have bytes from `start` to `end` behind the header."""
        entries = json.loads(self.header[8:])
        del entries["__metadata__"]
        places = {name: entry["data_offsets"] for name, entry in entries.items()}
        return [name for name, (first, last) in places.items() if first < end and last > start]


def offsets_of(layouts: Sequence[TensorLayout]) -> list[int]:
    """Return the position of each tensor behind the header, in bytes."""
    offsets, position = [0] * len(layouts), 0
    # Largest elements first: then each tensor is aligned without gaps, which the format does not allow.
    for index in sorted(range(len(layouts)), key=lambda index: -layouts[index].dtype.itemsize):
        offsets[index] = position
        position += layouts[index].bytes
    return offsets


def data_bytes(layouts: Iterable[TensorLayout]) -> int:
    """Return the length of all tensors together."""
    return sum(layout.bytes for layout in layouts)


def lay_out(spec: bytes) -> StateFileLayout:
    """Return the layout of the file for a state."""
    index = TensorIndex(spec)
    named = dict(zip(index.names(), index.layouts, strict=True))
    header = encode_header(named, {METADATA_KEY: spec.decode("ascii")})
    return StateFileLayout(header, spec, index.layouts, offsets_of(index.layouts), data_bytes(index.layouts))


def encode_header(layouts: Mapping[str, TensorLayout], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file, up to the tensors."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    offsets = offsets_of([*layouts.values()])
    for (name, layout), offset in sorted(
        zip(layouts.items(), offsets, strict=True), key=lambda each: each[1]
    ):
        is_known = layout.dtype in TYPE_NAMES
        entries[name] = {
            "dtype": TYPE_NAMES[layout.dtype] if is_known else "U8",
            "shape": list(layout.shape) if is_known else [layout.bytes],
            "data_offsets": [offset, offset + layout.bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


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


class Snapshot:
    """A copy of a state, in memory that is allocated once and used again.

    From a GPU, `copy` launches the copies, and neither it nor training waits for them: what reads the copy
    does.
    """

    # It takes as much memory as the tensors of the state. For tensors on a GPU the memory is pinned, so that
    # they are copied at the full speed of the bus; torch rounds its size up to a power of two.
    #
    # Tensors that only the optimizer's step changes are copied in a stream of their own, beside the next
    # forward and backward passes, and `before_step` lets the step wait for that, on the GPU. The program may
    # change all other tensors at any time, so they are copied in its own stream.

    def __init__(self) -> None:
        self._spec = b""
        self._layouts: Sequence[TensorLayout] = ()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copied: dict[torch.device, torch.cuda.Event] = {}
        """Events that happen when all tensors of a GPU are copied."""
        self._sources: Sequence[Tensor] = ()
        """The tensors that are copied: their memory must not be used for anything else meanwhile."""
        self._step_must_wait = False

    def copy(
        self, state: Any, weights: Sequence[Tensor] = (), changed_by_step: Iterable[Tensor] = ()
    ) -> None:
        """Copy a state, in place of the last one.

        Nothing may change `changed_by_step` until `before_step` is called.
        """
        self.wait()
        self._spec, tensors = tree.flatten(state)
        self._prepare(tensors)
        self._sources = tensors
        later = {tensor.data_ptr() for tensor in changed_by_step if tensor.is_cuda and tensor.numel()}
        beside: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for view, tensor in zip(self._views, tensors, strict=True):
            if tensor.is_cuda:
                beside.setdefault(tensor.device, [])
            if tensor.data_ptr() in later:
                beside[tensor.device].append((view, tensor))
            else:
                view.copy_(tensor, non_blocking=True)
        for device, pairs in beside.items():
            self._copied[device] = self._copy_beside(device, pairs)
        self._step_must_wait = bool(later)
        addresses = {weight.data_ptr() for weight in weights}
        self._weights = [
            view
            for view, tensor in zip(self._views, tensors, strict=True)
            if tensor.data_ptr() in addresses and tensor.is_floating_point()
        ]

    def before_step(self) -> None:
        """Let what the program launches from now on wait for the copies, on the GPU. The program does not."""
        if self._step_must_wait:
            self._step_must_wait = False
            for device, copied in self._copied.items():
                torch.cuda.current_stream(device).wait_event(copied)

    def wait(self) -> None:
        """Wait until the state is copied. May be called in any thread."""
        for copied in self._copied.values():
            copied.synchronize()
        self._sources = ()

    @property
    def weights(self) -> Sequence[Tensor]:
        """The copies of the weights. Waits until the state is copied."""
        self.wait()
        return self._weights

    @property
    def spec(self) -> bytes:
        """The structure of the copied state, from `tree.flatten`."""
        return self._spec

    @property
    def data_bytes(self) -> int:
        """The length of its tensors together."""
        return data_bytes(self._layouts)

    @property
    def layout(self) -> StateFileLayout:
        """Where the parts of the copied state are in its file."""
        return lay_out(self._spec)

    def parts(self, chunk_bytes: int) -> Iterator[Part]:
        """Return the tensors of the copied state, as they follow the file's header, in parts.

        Waits until the state is copied.
        """
        self.wait()
        content = self._memory.numpy().data
        length = data_bytes(self._layouts)
        for start in range(0, length, chunk_bytes):
            yield content[start : min(start + chunk_bytes, length)]

    def _copy_beside(self, device: torch.device, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Copy tensors in a stream of their own, and return the event of the last copy."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for view, tensor in pairs:
                view.copy_(tensor, non_blocking=True)
        # The thread that waits for it sleeps.
        copied = torch.cuda.Event(blocking=True)
        copied.record(stream)
        return copied

    def _prepare(self, tensors: Sequence[Tensor]) -> None:
        """Divide the memory into a view for each tensor."""
        layouts = [layout_of(tensor) for tensor in tensors]
        pinned = any(tensor.is_cuda for tensor in tensors)
        length = data_bytes(layouts)
        is_large_enough = length <= self._memory.numel() and pinned == self._memory.is_pinned()
        if layouts == self._layouts and is_large_enough:
            return
        if not is_large_enough:
            # The old memory is released before more is allocated.
            self._layouts, self._views, self._memory = (), [], torch.empty(0, dtype=torch.uint8, device="cpu")
            self._memory = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._layouts = layouts
        self._views = [
            self._memory[offset : offset + layout.bytes].view(layout.dtype).view(layout.shape)
            for layout, offset in zip(layouts, offsets_of(layouts), strict=True)
        ]
