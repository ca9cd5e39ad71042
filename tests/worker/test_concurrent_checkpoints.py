"""Several replicas that save at the same time, as when a job is stopped while its members hold."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.checkpoint_manifest import Manifest
from adascale_storage import MissingFileError, NameTakenError, Part, Storage, StorageFullError
from adascale_storage.folder import Folder
from adascale_worker.state.file import Snapshot
from adascale_worker.state.store import CheckpointInfo, CheckpointStore

INFO = CheckpointInfo(
    step=0, progress=0.0, epoch=0, replicas=4, generation=3, finished=False, saved_at=1.76e9
)


def save(storage: Storage, step: int, **options: Any) -> Manifest:
    snapshot = Snapshot()
    snapshot.copy({"step": step, "weights": torch.full((64,), float(step))})
    return CheckpointStore(storage, 256).save(snapshot, replace(INFO, step=step), **options)


class Files:
    """Files in memory, as all writers see them."""

    def __init__(self, content: dict[str, bytes], before_operation: Callable[[], None]) -> None:
        self.content = content
        self._before_operation = before_operation

    def __str__(self) -> str:
        return "memory"

    def path(self, name: str) -> str:
        return name

    def names(self) -> list[str]:
        self._before_operation()
        return list(self.content)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self._before_operation()
        if name not in self.content:
            raise MissingFileError("no such file")
        return self.content[name][start:end]

    def write(self, name: str, parts: Iterable[Part], *, size: int) -> None:
        content = b"".join(bytes(part) for part in parts)
        assert len(content) == size
        self.create(name, content)

    def create(self, name: str, content: bytes) -> None:
        self._before_operation()
        if name in self.content:
            raise NameTakenError("it exists")
        self.content[name] = content

    def delete(self, name: str) -> None:
        self._before_operation()
        self.content.pop(name, None)


class Turns:
    """Lets threads make one operation of their storage each, in a given order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn: int | None = None
        self._ended: set[int] = set()

    def wait(self, writer: int) -> None:
        """End the last operation of a writer, and wait for its next turn."""
        with self._changed:
            if self._turn == writer:
                self._turn = None
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == writer)

    def end(self, writer: int) -> None:
        with self._changed:
            self._ended.add(writer)
            self._turn = None
            self._changed.notify_all()

    def give(self, writer: int) -> bool:
        """Let a writer make its next operation. Returns whether it has not ended."""
        with self._changed:
            if writer in self._ended:
                return False
            self._turn = writer
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn is None)
            return True


@given(
    st.lists(st.sampled_from([100, 101]), min_size=2, max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=120),
)
def test_the_newest_checkpoint_is_intact_after_each_operation_of_several_writers(
    steps: list[int], order: list[int]
) -> None:
    content: dict[str, bytes] = {}
    for step in (1, 50):
        save(Files(content, lambda: None), step)
    turns = Turns()
    saved: list[int] = []

    def run(writer: int) -> None:
        try:
            files = Files(content, lambda: turns.wait(writer))
            saved.append(save(files, steps[writer], only_if_latest=True).step)
        finally:
            turns.end(writer)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in range(len(steps))]
    for thread in threads:
        thread.start()
    left, choices = list(range(len(steps))), itertools.cycle(order)
    while left:
        writer = left[next(choices) % len(left)]
        if not turns.give(writer):
            left.remove(writer)
            continue
        store = CheckpointStore(Files(dict(content), lambda: None))
        loaded = store.load(store.numbers()[-1])
        assert loaded is not None
        assert loaded[1].step >= max(saved, default=50)
    for thread in threads:
        thread.join()
    assert len(saved) == len(steps), "each writer has saved its state, or another one a later state"
    assert all(got >= step for got, step in zip(sorted(saved), sorted(steps), strict=True))
    for step in (200, 201, 202):
        save(Files(content, lambda: None), step)
    assert len(content) == 4, "what the writers have left is deleted"


def test_replicas_that_save_at_the_same_time_leave_intact_checkpoints(tmp_path: Path) -> None:
    replicas, context = 4, multiprocessing.get_context("fork")
    for attempt in range(5):
        folder = Folder(tmp_path / str(attempt))
        for step in (1, 50):
            save(folder, step)
        barrier = context.Barrier(replicas)

        def run(folder: Folder = folder, barrier: Any = barrier) -> None:
            barrier.wait()
            save(folder, 100, only_if_latest=True)

        processes = [context.Process(target=run) for _ in range(replicas)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * replicas
        store = CheckpointStore(folder)
        numbers = store.numbers()
        assert len(numbers) == 2
        for number in numbers:
            loaded = store.load(number)
            assert loaded is not None
            assert loaded[0]["step"] == 100


def test_members_that_save_at_the_same_time_share_what_space_is_left(tmp_path: Path) -> None:
    """Each of them writes its state beside those of the others, which may not fit together."""

    class Crowded(Folder):
        attempts = 0

        def write(self, name: str, parts: Iterable[Part], *, size: int) -> None:
            if name.endswith(".safetensors"):
                self.attempts += 1
                if self.attempts <= 2:
                    raise StorageFullError("No space left on device")
            super().write(name, parts, size=size)

    others = tmp_path / "checkpoint-00000001-01234567.safetensors.01234567.draft"
    others.touch()
    assert save(Crowded(tmp_path), 100, only_if_latest=True).step == 100
    assert others.exists(), "it is not deleted while it may be written"


def test_a_writer_that_is_overtaken_again_and_again_writes_its_state_again(tmp_path: Path) -> None:
    overtaken: list[str] = []

    class Slow(Folder):
        def write(self, name: str, parts: Iterable[Part], *, size: int) -> None:
            def slow_parts() -> Iterator[Part]:
                for number, part in enumerate(parts):
                    if number == 1 and name.endswith(".safetensors") and len(overtaken) < 2:
                        overtaken.append(name)
                        for step in (61, 62, 63):
                            save(Folder(tmp_path), step)
                    yield part

            super().write(name, slow_parts(), size=size)

    save(Folder(tmp_path), 1)
    manifest = save(Slow(tmp_path), 70)
    assert len(overtaken) == 2
    loaded = CheckpointStore(Folder(tmp_path)).load()
    assert loaded is not None
    assert (loaded[0]["step"], loaded[1]) == (70, manifest)


def test_a_replaced_replica_does_not_delete_the_state_that_its_successor_writes(tmp_path: Path) -> None:
    class Slow(Folder):
        def create(self, name: str, content: bytes) -> None:
            if name.endswith("2.json"):
                save(Folder(tmp_path), 50)
            super().create(name, content)

    save(Folder(tmp_path), 1)
    snapshot = Snapshot()
    snapshot.copy({"step": 60})
    CheckpointStore(Slow(tmp_path)).save(snapshot, replace(INFO, step=60, generation=4))
    loaded = CheckpointStore(Folder(tmp_path)).load()
    assert loaded is not None
    assert loaded[0]["step"] == 60
