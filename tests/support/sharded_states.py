"""States of sharded models, and the processes of a replica that save and load them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from adascale_core.checkpoint_manifest import Manifest
from adascale_storage import Storage
from adascale_worker.membership.replica_processes import ReplicaMessages
from adascale_worker.state.file import Snapshot
from adascale_worker.state.shards import KEY, Division, Shards
from adascale_worker.state.store import CheckpointInfo, CheckpointProcesses, CheckpointStore
from adascale_worker.torch_private.distributed import process_group_beside

T = TypeVar("T")
INFO = CheckpointInfo(step=7, progress=21.5, epoch=1, replicas=2, generation=3, finished=False, saved_at=9.5)
CHUNK = 100
DIVISIONS = {
    "rows": Division(0, (10, 3)),
    "columns": Division(1, (4, 7, 2)),
    "few": Division(0, (2, 5)),
    "one": Division(0, (1,)),
}


class Replica:
    """Processes of a replica as threads, connected by gloo.

    Args:
        storages: of the same checkpoints, for each process.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        self.count = count = len(storages)
        shared = dist.HashStore()  # type: ignore[attr-defined]

        def connect(process: int) -> CheckpointProcesses:
            messages = None
            if count > 1:
                host, timeout = torch.device("cpu"), timedelta(seconds=60)
                group = process_group_beside(shared, process, count, host, timeout, share_a_gpu=False)
                messages = ReplicaMessages(group)
            return CheckpointProcesses(messages)

        self.processes = self.run(connect)
        self.stores = [
            CheckpointStore(storage, CHUNK, each)
            for storage, each in zip(storages, self.processes, strict=True)
        ]

    def run(self, action: Callable[[int], T]) -> list[T]:
        """Return the results of an action on all processes, or raise the error that all of them raise."""
        results: dict[int, T] = {}
        errors: dict[int, Exception] = {}

        def act(process: int) -> None:
            try:
                results[process] = action(process)
            except Exception as error:  # noqa: BLE001 (raised below)
                errors[process] = error

        threads = [threading.Thread(target=act, args=[process]) for process in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) + len(errors) == self.count, "no process waits"
        if errors:
            found = {(type(error), str(error)) for error in errors.values()}
            assert found == {(type(errors[0]), str(errors[0]))}
            assert len(errors) == self.count
            raise errors[0]
        return [results[process] for process in range(self.count)]

    def save(self, value: float, info: CheckpointInfo = INFO) -> Manifest:
        def save(process: int) -> Manifest:
            snapshot = Snapshot()
            snapshot.copy(state_of(value, process, self.count))
            return self.stores[process].save(snapshot, info)

        manifest, *others = self.run(save)
        assert all(other == manifest for other in others)
        return manifest

    def load(self, *, whole: bool = False) -> list[dict[str, Any]]:
        def load(process: int) -> dict[str, Any]:
            loaded = self.stores[process].load(own=None if whole else shards_of(process, self.count))
            assert loaded is not None
            return loaded[0]

        return self.run(load)


def shards_of(process: int, count: int) -> Shards:
    return Shards(process, count, DIVISIONS, dict(enumerate(DIVISIONS.values())))


def whole_of(value: float, division: Division) -> torch.Tensor:
    return value + torch.arange(float(torch.Size(division.shape).numel())).reshape(division.shape)


def part_of(value: float, division: Division, process: int, count: int) -> torch.Tensor:
    start, stop = division.extent(process, count)
    return whole_of(value, division).narrow(division.dimension, start, stop - start).contiguous()


def state_of(value: float, process: int, count: int) -> dict[str, Any]:
    """The part of a state that a process has; what is not sharded differs between the processes."""
    model: dict[str, Any] = {
        name: part_of(value, each, process, count) for name, each in DIVISIONS.items()
    } | {"buffer": torch.full((3,), float(process))}
    kept = {
        number: {"mean": part_of(-value, each, process, count), "step": torch.tensor(value)}
        for number, each in enumerate(DIVISIONS.values())
    }
    statistics = {"previous_gradient": {"gradients": [torch.full((2,), float(process))]}}
    optimizer = {"state": kept, "adascale": {"statistics": statistics}}
    state = {"program": {"model": model, "optimizer": optimizer}, "plan": [value, process]}
    return {**state, KEY: shards_of(process, count).to_state()} if count > 1 else state


def require_part(state: dict[str, Any], value: float, process: int, count: int) -> None:
    program = state["program"]
    assert KEY not in state
    for number, (name, division) in enumerate(DIVISIONS.items()):
        assert torch.equal(program["model"][name], part_of(value, division, process, count))
        kept = program["optimizer"]["state"][number]
        assert torch.equal(kept["mean"], part_of(-value, division, process, count))
        assert float(kept["step"]) == value
