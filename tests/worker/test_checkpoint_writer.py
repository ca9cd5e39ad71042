"""Tests of checkpoints that are written while training continues."""

import math
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from adascale_storage import Part, StorageError
from adascale_storage.folder import Folder
from adascale_worker.errors import CheckpointError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.state import schedule
from adascale_worker.state.file import Snapshot
from adascale_worker.state.schedule import Checkpointing
from adascale_worker.state.store import CheckpointInfo, CheckpointStore

INFO = CheckpointInfo(step=7, progress=21.5, epoch=1, replicas=2, generation=3, finished=False, saved_at=9.5)


class ControlledFolder(Folder):
    """A folder that writes one part for each permit, and fails on request."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.permits = threading.Semaphore(0)
        self.began = threading.Event()
        self.failure: str | None = None

    def write(self, name: str, parts: Any, *, size: int) -> None:
        super().write(name, self._controlled(parts), size=size)

    def _controlled(self, parts: Any) -> Iterator[Part]:
        for part in parts:
            self.began.set()
            assert self.permits.acquire(timeout=60)
            if self.failure:
                raise StorageError(self.failure)
            yield part


@pytest.fixture
def folder(tmp_path: Path) -> ControlledFolder:
    return ControlledFolder(tmp_path)


@pytest.fixture
def writer(folder: ControlledFolder) -> Iterator[Checkpointing]:
    writer = Checkpointing(CheckpointStore(folder, chunk_bytes=4000), 1.0, group_of())
    yield writer
    folder.permits.release(1000)
    assert writer.wait(60)


def load(folder: Folder) -> dict[str, Any]:
    loaded = CheckpointStore(folder).load()
    assert loaded is not None
    return loaded[0]


def test_what_is_saved_is_the_state_at_the_start(writer: Checkpointing, folder: ControlledFolder) -> None:
    weights = torch.ones(5000)
    numbers = [1, 2]
    state = {"weights": weights, "numbers": numbers}
    writer.start(state, INFO)
    assert folder.began.wait(60)
    weights.zero_()
    numbers.append(3)
    assert writer.is_busy
    assert writer.manifest is None
    folder.permits.release(1000)
    assert writer.wait(60)
    assert writer.manifest is not None
    assert writer.manifest.step == 7
    loaded = load(folder)
    assert torch.equal(loaded["weights"], torch.ones(5000))
    assert loaded["numbers"] == [1, 2]


def test_only_one_checkpoint_is_written_at_a_time(writer: Checkpointing, folder: ControlledFolder) -> None:
    writer.start({"number": 1}, INFO)
    assert folder.began.wait(60)
    writer.start({"number": 2}, INFO)
    folder.permits.release(1000)
    assert writer.wait(60)
    assert (CheckpointStore(folder).numbers(), load(folder)["number"]) == ([1], 1)


def test_a_durable_save_gives_up_the_one_that_is_being_written(
    writer: Checkpointing, folder: ControlledFolder
) -> None:
    writer.start({"weights": torch.ones(5000), "number": 1}, INFO)
    assert folder.began.wait(60)
    thread = threading.Timer(0.05, folder.permits.release, args=[1000])
    thread.start()
    writer.save(replace(INFO, step=8), lambda: {"weights": torch.ones(5000), "number": 2}, durable=True)
    thread.join()
    assert writer.manifest is not None
    assert (writer.manifest.number, load(folder)["number"]) == (1, 2)
    assert len(list(folder.directory.iterdir())) == 2


def test_a_failure_is_reported_once_until_a_checkpoint_is_saved(
    writer: Checkpointing, folder: ControlledFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.permits.release(1000)
    for failure in ("the disk is full", "the disk is full", None, "the disk is full"):
        folder.failure = failure
        writer.start({"number": 1}, INFO)
        assert writer.wait(60)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3, lines
    assert "the disk is full; no earlier checkpoint exists" in lines[0]
    assert lines[0].endswith("training continues without this checkpoint")
    assert lines[1] == "adascale: checkpoints are saved again, the last one at step 7"
    assert "the disk is full; the last checkpoint, of step 7, is unchanged" in lines[2]


def test_a_durable_save_raises_its_failure(writer: Checkpointing, folder: ControlledFolder) -> None:
    folder.permits.release(1000)
    folder.failure = "the disk is full"
    with pytest.raises(CheckpointError, match="the disk is full"):
        writer.save(INFO, lambda: {"number": 1}, durable=True)


def test_memory_is_released_while_a_checkpoint_is_written_and_used_by_the_next(
    writer: Checkpointing, folder: ControlledFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.release_memory()
    writer.start({"weights": torch.ones(5000)}, INFO)
    copy = weakref.ref(writer._snapshot)
    assert folder.began.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(schedule, "MAX_WAIT_FOR_MEMORY", 0.0)
        writer.release_memory()  # the storage does not answer
    assert copy() is not None
    assert writer.is_busy
    folder.permits.release(1000)
    assert writer.wait(60)
    assert copy() is None
    assert writer.manifest is None
    writer.start({"weights": torch.ones(3000)}, INFO)
    assert writer.wait(60)
    assert len(load(folder)["weights"]) == 3000


def test_a_slow_storage_is_reported_once(
    writer: Checkpointing,
    folder: ControlledFolder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer.start({"number": 1}, INFO)
    assert folder.began.wait(60)
    assert writer.is_busy
    assert capsys.readouterr().out == ""
    later = time.monotonic() + 100
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: later))
    assert writer.is_busy
    assert writer.is_busy
    output = capsys.readouterr().out
    assert output.count("the checkpoint of step 7 is still being written to") == 1, output
    assert "longer than the interval of 1 s: training continues" in output


def test_the_memory_of_a_snapshot_is_used_again() -> None:
    snapshot = Snapshot()
    snapshot.copy({"a": torch.ones(100), "b": torch.ones(50, dtype=torch.float64)})
    first = [memoryview(part).tobytes() for part in snapshot.parts(1 << 20)]
    address = snapshot._memory.data_ptr()
    for size in (100, 40, 100):
        snapshot.copy({"a": torch.full((size,), 2.0), "b": torch.ones(50, dtype=torch.float64)})
        assert snapshot._memory.data_ptr() == address
    snapshot.copy({"a": torch.ones(100), "b": torch.ones(50, dtype=torch.float64)})
    assert [memoryview(part).tobytes() for part in snapshot.parts(1 << 20)] == first


# -- when a checkpoint is due -----------------------------------------------------------------------------


def group_of(*, is_main: bool = True) -> Any:
    return SimpleNamespace(
        is_main=is_main,
        rank=0 if is_main else 1,
        has_failed=False,
        broadcast=lambda value: value,
        own=SimpleNamespace(beside=None),
    )


def checkpointing_in(directory: Path, interval: float) -> Checkpointing:
    return Checkpointing(directory, interval, cast(ReplicaGroup, group_of()))


def save(checkpointing: Checkpointing, saved_at: float) -> None:
    checkpointing.save(replace(INFO, saved_at=saved_at), lambda: {"number": 1}, durable=True)


def test_a_job_without_a_checkpoint_saves_its_first_step(tmp_path: Path) -> None:
    checkpointing = checkpointing_in(tmp_path, 1000.0)
    assert checkpointing.load() is None
    assert checkpointing.is_due
    save(checkpointing, time.time())
    assert not checkpointing.is_due


def test_a_checkpoint_that_is_given_up_for_its_memory_is_followed_by_another(
    tmp_path: Path, folder: ControlledFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "open_storage", lambda _: folder)
    checkpointing = checkpointing_in(tmp_path, 1000.0)
    checkpointing.save(INFO, lambda: {"weights": torch.ones(5000)})
    assert folder.began.wait(60)

    def answer_after_cancellation() -> None:
        assert checkpointing._cancelled.wait(60)
        folder.permits.release(1000)

    thread = threading.Thread(target=answer_after_cancellation)
    thread.start()
    checkpointing.release_memory()
    thread.join()
    assert checkpointing.wait(60)
    assert checkpointing.load() is None
    assert checkpointing.is_due
    checkpointing.save(INFO, lambda: {"number": 2})
    checkpointing.close()
    checkpointing.release_memory()
    assert not checkpointing.is_due


@pytest.mark.parametrize(("age", "is_due"), [(0.0, False), (400.0, False), (600.0, True), (-600.0, False)])
def test_the_interval_continues_over_a_restart(tmp_path: Path, age: float, is_due: bool) -> None:
    save(checkpointing_in(tmp_path, 500.0), time.time() - age)
    restarted = checkpointing_in(tmp_path, 500.0)
    restarted.load()
    assert restarted.is_due == is_due


def test_a_checkpoint_is_due_when_another_replica_becomes_rank_0(tmp_path: Path) -> None:
    group = group_of(is_main=False)
    checkpointing = Checkpointing(tmp_path, 1000.0, group)
    checkpointing.begin_generation()
    checkpointing.save(INFO, lambda: {"number": 1})
    checkpointing.begin_generation()
    assert not checkpointing.is_due
    group.is_main, group.rank = True, 0
    checkpointing.begin_generation()
    assert checkpointing.is_due
    checkpointing.save(INFO, lambda: {"number": 2})
    checkpointing.close()
    checkpointing.begin_generation()
    assert not checkpointing.is_due


# -- a storage that does not work -------------------------------------------------------------------------


class FailingFolder(Folder):
    """A folder that does not work, except after `failures` attempts."""

    def __init__(self, directory: Path, failures: int) -> None:
        super().__init__(directory)
        self.failures = failures
        self.attempts = 0

    def names(self) -> list[str]:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise StorageError("the server does not answer")
        return super().names()


def failing_checkpointing(
    directory: Path,
    failures: int,
    monkeypatch: pytest.MonkeyPatch,
    max_attempts: float = math.inf,
) -> tuple[Checkpointing, FailingFolder, Any]:
    folder, group = FailingFolder(directory, failures), group_of()
    monkeypatch.setattr(schedule, "open_storage", lambda _: folder)
    return Checkpointing(directory, 1000.0, group, lambda: folder.attempts > max_attempts), folder, group


def test_the_end_of_training_is_saved_as_soon_as_the_storage_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointing, folder, _ = failing_checkpointing(tmp_path, 3, monkeypatch)
    checkpointing.save(INFO, lambda: {"number": 1}, final=True)
    assert checkpointing.has_final
    assert load(folder)["number"] == 1
    first, second = capsys.readouterr().out.splitlines()
    assert "the server does not answer" in first
    assert first.endswith("trying again for 600 s")
    assert second == "adascale: the storage of checkpoints works again"


def test_the_end_of_training_is_saved_by_finish_as_soon_as_the_storage_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing, folder, _ = failing_checkpointing(tmp_path, 2, monkeypatch)
    checkpointing.save_on_rank_0(INFO, lambda: {"number": 1})
    assert folder.attempts > 2
    assert checkpointing.load() == {"number": 1}


def test_a_job_that_has_trained_waits_for_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpointing_in(tmp_path, 1000.0), time.time())
    checkpointing, _, _ = failing_checkpointing(tmp_path, 2, monkeypatch)
    assert checkpointing.load(wait=True) == {"number": 1}


def test_other_reads_and_writes_of_a_storage_that_does_not_work_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing, folder, _ = failing_checkpointing(tmp_path, 100, monkeypatch)
    with pytest.raises(CheckpointError, match="cannot be read: the server does not answer"):
        checkpointing.load()
    assert folder.attempts == 1
    with pytest.raises(CheckpointError, match="the server does not answer"):
        checkpointing.save(INFO, lambda: {"number": 1}, durable=True)
    assert folder.attempts <= 4


@pytest.mark.parametrize("end", ["the time is over", "a replica is lost", "the process is terminated"])
def test_waiting_for_a_storage_ends(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    max_attempts = 4 if end == "the process is terminated" else math.inf
    checkpointing, _, group = failing_checkpointing(tmp_path, 10**9, monkeypatch, max_attempts)
    if end == "the time is over":
        monkeypatch.setattr(schedule, "MAX_WAIT_FOR_STORAGE", 0.3)
    elif end == "a replica is lost":
        group.has_failed = True
    with pytest.raises(CheckpointError, match="the server does not answer"):
        checkpointing.save(INFO, lambda: {"number": 1}, final=True)
    assert not checkpointing.has_final
    with pytest.raises(CheckpointError, match="the server does not answer"):
        checkpointing.load(wait=True)


def test_a_replica_that_was_replaced_does_not_try_to_save_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(checkpointing_in(tmp_path, 1000.0), time.time())
    with pytest.raises(CheckpointError, match="this replica was replaced while it was disconnected"):
        checkpointing_in(tmp_path, 1000.0).save(
            replace(INFO, generation=2), lambda: {"number": 2}, final=True
        )
    assert capsys.readouterr().out == ""
