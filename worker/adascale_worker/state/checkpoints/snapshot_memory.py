"""Copies of the state of training in memory that outlives this process: files without a name of its agent.

There are two places, each a file. A copy is written over the older one, so a process that is killed while it
writes leaves the one before. A place is valid only from the last byte that is written: the kernel keeps the
memory of a file as a killed process has left it, so no checksum is needed.

    byte 0          a `_Condition`
    from byte 8     the number of the copy, the bytes of its tensors and of its document
    from byte 4096  the tensors one after another, and the document: a line of JSON that
                    describes the copy, and the structure of the state
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from adascale_core.checkpoint_manifest import Manifest
from adascale_core.names import SNAPSHOT_FILE
from adascale_worker.errors import CheckpointError
from adascale_worker.process.available_memory import unused_memory
from adascale_worker.process.package_version import package_version
from adascale_worker.state import tree
from adascale_worker.state.checkpoints.store import CheckpointInfo

State = dict[str, Any]
_LINK: Final = f"/memfd:{SNAPSHOT_FILE}"
"""What the path of a file of the agent links to."""
_HEADER: Final = struct.Struct("<QQQ")
_HEADER_START: Final = 8
_DATA_START: Final = 4096
_BUFFERS: Final = 512
"""Of one call of the kernel, which takes at most 1024."""
LARGEST_PART: Final = 0.25
"""The largest part of the memory that training has never used, as far as known, that copies take."""
MARGIN: Final = 0.1
"""Memory that must be left later on, in parts of a state."""


class NoSnapshotMemoryError(CheckpointError):
    """The memory for copies of the state cannot be used, or there is not enough."""


class _Condition(IntEnum):
    """The condition of a place."""

    INVALID = 0
    VALID = 1
    RESTORING = 2
    """A process restores the copy. If it ends meanwhile, the copy may be the reason."""


@dataclass(frozen=True)
class KeptSnapshot:
    """A copy of the state.

    Args:
        info: its description.
        result: of training, as the program has reported it until then.
        spec: its structure.
        place: where it is.
    """

    info: CheckpointInfo
    result: dict[str, float | str]
    spec: bytes
    place: _Place

    @property
    def number(self) -> tuple[int, int, int]:
        """Which of two states of a job is later; see `number_of`."""
        return number_of(self.info)

    def read(self) -> State:
        """Return the state. Its tensors are copies.

        Raises:
            CheckpointError: the copy is not complete.
        """
        state: State = tree.unflatten(self.spec, self.place.read_tensors(tree.layouts(self.spec)))
        return state


def number_of(described: CheckpointInfo | Manifest) -> tuple[int, int, int]:
    """Return a number that is larger for a later state: later job of a name, later generation, later step.

    The state of a later generation counts as later, also after fewer steps: the job was continued there,
    without the steps that only an earlier generation has made.
    """
    return described.incarnation, described.generation, described.step


class SnapshotMemory:
    """Memory for copies of the state.

    Args:
        paths: of the files, which exist.
        available: returns the bytes that can be used, and have not been used so far.

    Raises:
        NoSnapshotMemoryError: a file cannot be opened, or is not one that an agent has made.
    """

    def __init__(self, paths: Sequence[str], available: Callable[[], float] = unused_memory) -> None:
        self._available = available
        try:
            foreign = next((path for path in paths if not str(Path(path).readlink()).startswith(_LINK)), None)
            self._places = (
                [] if foreign else [_Place(os.open(path, os.O_RDWR | os.O_CLOEXEC)) for path in paths]
            )
        except OSError as error:
            raise NoSnapshotMemoryError(
                f"the memory of the agent cannot be opened ({error.strerror}): this program runs in another "
                "container or as another user than its agent"
            ) from error
        if foreign:
            # The number of the agent is that of another process here.
            raise NoSnapshotMemoryError(
                f"{foreign} is not the memory of the agent: this program runs in another container than its "
                "agent"
            )

    def save(self, state: State, info: CheckpointInfo, result: dict[str, float | str]) -> None:
        """Copy a state in place of the older copy.

        Tensors on a GPU are copied to the memory of the host one by one.

        Raises:
            NoSnapshotMemoryError: there is not enough memory.
            UnsupportedStateError: an object in the state has another type than `tree.ALLOWED`.
        """
        spec, tensors = tree.flatten(state)
        described = {"version": package_version(), "info": asdict(info), "result": result}
        document = json.dumps(described).encode("ascii") + b"\n" + spec
        self._require_memory(_DATA_START + sum(tensor.nbytes for tensor in tensors) + len(document))
        last = max(self._places, key=lambda place: place.number)
        place = next(place for place in self._places if place is not last)
        place.write(last.number + 1, tensors, document)

    def newest(self) -> KeptSnapshot | None:
        """Return the newest copy. None if there is none, or if a process has ended while it restored it."""
        place = max(self._places, key=lambda place: place.number)
        if place.condition is not _Condition.VALID:
            return None
        text, spec = place.read_document().split(b"\n", 1)
        described = json.loads(text)
        if described["version"] != package_version():
            return None
        return KeptSnapshot(CheckpointInfo(**described["info"]), described["result"], spec, place)

    def begin_restoring(self, snapshot: KeptSnapshot) -> None:
        """Mark a copy as one that is being restored."""
        snapshot.place.condition = _Condition.RESTORING

    def end_restoring(self, snapshot: KeptSnapshot) -> None:
        """Mark a copy as one that could be restored."""
        snapshot.place.condition = _Condition.VALID

    @property
    def is_taken(self) -> bool:
        """Whether there is a copy, or an incomplete one."""
        return any(place.used for place in self._places)

    def release(self) -> None:
        """Delete all copies, and return the memory to the system."""
        for place in self._places:
            place.release()

    def _require_memory(self, needed: int) -> None:
        growth = sum(max(needed - place.used, 0) for place in self._places)
        required = growth / LARGEST_PART + needed * MARGIN
        available = self._available()
        if available < required:
            raise NoSnapshotMemoryError(
                f"the state has {_mebibytes(needed)}, and two copies need {_mebibytes(required)} of free "
                f"memory, of which {_mebibytes(available)} are left"
            )


class _Place:
    """A file for one copy.

    Args:
        descriptor: of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def condition(self) -> _Condition:
        """Whether the copy is complete."""
        found = int.from_bytes(os.pread(self._descriptor, 1, 0), "little")
        return _Condition(found) if found in set(_Condition) else _Condition.INVALID

    @condition.setter
    def condition(self, condition: _Condition) -> None:
        os.pwrite(self._descriptor, bytes([condition]), 0)

    @property
    def number(self) -> int:
        """The number of the copy; 0 if there is none."""
        return 0 if self.condition is _Condition.INVALID else self._header()[0]

    @property
    def used(self) -> int:
        """The bytes of memory that the file has."""
        return os.fstat(self._descriptor).st_blocks * 512

    def _header(self) -> tuple[int, int, int]:
        number, data_bytes, document_bytes = _HEADER.unpack(
            os.pread(self._descriptor, _HEADER.size, _HEADER_START)
        )
        return number, data_bytes, document_bytes

    def write(self, number: int, tensors: Sequence[Tensor], document: bytes) -> None:
        """Replace the copy."""
        self.condition = _Condition.INVALID
        length = self._write(_DATA_START, map(_bytes_of, tensors))
        self._write(_DATA_START + length, [memoryview(document)])
        os.pwrite(self._descriptor, _HEADER.pack(number, length, len(document)), _HEADER_START)
        self.condition = _Condition.VALID

    def _write(self, start: int, parts: Iterable[memoryview]) -> int:
        """Write parts one after another, and return their length together."""
        position, batch = start, list[memoryview]()
        for part in parts:
            batch.append(part)
            if len(batch) == _BUFFERS or part.nbytes > 1 << 20:
                position, batch = self._write_batch(position, batch), []
        return self._write_batch(position, batch) - start

    def _write_batch(self, position: int, batch: list[memoryview]) -> int:
        while batch := [part for part in batch if part.nbytes]:
            written = os.pwritev(self._descriptor, batch, position)
            position += written
            for index, part in enumerate(batch):
                batch[index] = part[written:]
                written -= min(written, part.nbytes)
        return position

    def read_document(self) -> bytes:
        """Return the document of the copy."""
        _, data_bytes, document_bytes = self._header()
        return os.pread(self._descriptor, document_bytes, _DATA_START + data_bytes)

    def read_tensors(self, layouts: Sequence[tree.TensorLayout]) -> list[Tensor]:
        """Return the tensors of the copy in new memory.

        Raises:
            CheckpointError: the file is too short.
        """
        tensors, position = [], _DATA_START
        for layout in layouts:
            tensor = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
            memory = _bytes_of(tensor)
            while memory:
                count = os.preadv(self._descriptor, [memory], position)
                if not count:
                    raise CheckpointError("it is shorter than it was when it was written")
                position, memory = position + count, memory[count:]
            tensors.append(tensor)
        return tensors

    def release(self) -> None:
        """Delete the copy."""
        self.condition = _Condition.INVALID
        os.ftruncate(self._descriptor, 0)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().reshape(-1)
    # A tensor without elements has no memory.
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"
