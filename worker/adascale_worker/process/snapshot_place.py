"""The files in memory of an agent that each have a place for one copy of the state of training.

A place is valid only from the last byte that is written: the kernel keeps the memory of a file as a killed
process has left it, so no checksum is needed. A place that is read while another process may write is locked.

    byte 0          a `Condition`
    from byte 8     the number of the copy, the bytes of its tensors and of its document, and the number of
                    the state
    from byte 4096  the tensors one after another, and the document: a line of JSON that
                    describes the copy, and the structure of the state
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from adascale_core.names import SNAPSHOT_FILE
from adascale_worker.process.resource_limits import unused_memory

_HEADER: Final = struct.Struct("<6Q")
_HEADER_START: Final = 8
_CONTENT_START: Final = 4096
LARGEST_PART: Final = 0.25
"""The maximum share that copies take of the memory which was never used so far."""
MARGIN: Final = 0.1
"""Memory that must remain free beside the copies, as a fraction of the size of a state."""

CopyNumber = tuple[int, int, int]
"""Incarnation, generation and step of a state: larger for a later job of a name, a later generation, a later
step. The state of a later generation counts as later, also after fewer steps: the job was continued there,
without the steps that only an earlier generation has made."""


_COUNT: Final = 2
"""Number of files: a copy replaces the older one of two."""
_MFD_NOEXEC_SEAL: Final = 0x8
"""Of linux/memfd.h, since Linux 6.3: the file can never be executed."""


class Condition(IntEnum):
    """The condition of a place."""

    INVALID = 0
    VALID = 1
    RESTORING = 2
    """A process restores the copy. If it ends meanwhile, the copy may be the reason."""


class SnapshotPlace:
    """A file for one copy. Each object opens it for itself, so that locks exclude each other."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def condition(self) -> Condition:
        """Whether the copy is complete."""
        found = int.from_bytes(os.pread(self._descriptor, 1, 0), "little")
        return Condition(found) if found in set(Condition) else Condition.INVALID

    @condition.setter
    def condition(self, condition: Condition) -> None:
        os.pwrite(self._descriptor, bytes([condition]), 0)

    @property
    def number(self) -> int:
        """The number of the copy among those of this agent; 0 if there is none."""
        return 0 if self.condition is Condition.INVALID else self._header()[0]

    @property
    def lengths(self) -> tuple[int, int]:
        """The bytes of the tensors and of the document, which follow each other."""
        return self._header()[1:3]

    @property
    def state(self) -> CopyNumber | None:
        """The number of the state that was copied; None if there is no copy."""
        return None if self.condition is Condition.INVALID else self._header()[3:]

    @property
    def used(self) -> int:
        """The bytes of memory that the file has."""
        return os.fstat(self._descriptor).st_blocks * 512

    def _header(self) -> tuple[int, int, int, int, int, int]:
        header: tuple[int, int, int, int, int, int] = _HEADER.unpack(
            os.pread(self._descriptor, _HEADER.size, _HEADER_START)
        )
        return header

    @contextmanager
    def locked(self, *, exclusively: bool) -> Iterator[bool]:
        """Try to lock the place, without waiting, and yield whether that has succeeded.

        The kernel unlocks it when the process ends.
        """
        operation = fcntl.LOCK_EX if exclusively else fcntl.LOCK_SH
        try:
            fcntl.flock(self._descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def write(
        self, number: int, state: CopyNumber, content: Iterable[memoryview], document_bytes: int
    ) -> None:
        """Replace the copy. If `content` raises an error, there is none."""
        self.condition = Condition.INVALID
        position = _CONTENT_START
        for part in content:
            while part.nbytes:
                written = os.pwrite(self._descriptor, part, position)
                position, part = position + written, part[written:]
        data_bytes = position - _CONTENT_START - document_bytes
        header = _HEADER.pack(number, data_bytes, document_bytes, *state)
        os.pwrite(self._descriptor, header, _HEADER_START)
        self.condition = Condition.VALID

    def read_into(self, memory: memoryview, position: int) -> None:
        """Fill memory with the content from a position on. Raises EOFError if there is less."""
        while memory.nbytes:
            count = os.preadv(self._descriptor, [memory], _CONTENT_START + position)
            if not count:
                raise EOFError("it is shorter than it was when it was written")
            position, memory = position + count, memory[count:]

    def read_document(self) -> bytes:
        """Return the document of the copy."""
        data_bytes, document_bytes = self.lengths
        return os.pread(self._descriptor, document_bytes, _CONTENT_START + data_bytes)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def release(self) -> None:
        """Delete the copy."""
        self.condition = Condition.INVALID
        os.ftruncate(self._descriptor, 0)


class SnapshotPlaces:
    """The places of an agent, as one process uses them. A copy is written over the older one of two."""

    def __init__(self, paths: Iterable[str], available: Callable[[], float] = unused_memory) -> None:
        self._places = [SnapshotPlace(path) for path in paths]
        self._available = available

    @property
    def newest_place(self) -> SnapshotPlace:
        """The place that was written last."""
        return max(self._places, key=lambda place: place.number)

    @property
    def newest_number(self) -> CopyNumber | None:
        """The number of the state that was copied last; None if there is no copy."""
        return self.newest_place.state if self._places else None

    @property
    def is_taken(self) -> bool:
        """Whether there is a copy, or an incomplete one."""
        return any(place.used for place in self._places)

    def lack_of_memory(self, content_bytes: int) -> str:
        """Return how much memory is missing for copies of a size, for a message; empty if nothing is."""
        needed, available = _CONTENT_START + content_bytes, self._available()
        growth = sum(max(needed - place.used, 0) for place in self._places)
        required = growth / LARGEST_PART + needed * MARGIN
        if available >= required:
            return ""
        return (
            f"the state has {_mebibytes(needed)}, and two copies need {_mebibytes(required)} of free "
            f"memory, of which {_mebibytes(available)} are left"
        )

    def write(
        self,
        state: CopyNumber,
        content: Iterable[memoryview],
        document_bytes: int,
        *,
        may_replace_newest: bool = False,  # if the older one is locked
    ) -> bool:
        """Write a copy in place of the older one, and return whether a place could be locked for it."""
        number = self.newest_place.number + 1
        older_first = sorted(self._places, key=lambda place: place.number)
        for place in older_first if may_replace_newest else older_first[:1]:
            with place.locked(exclusively=True) as is_free:
                if is_free:
                    place.write(number, state, content, document_bytes)
                    return True
        return False

    def close(self) -> None:
        """Close the files."""
        for place in self._places:
            place.close()
        self._places = []

    def release(self) -> None:
        """Delete all copies, and return the memory to the system."""
        for place in self._places:
            place.release()


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def make_snapshot_files() -> str:
    """Make files without a name, in memory, and return their paths, separated by colons; empty on failure.

    This process keeps them open. Unlike files in /dev/shm, only the memory of the container limits them.
    """
    try:
        descriptors = [_make_file() for _ in range(_COUNT)]
    except (OSError, AttributeError) as error:
        print(
            f"adascale-agent: this system has no files in memory ({error}), so no copy of the state is "
            "kept: if the only replica is lost, training continues from the last checkpoint",
            flush=True,
        )
        return ""
    return ":".join(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors)


def _make_file() -> int:
    try:
        return os.memfd_create(SNAPSHOT_FILE, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        # An older kernel does not know the flag.
        return os.memfd_create(SNAPSHOT_FILE)
