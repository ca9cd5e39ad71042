"""Copies of the state of training in memory that outlives this process: files without a name of its agent.

There are two places, each a file. A copy is written over the older one, so a process that is killed while it
writes leaves the one before. While the agent sends the older one to another agent, the newer one is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from adascale_core.checkpoint_manifest import Manifest
from adascale_core.names import SNAPSHOT_FILE
from adascale_worker.errors import CheckpointError
from adascale_worker.process.environment import package_version
from adascale_worker.process.resource_limits import unused_memory
from adascale_worker.process.snapshot_place import (
    Condition,
    SnapshotPlace,
    StateNumber,
    lack_of_memory,
    newest,
)
from adascale_worker.state import tree
from adascale_worker.state.store import CheckpointInfo
from adascale_worker.state.tree import Tree

_LINK: Final = f"/memfd:{SNAPSHOT_FILE}"
"""Beginning of the target of the link at the path of a file of the agent."""


class NoSnapshotMemoryError(CheckpointError):
    """The memory for copies of the state cannot be used, or there is not enough."""


@dataclass(frozen=True)
class KeptSnapshot:
    """A copy of the state."""

    info: CheckpointInfo
    result: dict[str, float | str]  # the result of training that the program had reported then
    spec: bytes
    place: SnapshotPlace

    @property
    def number(self) -> StateNumber:
        """Which of two states of a job is later."""
        return number_of(self.info)

    def read(self) -> Tree:
        """Return the state. Its tensors are copies."""
        state: Tree = tree.unflatten(self.spec, _read_tensors(self.place, tree.layouts(self.spec)))
        return state


def number_of(described: CheckpointInfo | Manifest) -> StateNumber:
    """Return the number of a state, which is larger for a later one."""
    return described.incarnation, described.generation, described.step


class SnapshotMemory:
    """Memory for copies of the state."""

    def __init__(self, paths: Sequence[str], available: Callable[[], float] = unused_memory) -> None:
        self._available = available
        try:
            foreign = next((path for path in paths if not str(Path(path).readlink()).startswith(_LINK)), None)
            self._places = [] if foreign else [SnapshotPlace(path) for path in paths]
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

    def save(self, state: Tree, info: CheckpointInfo, result: dict[str, float | str]) -> None:
        """Copy a state in place of the older copy, or of the newer one while the agent sends the older one.

        Tensors on a GPU are copied to the memory of the host one by one. Does not wait for the agent.
        """
        spec, tensors = tree.flatten(state)
        described = {"version": package_version(), "info": asdict(info), "result": result}
        document = json.dumps(described).encode("ascii") + b"\n" + spec
        length = sum(tensor.nbytes for tensor in tensors) + len(document)
        if lack := lack_of_memory(self._places, length, self._available()):
            raise NoSnapshotMemoryError(lack)
        number = newest(self._places).number + 1
        for place in sorted(self._places, key=lambda place: place.number):
            with place.locked(exclusively=True) as is_free:
                if is_free:
                    content = chain(map(tree.memory_of, tensors), [memoryview(document)])
                    place.write(number, number_of(info), content, len(document))
                    return

    def newest(self) -> KeptSnapshot | None:
        """Return the newest copy. None if there is none, or if a process has ended while it restored it."""
        place = newest(self._places)
        if place.condition is not Condition.VALID:
            return None
        text, spec = place.read_document().split(b"\n", 1)
        described = json.loads(text)
        if described["version"] != package_version():
            return None
        return KeptSnapshot(CheckpointInfo(**described["info"]), described["result"], spec, place)

    def begin_restoring(self, snapshot: KeptSnapshot) -> None:
        """Mark a copy as one that is being restored."""
        snapshot.place.condition = Condition.RESTORING

    def end_restoring(self, snapshot: KeptSnapshot) -> None:
        """Mark a copy as one that could be restored."""
        snapshot.place.condition = Condition.VALID

    @property
    def is_taken(self) -> bool:
        """Whether there is a copy, or an incomplete one."""
        return any(place.used for place in self._places)

    def release(self) -> None:
        """Delete all copies, and return the memory to the system."""
        for place in self._places:
            place.release()


def _read_tensors(place: SnapshotPlace, layouts: Sequence[tree.TensorLayout]) -> list[Tensor]:
    """Return the tensors of a copy in new memory."""
    tensors, position = [], 0
    for layout in layouts:
        tensor = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
        memory = tree.memory_of(tensor)
        while memory:
            count = place.read_into(memory, position)
            if not count:
                raise CheckpointError("it is shorter than it was when it was written")
            position, memory = position + count, memory[count:]
        tensors.append(tensor)
    return tensors
