"""Reads the state of a checkpoint, from one file or from those of the processes that have saved it.

Every byte is verified before it is used. A process that needs a part of a state reads only the parts of the
files that contain it.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from adascale_core.checkpoint_manifest import (
    InvalidManifestError,
    Manifest,
    StateFile,
    UnsupportedFormatError,
    manifest_file_name,
)
from adascale_storage import MissingFileError, Storage
from adascale_worker.errors import UnusableCheckpointError
from adascale_worker.state import tree
from adascale_worker.state.file import StateFileLayout, read_layout
from adascale_worker.state.shards import (
    KEY,
    PREVIOUS_GRADIENT,
    Division,
    Extent,
    Shards,
    without_previous_gradient,
)
from adascale_worker.state.tree import InvalidSpecError, TensorIndex, TensorLayout, Tree

_PARALLEL_READS = 4


class DamagedError(Exception):
    """A checkpoint differs from what was saved."""


@dataclass(frozen=True)
class _Target:
    """Memory that bytes of a file are read into."""

    offset: int  # position of the bytes behind the header
    memory: memoryview

    @property
    def end(self) -> int:
        """Position behind the bytes."""
        return self.offset + len(self.memory)


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
    first = files[0]
    try:
        process, count = (0, 1) if own is None else (own.process, own.count)
        if count == len(files) and (count == 1 or files[process].shards(process, count) == own):
            return _without_description(files[process].read(process, count))
        return _Regrouping(files, own).read()
    except InvalidSpecError as error:
        raise DamagedError(f"{first.path} is damaged: {error}") from error


class _Regrouping:
    """Puts together the part of a state that one process needs, from the parts that others have saved.

    What is not sharded is that of the first process.
    """

    def __init__(self, files: Sequence[_File], own: Shards | None) -> None:
        self._files = files
        self._own = own
        self._index = files[0].index
        self._saved = files[0].shards(0, len(files)) if len(files) > 1 else None
        self._divided = self._find_divided()

    def _find_divided(self) -> dict[int, tuple[tuple[str | int, ...], Division, Extent]]:
        """Return, by number, the place of each tensor that is divided, how, and the part that is needed."""
        count = len(self._files)
        found: dict[int, tuple[tuple[str | int, ...], Division, Extent]] = {}
        uses: dict[int, int] = {}
        for path, number in self._index.numbers.items():
            layout = self._index.layouts[number]
            mine = self._own.division_of(path) if self._own is not None else None
            division = self._saved.division_of(path) if self._saved is not None else mine
            if division is None or layout.shape != division.part_shape(division.extent(0, count)):
                continue
            extent = division.whole
            if self._own is not None and mine is not None and mine.is_along(division):
                extent = mine.extent(self._own.process, self._own.count)
            before = found.get(number)
            if before is not None and before[1:] != (division, extent):
                extent = division.whole
            found[number] = path, division, extent
            uses[number] = uses.get(number, 0) + 1
        for number, (path, division, _) in found.items():
            if uses[number] != self._index.uses[number]:
                # Another object of the program has it, too.
                found[number] = path, division, division.whole
        return found

    def read(self) -> Tree:
        index, divided = self._index, self._divided
        layouts = list(index.layouts)
        for number, (_, division, extent) in divided.items():
            layouts[number] = TensorLayout(layouts[number].dtype, division.part_shape(extent))
        tensors = [torch.empty(layout.shape, dtype=layout.dtype, device="cpu") for layout in layouts]
        unused = index.numbers_below(PREVIOUS_GRADIENT)
        whole = [number for number in range(len(layouts)) if number not in divided and number not in unused]
        for process, file in enumerate(self._files):
            targets = [target for number in whole for target in file.whole(number, tensors[number])]
            whole = []
            targets += self._shards_of(process, file, tensors)
            file.read_into(targets)
        state: Tree = tree.unflatten(index.with_layouts(layouts), tensors)
        return _without_description(without_previous_gradient(state))

    def _shards_of(self, process: int, file: _File, tensors: Sequence[Tensor]) -> Iterator[_Target]:
        """Yield what is read from the file of a process. Without anything, not even its header is read."""
        count = len(self._files)
        for number, (path, division, extent) in self._divided.items():
            if process >= division.pieces(count):
                continue  # It has a copy of what an earlier process has.
            source = division.extent(process, count)
            ranges = list(division.ranges(source, extent, tensors[number].dtype.itemsize))
            if not ranges:
                continue
            if process and file.shards(process, count) != self._saved_by(process):
                raise DamagedError(f"{file.path} is damaged: its shards are not those of the first file")
            place = file.index.numbers.get(path, -1)
            found = file.index.layouts[place] if place >= 0 else None
            if found != TensorLayout(tensors[number].dtype, division.part_shape(source)):
                raise DamagedError(
                    f"{file.path} is damaged: it has no shard of {'.'.join(map(str, path))}, or another one"
                )
            offset, memory = file.layout.offsets[place], tree.memory_of(tensors[number])
            for position, target, length in ranges:
                yield _Target(offset + position, memory[target : target + length])

    def _saved_by(self, process: int) -> Shards:
        assert self._saved is not None, "there are several files"
        return Shards(process, self._saved.count, self._saved.model, self._saved.optimizer)


class _File:
    """A file with a state, or with the part of one process."""

    def __init__(self, storage: Storage, manifest: Manifest, file: StateFile) -> None:
        self._storage = storage
        self._file = file
        self._chunk_bytes = manifest.chunk_bytes
        self.path = storage.path(file.state)

    @cached_property
    def layout(self) -> StateFileLayout:
        """Where its tensors are. Read once."""
        header = self._read_verified(0, lambda: f"{self.path} is damaged in its header")
        try:
            layout = read_layout(header)
        except InvalidSpecError as error:
            raise DamagedError(f"{self.path} is damaged: {error}") from error
        expected = len(layout.header) + layout.data_bytes
        if self._file.bytes != expected or self._file.header_bytes != len(layout.header):
            raise DamagedError(
                f"{self.path} is damaged: its tensors need {expected} bytes, not {self._file.bytes}"
            )
        return layout

    @cached_property
    def index(self) -> TensorIndex:
        """The places of its tensors in the state."""
        return TensorIndex(self.layout.spec)

    @cached_property
    def _described(self) -> Shards:
        return Shards.from_state(self.index.value(KEY))

    def shards(self, process: int, count: int) -> Shards:
        """Return what it describes as its shards."""
        found = self._described
        if (found.process, found.count) != (process, count):
            raise DamagedError(
                f"{self.path} is damaged: it is of process {found.process} of {found.count}, not {process} "
                f"of {count}"
            )
        return found

    def read(self, process: int = 0, count: int = 1) -> Tree:
        """Return the state, or the part of a process."""
        if count > 1:
            self.shards(process, count)
        tensors = [torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in self.layout.layouts]
        self.read_into(
            target for number, tensor in enumerate(tensors) for target in self.whole(number, tensor)
        )
        state: Tree = tree.unflatten(self.layout.spec, tensors)
        return state

    def whole(self, number: int, tensor: Tensor) -> Iterator[_Target]:
        """Yield what is read into a tensor that has the type and the shape of tensor `number`."""
        if tensor.numel():
            yield _Target(self.layout.offsets[number], tree.memory_of(tensor))

    def read_into(self, targets: Iterable[_Target]) -> None:
        """Read bytes, in parts that are verified one by one."""
        waiting = deque(sorted(targets, key=lambda target: target.offset))
        if not waiting:
            return
        needed = sorted(
            {
                index
                for target in waiting
                for index in range(
                    target.offset // self._chunk_bytes, (target.end - 1) // self._chunk_bytes + 1
                )
            }
        )
        for start, content in self._verified_chunks(needed):
            end = start + len(content)
            while waiting and waiting[0].end <= start:
                waiting.popleft()
            for target in waiting:
                if target.offset >= end:
                    break
                begin, stop = max(target.offset, start), min(target.end, end)
                target.memory[begin - target.offset : stop - target.offset] = content[
                    begin - start : stop - start
                ]

    def _verified_chunks(self, indices: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Read and verify several parts at the same time; return their positions and contents in order."""
        layout = self.layout

        def read(index: int) -> tuple[int, bytes]:
            start = index * self._chunk_bytes
            end = min(start + self._chunk_bytes, layout.data_bytes)

            def place() -> str:
                names = layout.names_between(start, end)
                tensors = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                return f"{self.path} is damaged in bytes {start:,} to {end:,} of {tensors}"

            return start, self._read_verified(index + 1, place)

        count = -(-layout.data_bytes // self._chunk_bytes)
        if len(self._file.sha256) != count + 1:
            raise DamagedError(f"{self.path} is damaged: its manifest has {len(self._file.sha256)} checksums")
        pending: deque[Future[tuple[int, bytes]]] = deque()
        with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="adascale-read") as pool:
            try:
                for index in indices:
                    pending.append(pool.submit(read, index))
                    if len(pending) > _PARALLEL_READS:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _read_verified(self, index: int, place: Callable[[], str]) -> bytes:
        """Return the header (index 0) or a part of the file; `place` describes it, for a message."""
        file = self._file
        if index == 0:
            start, end = 0, file.header_bytes
        else:
            start = file.header_bytes + (index - 1) * self._chunk_bytes
            end = min(start + self._chunk_bytes, file.bytes)
        try:
            content = self._storage.read(file.state, start, end)
        except MissingFileError as error:
            raise DamagedError(f"{self.path} is missing: {error}") from error
        if len(content) != end - start:
            raise DamagedError(f"{place()}: it ends after {start + len(content):,} of {file.bytes:,} bytes")
        found = hashlib.sha256(content).hexdigest()
        if found != file.sha256[index]:
            raise DamagedError(
                f"{place()}: their SHA-256 is {found[:12]}..., expected {file.sha256[index][:12]}..."
            )
        return content


def _without_description(state: Tree) -> Tree:
    return {name: value for name, value in state.items() if name != KEY}
