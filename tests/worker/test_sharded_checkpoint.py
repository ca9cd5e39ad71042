"""Checkpoints of a sharded model: a file for each process of a replica, under one manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist

from adascale_core.checkpoint_manifest import Manifest, state_of
from adascale_storage import Part, Storage, StorageFullError, WriteCancelledError
from adascale_storage.folder import Folder
from adascale_worker.errors import CheckpointError, StorageUnavailableError, WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.state.file import KEY, Division, Shards, Snapshot
from adascale_worker.state.schedule import Checkpointing
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
            group = None
            if count > 1:
                host, timeout = torch.device("cpu"), timedelta(seconds=60)
                group = process_group_beside(shared, process, count, host, timeout, share_a_gpu=False)
            return CheckpointProcesses(group)

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
            snapshot.copy(process_state(value, process, self.count))
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


def process_state(value: float, process: int, count: int) -> dict[str, Any]:
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


class RecordingFolder(Folder):
    """A folder that records which files are read, and raises `failure` if that is set."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.read_names: set[str] = set()
        self.failure: Exception | None = None

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self.read_names.add(name)
        return super().read(name, start, end)

    def write(self, name: str, parts: Any, *, size: int) -> None:
        def failing() -> Iterator[Part]:
            for index, part in enumerate(parts):
                if index and self.failure is not None:
                    failure, self.failure = self.failure, None
                    raise failure
                yield part

        super().write(name, failing(), size=size)


class FullFolder(RecordingFolder):
    """A folder that has space for three checkpoints."""

    def write(self, name: str, parts: Any, *, size: int) -> None:
        states = {state_of(each) for each in [*self.names(), name]} - {None}
        if len(states) > 3:
            raise StorageFullError("no space")
        super().write(name, parts, size=size)


class FolderReplica(Replica):
    """Processes with a folder."""

    def __init__(self, directory: Path, count: int, kind: type[RecordingFolder] = RecordingFolder) -> None:
        self.folders = [kind(directory) for _ in range(count)]
        super().__init__(self.folders)


@pytest.mark.parametrize(("saved", "loaded"), list(product((1, 2, 3), (1, 2, 4))))
def test_any_number_of_processes_continues_what_another_has_saved(
    tmp_path: Path, saved: int, loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DIVISIONS, "copied", Division(0, (7, 2), copies=2))
    manifest = FolderReplica(tmp_path, saved).save(2.0)
    assert sorted(manifest.names) == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(manifest.names) == saved
    for process, state in enumerate(FolderReplica(tmp_path, loaded).load()):
        require_part(state, 2.0, process, loaded)
        is_own = saved == loaded
        assert state["plan"] == [2.0, process if is_own else 0]
        assert state["program"]["model"]["buffer"].tolist() == [process if is_own else 0] * 3
        previous = state["program"]["optimizer"]["adascale"]["statistics"]["previous_gradient"]
        assert (previous is not None) == is_own


def test_a_process_alone_reads_the_whole_state(tmp_path: Path) -> None:
    FolderReplica(tmp_path, 3).save(2.0)
    (state,) = FolderReplica(tmp_path, 1).load(whole=True)
    require_part(state, 2.0, 0, 1)


def test_a_process_reads_the_files_that_have_its_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("columns", "few", "one"):
        monkeypatch.delitem(DIVISIONS, name)
    monkeypatch.setitem(DIVISIONS, "rows", Division(0, (12, 3)))
    names = FolderReplica(tmp_path, 4).save(2.0).names
    same, half = FolderReplica(tmp_path, 4), FolderReplica(tmp_path, 2)
    for replica in (same, half):
        replica.load()
    states = [{name for name in folder.read_names if name in names} for folder in same.folders]
    assert states == [{name} for name in names]
    states = [{name for name in folder.read_names if name in names} for folder in half.folders]
    # What is not sharded is in the first file.
    assert states == [set(names[:2]), {names[0], *names[2:]}]


@pytest.mark.parametrize("count", [2, 3])
def test_tensors_that_the_program_divides_otherwise_now_are_returned_whole(
    tmp_path: Path, count: int
) -> None:
    FolderReplica(tmp_path, 2).save(2.0)
    own = replace(shards_of(0, count), model={**DIVISIONS, "columns": Division(0, (4, 7, 2))})
    loaded = CheckpointStore(Folder(tmp_path)).load(own=own)
    assert loaded is not None
    model = loaded[0]["program"]["model"]
    assert torch.equal(model["columns"], whole_of(2.0, DIVISIONS["columns"]))
    assert torch.equal(model["rows"], part_of(2.0, DIVISIONS["rows"], 0, count))


def test_the_last_two_checkpoints_are_kept_with_all_of_their_files(tmp_path: Path) -> None:
    replica = FolderReplica(tmp_path, 2)
    manifests = [replica.save(float(number)) for number in range(4)]
    kept = {name for manifest in manifests[-2:] for name in manifest.names}
    assert {path.name for path in tmp_path.glob("*.safetensors")} == kept
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "exchanged", "no manifest"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_if_the_file_of_one_process_is_damaged_all_load_the_previous_checkpoint(
    tmp_path: Path, damage: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = FolderReplica(tmp_path, 2)
    replica.save(1.0)
    first, second = (tmp_path / name for name in replica.save(2.0).names)
    content = bytearray(second.read_bytes())
    match damage:
        case "flip":
            content[-40] ^= 4
            second.write_bytes(content)
        case "truncate":
            second.write_bytes(content[:-1])
        case "missing":
            second.unlink()
        case "exchanged":
            second.write_bytes(first.read_bytes())
        case "no manifest":
            (tmp_path / "checkpoint-00000002.json").unlink()
    for process, state in enumerate(FolderReplica(tmp_path, count).load()):
        require_part(state, 1.0, process, count)
    output = capsys.readouterr().out
    if damage == "no manifest":
        assert output == ""
    else:
        assert output.count(str(second)) == 1
        assert "resuming from checkpoint 1, step 7" in output


@pytest.mark.parametrize("failure", [StorageFullError("no space"), OSError(5, "I/O error"), ValueError("x")])
@pytest.mark.parametrize("process", [0, 1])
def test_if_one_process_cannot_write_none_saves_and_the_next_save_works(
    tmp_path: Path, failure: Exception, process: int
) -> None:
    replica = FolderReplica(tmp_path, 2)
    names = set(replica.save(1.0).names)
    folder = replica.folders[process]
    folder.failure = failure
    with pytest.raises(CheckpointError, match=r"no space|I/O error|ValueError: x") as raised:
        replica.save(2.0)
    if isinstance(failure, StorageFullError):
        assert "there must be space for three checkpoints" in str(raised.value)
    expected = CheckpointError if isinstance(failure, ValueError) else StorageUnavailableError
    assert isinstance(raised.value, expected)
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == names
    assert replica.save(3.0).number == 2


@pytest.mark.parametrize("process", [0, 1])
def test_a_state_that_cannot_be_saved_on_one_process_is_an_error_of_the_program_on_all(
    tmp_path: Path, process: int
) -> None:
    replica = FolderReplica(tmp_path, 2)

    def save(each: int) -> None:
        group = cast(ReplicaGroup, SimpleNamespace(rank=0, broadcast=lambda value: value))
        checkpointing = Checkpointing(replica.stores[each], 60.0, group)
        checkpointing.save(INFO, lambda: {"counter": object() if each == process else 1}, durable=True)

    with pytest.raises(WorkerError, match="counter") as raised:
        replica.run(save)
    # That ends training, which would not succeed later either.
    assert not isinstance(raised.value, CheckpointError)


def test_a_save_that_one_process_gives_up_leaves_nothing(tmp_path: Path) -> None:
    replica = FolderReplica(tmp_path, 2)
    replica.folders[1].failure = WriteCancelledError()
    with pytest.raises(WriteCancelledError):
        replica.save(2.0)
    assert list(tmp_path.iterdir()) == []


def test_files_that_a_killed_replica_has_left_are_deleted_after_later_saves(tmp_path: Path) -> None:
    replica = FolderReplica(tmp_path, 2)
    left = tmp_path / "checkpoint-00000001-00ff00ff-2-of-2.safetensors"
    draft = tmp_path / "checkpoint-00000001-00ff00ff-1-of-2.safetensors.0a0a0a0a.draft"
    for path in (left, draft):
        path.write_bytes(b"left")
    for number in range(3):
        assert left.exists(), "it may be of a writer at work"
        replica.save(float(number))
    assert not left.exists()
    assert not draft.exists()


@pytest.mark.parametrize("killed", [0, 1])
def test_files_that_a_killed_replica_has_left_on_a_full_storage_make_room(
    tmp_path: Path, killed: int
) -> None:
    replica = FolderReplica(tmp_path, 2, FullFolder)
    kept = [name for number in range(2) for name in replica.save(float(number)).names]
    complete = tmp_path / f"checkpoint-00000003-00ff00ff-{2 - killed}-of-2.safetensors"
    draft = tmp_path / f"checkpoint-00000003-00ff00ff-{killed + 1}-of-2.safetensors.0a0a0a0a.draft"
    for path in (complete, draft):
        path.write_bytes(b"left")
    manifest = replica.save(2.0)
    assert manifest.number == 3
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {*kept[2:], *manifest.names}


def test_a_state_whose_files_are_complete_may_get_a_manifest_and_is_kept_on_a_full_storage(
    tmp_path: Path,
) -> None:
    replica = FolderReplica(tmp_path, 2, FullFolder)
    for number in range(2):
        replica.save(float(number))
    states = [tmp_path / f"checkpoint-00000003-00ff00ff-{part}-of-2.safetensors" for part in (1, 2)]
    for path in states:
        path.write_bytes(b"complete")
    # It is left by a process that was killed between the two names of the file.
    draft = states[1].with_name(f"{states[1].name}.0a0a0a0a.draft")
    draft.hardlink_to(states[1])
    with pytest.raises(StorageUnavailableError, match="there must be space for three checkpoints"):
        replica.save(2.0)
    assert all(path.exists() for path in states)
    assert not draft.exists()


def test_a_later_generation_keeps_all_processes_of_an_earlier_one_from_saving(tmp_path: Path) -> None:
    FolderReplica(tmp_path, 1).save(1.0, replace(INFO, generation=4))
    with pytest.raises(CheckpointError, match="this replica was replaced while it was disconnected"):
        FolderReplica(tmp_path, 2).save(2.0)
    assert len(list(tmp_path.iterdir())) == 2
