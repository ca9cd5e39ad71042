"""The file with a state or a process's part of it, the copy that is written to it, and how it is read again.

The format is that of safetensors: https://github.com/huggingface/safetensors. The file begins with the length
of a JSON header (8 bytes, little-endian) and the header, which has the name, type, shape and position of each
tensor. The tensors follow. `__metadata__` of the header contains the rest of the state (see `tree`).

A sharded model has a file for each process of a replica, in which `KEY` of the state describes its parts. So
any number of processes can put the tensors together, or divide them among themselves again. Every byte is
verified before it is used, and a process reads only what contains its part.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from adascale_core.checkpoint_manifest import (
    InvalidManifestError,
    Manifest,
    StateFile,
    UnsupportedFormatError,
    manifest_file_name,
)
from adascale_storage import MissingFileError, Part, Storage
from adascale_worker.errors import UnusableCheckpointError
from adascale_worker.state import tree
from adascale_worker.state.tree import InvalidSpecError, TensorIndex, TensorLayout, Tree, layout_of
from adascale_worker.torch_private.autograd import version_of

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


class StateLayout(TensorIndex):
    """Where the parts of a state are in its file."""

    def __init__(self, spec: bytes) -> None:
        super().__init__(spec)
        named = dict(zip(self.names(), self.layouts, strict=True))
        self.header = encode_header(named, {METADATA_KEY: spec.decode("ascii")})
        """The first bytes of the file, up to the tensors."""
        self.offsets = offsets_of(self.layouts)
        """Bytes behind the header at which each tensor begins; multiples of its element's size."""
        self.data_bytes = data_bytes(self.layouts)
        """Length of the part behind the header."""
        self.file_bytes = len(self.header) + self.data_bytes


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


def read_layout(header: bytes) -> StateLayout:
    """Return the layout that a file's header describes."""
    try:
        spec = json.loads(header[8:])["__metadata__"][METADATA_KEY].encode("ascii")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSpecError(f"its header is not that of a state: {error!r}") from error
    layout = StateLayout(spec)
    if layout.header != header:
        raise InvalidSpecError("its header does not describe its tensors as this version does")
    return layout


def divide(memory: Tensor, layouts: Sequence[TensorLayout]) -> list[Tensor]:
    """Return a view for each tensor in memory that begins as the file does behind its header."""
    return [
        memory[offset : offset + layout.bytes].view(layout.dtype).view(layout.shape)
        for layout, offset in zip(layouts, offsets_of(layouts), strict=True)
    ]


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
        self.spec = b""
        """The structure of the copied state, from `tree.flatten`."""
        self._layouts: Sequence[TensorLayout] = ()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copied: dict[torch.device, torch.cuda.Event] = {}
        """Events that happen when all tensors of a GPU are copied."""
        self._sources: Sequence[Tensor] = ()
        """The tensors that are copied: their memory must not be used for anything else meanwhile."""
        self._left: list[tuple[Tensor, Tensor, int]] = []
        """Views with the tensors that `wait` copies, and their versions."""
        self.is_torn = False
        """Whether one of them has changed before it was copied."""
        self._step_must_wait = False

    def copy(
        self,
        state: Any,
        weights: Sequence[Tensor] = (),
        changed_by_step: Iterable[Tensor] = (),
        *,
        least_later: float = math.inf,
    ) -> None:
        """Copy a state, in place of the last one.

        Nothing may change `changed_by_step` until `before_step` is called. What is on the host and has more
        than `least_later` bytes is copied by `wait`.
        """
        self.wait()
        self.is_torn = False
        self.spec, tensors = tree.flatten(state)
        self._prepare(tensors)
        self._sources = tensors
        later = {tensor.data_ptr() for tensor in changed_by_step if tensor.is_cuda and tensor.numel()}
        beside: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for view, tensor in zip(self._views, tensors, strict=True):
            if tensor.is_cuda:
                beside.setdefault(tensor.device, [])
            if tensor.data_ptr() in later:
                beside[tensor.device].append((view, tensor))
            elif tensor.nbytes > least_later and not tensor.is_cuda:
                self._left.append((view, tensor, version_of(tensor)))
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
        """Copy what is left, and wait until the state is copied. May be called in any thread."""
        left, self._left = self._left, []
        for view, tensor, _ in left:
            view.copy_(tensor)
        self.is_torn = self.is_torn or any(version_of(tensor) != version for _, tensor, version in left)
        for copied in self._copied.values():
            copied.synchronize()
        self._sources = ()

    @property
    def weights(self) -> Sequence[Tensor]:
        """The copies of the weights. Waits until the state is copied."""
        self.wait()
        return self._weights

    @property
    def data_bytes(self) -> int:
        """The length of its tensors together."""
        return data_bytes(self._layouts)

    @property
    def layout(self) -> StateLayout:
        """Where the parts of the copied state are in its file."""
        return StateLayout(self.spec)

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
        self._views = divide(self._memory, layouts)


KEY: Final = "shards"
"""Key of the description in a state."""
_MODEL: Final = ("program", "model")
_OPTIMIZER: Final = ("program", "optimizer", "state")
PREVIOUS_GRADIENT: Final = ("program", "optimizer", "adascale", "statistics", "previous_gradient")
"""Where a state has the shards of the last gradient. It is not kept for another number of processes."""

Keys = tuple[str | int, ...]
"""The keys and positions that lead to a tensor of a state."""
Extent = tuple[int, int]
"""The first index along a dimension, and the one after the last."""


@dataclass(frozen=True)
class Division:
    """How a tensor is divided: along one dimension, in pieces of equal size; the last may be smaller."""

    dimension: int
    shape: tuple[int, ...]
    copies: int = 1  # of each piece: the first processes have the first copy, and so on

    def to_state(self) -> list[Any]:
        """Return the description, for a state."""
        return [self.dimension, list(self.shape), self.copies]

    @property
    def whole(self) -> Extent:
        """The extent of the whole tensor."""
        return 0, self.shape[self.dimension]

    def is_along(self, other: Division) -> bool:
        """Whether pieces of both are of the same tensor and dimension."""
        return (self.dimension, self.shape) == (other.dimension, other.shape)

    def pieces(self, count: int) -> int:
        """Return the number of pieces that `count` processes have."""
        return max(count // self.copies, 1)

    def extent(self, process: int, count: int) -> Extent:
        """Return which part one of `count` processes has."""
        length, pieces = self.shape[self.dimension], self.pieces(count)
        piece, number = -(-length // pieces), process % pieces
        return min(number * piece, length), min((number + 1) * piece, length)

    def part_shape(self, extent: Extent) -> tuple[int, ...]:
        """Return the shape of a part."""
        start, stop = extent
        return (*self.shape[: self.dimension], stop - start, *self.shape[self.dimension + 1 :])

    def ranges(self, source: Extent, target: Extent, itemsize: int) -> Iterator[tuple[int, int, int]]:
        """Yield the ranges of bytes that two contiguous parts share: position in each, and length."""
        start, stop = max(source[0], target[0]), min(source[1], target[1])
        inner = math.prod(self.shape[self.dimension + 1 :]) * itemsize
        outer = math.prod(self.shape[: self.dimension])
        if start >= stop or not inner * outer:
            return
        if source == target:
            yield 0, 0, outer * (stop - start) * inner
            return
        lengths = source[1] - source[0], target[1] - target[0]
        for index in range(outer):
            yield (
                (index * lengths[0] + start - source[0]) * inner,
                (index * lengths[1] + start - target[0]) * inner,
                (stop - start) * inner,
            )


@dataclass(frozen=True)
class Shards:
    """The parts of the sharded tensors that one process has."""

    process: int  # its index in the replica, from 0
    count: int  # number of processes of the replica
    model: Mapping[str, Division]  # by the name of the tensor
    optimizer: Mapping[int, Division]  # of what it keeps for a parameter, by the parameter's number

    def division_of(self, path: Sequence[str | int]) -> Division | None:
        """Return how the tensor at a place of a state is divided; None if it is not sharded."""
        if len(path) == len(_MODEL) + 1 and tuple(path[:-1]) == _MODEL:
            return self.model.get(str(path[-1]))
        if len(path) == len(_OPTIMIZER) + 2 and tuple(path[:-2]) == _OPTIMIZER:
            number = path[-2]
            return self.optimizer.get(number) if isinstance(number, int) else None
        return None

    def to_state(self) -> dict[str, Any]:
        """Return the description, for a state."""
        return {
            "process": self.process,
            "count": self.count,
            "model": {name: each.to_state() for name, each in self.model.items()},
            "optimizer": {number: each.to_state() for number, each in self.optimizer.items()},
        }

    @classmethod
    def from_state(cls, value: Any) -> Shards:
        """Return the shards that a state describes."""
        try:
            return cls(
                int(value["process"]),
                int(value["count"]),
                {str(name): _division(*each) for name, each in value["model"].items()},
                {int(number): _division(*each) for number, each in value["optimizer"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidSpecError(f"the description of its shards is invalid: {error!r}") from error


def without_previous_gradient(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without the shards of the last gradient."""
    copied = result = dict(state)
    for key in PREVIOUS_GRADIENT[:-1]:
        if not isinstance(copied.get(key), dict):
            return result
        copied[key] = dict(copied[key])
        copied = copied[key]
    copied[PREVIOUS_GRADIENT[-1]] = None
    return result


def _division(dimension: Any, shape: Any, copies: Any = 1) -> Division:
    division = Division(int(dimension), tuple(int(length) for length in shape), int(copies))
    if not 0 <= division.dimension < len(division.shape) or min(*division.shape, division.copies - 1) < 0:
        raise ValueError(f"dimension {dimension} of shape {shape}, copies {copies}")
    return division


def division_of(tensor: Any) -> Division | None:
    """Return how a DTensor is divided; None if a module has gathered it, so that all processes have it."""
    mesh, placement = tensor.device_mesh, tensor.placements[-1]
    if placement.is_replicate():
        return None
    return Division(int(placement.dim), tuple(tensor.shape), mesh.size() // mesh.size(-1))


def with_local(template: Any, local: Tensor) -> Tensor:
    """Return a DTensor like another one, with another tensor on this process, whose memory it uses."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=torch.Size(template.shape),
        stride=template.stride(),
    )


def converted(state: Tree, convert: Callable[[Tensor, object], Tensor]) -> Tree:
    """Return a state in which the tensors of the model and of the optimizer are converted."""
    program = dict(state["program"])
    optimizer = dict(program["optimizer"])
    model = type(program["model"])()
    for name, value in program["model"].items():
        model[name] = convert(value, name) if isinstance(value, Tensor) else value
    vars(model).update(vars(program["model"]) if hasattr(program["model"], "__dict__") else {})
    optimizer["state"] = {
        number: {
            key: convert(value, number) if isinstance(value, Tensor) else value for key, value in kept.items()
        }
        for number, kept in optimizer["state"].items()
    }
    program["model"], program["optimizer"] = model, optimizer
    return {**state, "program": program}


def local_part(tensor: Any) -> Tensor:
    """Return the shard of this process, if a tensor is sharded."""
    local: Tensor = tensor.to_local().contiguous() if hasattr(tensor, "to_local") else tensor
    return local.detach()


_PARALLEL_READS = 4
_Target = tuple[int, memoryview]
"""Where bytes of a file begin behind the header, and the memory that they are read into."""


class DamagedError(Exception):
    """A checkpoint differs from what was saved."""


def read_manifest(storage: Storage, number: int) -> Manifest:
    """Return the manifest of a checkpoint."""
    name = manifest_file_name(number)
    path = storage.path(name)
    try:
        return Manifest.from_json(json.loads(storage.read(name)))
    except UnsupportedFormatError as error:
        raise UnusableCheckpointError(f"{path}: {error}; use the version that wrote it") from error
    except MissingFileError as error:
        raise DamagedError(f"{path} is missing: {error}") from error
    except InvalidManifestError as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def read_state(storage: Storage, manifest: Manifest, own: Shards | None) -> Tree:
    """Return the state of a checkpoint, or the part that this process needs.

    Tensors that this process's model divides in another way are returned whole.
    """
    files = [_File(storage, manifest, file) for file in manifest.files]
    process, count = (0, 1) if own is None else (own.process, own.count)
    try:
        is_own = count == len(files) and (count == 1 or files[process].shards(process, count) == own)
        state = _read([files[process]], None) if is_own else _read(files, own)
    except InvalidSpecError as error:
        raise DamagedError(f"{files[0].path} is damaged: {error}") from error
    state.pop(KEY, None)
    return state if is_own else without_previous_gradient(state)


def _read(files: Sequence[_File], own: Shards | None) -> Tree:
    """Put together the part of a state that one process needs, from the files that others have saved.

    What is not sharded is that of the first file.
    """
    index = files[0].layout
    saved = files[0].shards(0, len(files)) if len(files) > 1 else None
    divided = _find_divided(index, saved, own, len(files))
    layouts = list(index.layouts)
    for number, (_, division, extent) in divided.items():
        layouts[number] = TensorLayout(layouts[number].dtype, division.part_shape(extent))
    tensors = [torch.empty(layout.shape, dtype=layout.dtype, device="cpu") for layout in layouts]
    targets = [
        (index.offsets[number], tree.memory_of(tensor))
        for number, tensor in enumerate(tensors)
        if number not in divided
    ]
    for process, file in enumerate(files):
        expected = None if saved is None else replace(saved, process=process)
        for number, (keys, division, extent) in divided.items():
            targets += _shard_of(file, expected, keys, division, extent, tensors[number])
        file.read_into(targets)
        targets = []
    state: Tree = tree.unflatten(index.with_layouts(layouts), tensors)
    return state


def _find_divided(
    index: TensorIndex, saved: Shards | None, own: Shards | None, count: int
) -> dict[int, tuple[Keys, Division, Extent]]:
    """Return, by number, the place of each tensor that is divided, how, and the part that is needed."""
    found: dict[int, tuple[Keys, Division, Extent]] = {}
    uses: Counter[int] = Counter()
    for keys, number in index.numbers.items():
        mine = own.division_of(keys) if own is not None else None
        division = saved.division_of(keys) if saved is not None else mine
        if division is None or index.layouts[number].shape != division.part_shape(division.extent(0, count)):
            continue
        extent = division.whole
        if own is not None and mine is not None and mine.is_along(division):
            extent = mine.extent(own.process, own.count)
        if number in found and found[number][1:] != (division, extent):
            extent = division.whole
        found[number] = keys, division, extent
        uses[number] += 1
    for number, (keys, division, _) in found.items():
        if uses[number] != index.uses[number]:
            # Another object of the program has it, too.
            found[number] = keys, division, division.whole
    return found


def _shard_of(
    file: _File, expected: Shards | None, keys: Keys, division: Division, needed: Extent, tensor: Tensor
) -> Iterator[_Target]:
    """Yield what is read of a divided tensor from the file of a process, without its header if nothing is."""
    process, count = (0, 1) if expected is None else (expected.process, expected.count)
    if process >= division.pieces(count):
        return  # It has a copy of what an earlier process has.
    source = division.extent(process, count)
    ranges = list(division.ranges(source, needed, tensor.dtype.itemsize))
    if not ranges:
        return
    if process and file.shards(process, count) != expected:
        raise DamagedError(f"{file.path} is damaged: its shards are not those of the first file")
    number = file.layout.numbers.get(keys, -1)
    found = file.layout.layouts[number] if number >= 0 else None
    if found != TensorLayout(tensor.dtype, division.part_shape(source)):
        raise DamagedError(
            f"{file.path} is damaged: it has no shard of {'.'.join(map(str, keys))}, or another one"
        )
    offset, memory = file.layout.offsets[number], tree.memory_of(tensor)
    for position, target, length in ranges:
        yield offset + position, memory[target : target + length]


class _File:
    """A file with a state, or with the part of one process."""

    def __init__(self, storage: Storage, manifest: Manifest, file: StateFile) -> None:
        self._storage = storage
        self._file = file
        self._chunk_bytes = manifest.chunk_bytes
        self.path = storage.path(file.state)

    @cached_property
    def layout(self) -> StateLayout:
        """Where its tensors are, in the file and in the state. Read once."""
        header = self._read_verified(0)
        try:
            layout = read_layout(header)
        except InvalidSpecError as error:
            raise DamagedError(f"{self.path} is damaged: {error}") from error
        file = self._file
        if (file.bytes, file.header_bytes) != (layout.file_bytes, len(layout.header)):
            raise DamagedError(
                f"{self.path} is damaged: its tensors need {layout.file_bytes} bytes, not {file.bytes}"
            )
        parts = -(-layout.data_bytes // self._chunk_bytes)
        if len(file.sha256) != parts + 1:
            raise DamagedError(f"{self.path} is damaged: its manifest has {len(file.sha256)} checksums")
        return layout

    @cached_property
    def _described(self) -> Shards:
        return Shards.from_state(self.layout.value(KEY))

    def shards(self, process: int, count: int) -> Shards:
        """Return what it describes as its shards."""
        found = self._described
        if (found.process, found.count) != (process, count):
            raise DamagedError(
                f"{self.path} is damaged: it is of process {found.process} of {found.count}, not {process} "
                f"of {count}"
            )
        return found

    def read_into(self, targets: Iterable[_Target]) -> None:
        """Read bytes, several parts at the same time, which are verified one by one."""
        needed: dict[int, list[_Target]] = defaultdict(list)
        """By the number of a part, where in it bytes begin, and their memory."""
        for offset, memory in targets:
            while memory:
                index, position = divmod(offset, self._chunk_bytes)
                memory_in_part = memory[: self._chunk_bytes - position]
                needed[index].append((position, memory_in_part))
                offset, memory = offset + len(memory_in_part), memory[len(memory_in_part) :]

        def read(index: int) -> None:
            content = memoryview(self._read_verified(index + 1))
            for position, memory in needed[index]:
                memory[:] = content[position : position + len(memory)]

        with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="adascale-read") as pool:
            # In order, so that the first damage is reported. Parts after it are not read.
            deque(pool.map(read, sorted(needed)), maxlen=0)

    def _read_verified(self, index: int) -> bytes:
        """Return the header (index 0) or a part of the file."""
        file = self._file
        if index == 0:
            start, end = 0, file.header_bytes
        else:
            start = file.header_bytes + (index - 1) * self._chunk_bytes
            end = min(start + self._chunk_bytes, file.bytes)
        what = f"{self.path} is damaged in bytes {start:,} to {end:,}"
        try:
            content = self._storage.read(file.state, start, end)
        except MissingFileError as error:
            raise DamagedError(f"{self.path} is missing: {error}") from error
        if len(content) != end - start:
            raise DamagedError(f"{what}: it ends after {start + len(content):,} of {file.bytes:,} bytes")
        found = hashlib.sha256(content).hexdigest()
        if found != file.sha256[index]:
            raise DamagedError(
                f"{what}: their SHA-256 is {found[:12]}..., expected {file.sha256[index][:12]}..."
            )
        return content
