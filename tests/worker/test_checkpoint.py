"""Tests of checkpoints: after any interruption of a save, an intact checkpoint is left."""

import errno
import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adascale_core.checkpoint_manifest import FORMAT, Manifest
from adascale_storage import NameTakenError, StorageError, WriteCancelledError, open_storage
from adascale_storage.folder import Folder
from adascale_worker.errors import CheckpointError
from adascale_worker.state.file import Snapshot
from adascale_worker.state.store import CheckpointInfo, CheckpointStore
from support.fast_python import PYTHON

INFO = CheckpointInfo(step=7, progress=21.5, epoch=1, replicas=2, generation=3, finished=False, saved_at=9.5)
CHUNK = 1000


def store_in(directory: Path) -> CheckpointStore:
    """The store of a folder, with parts so small that the states of these tests have several."""
    return CheckpointStore(Folder(directory), CHUNK)


def save(
    directory: Path, number: int, info: CheckpointInfo = INFO, result: dict[str, float | str] | None = None
) -> Manifest:
    snapshot = Snapshot()
    snapshot.copy(state_of(number))
    return store_in(directory).save(snapshot, info, result)


def load(directory: Path) -> tuple[dict[str, Any], Manifest]:
    loaded = store_in(directory).load()
    assert loaded is not None
    return loaded


def state_of(number: int, elements: int = 1000) -> dict[str, Any]:
    return {"weights": torch.full((elements,), float(number)), "number": number}


def test_load_returns_what_was_saved(tmp_path: Path) -> None:
    directory = tmp_path / "folders" / "created" / "by save"
    saved = save(directory, 1, result={"accuracy": 0.5})
    state, manifest = load(directory)
    assert state["number"] == 1
    assert torch.equal(state["weights"], state_of(1)["weights"])
    assert manifest == saved
    assert (manifest.step, manifest.progress, manifest.result) == (7, 21.5, {"accuracy": 0.5})
    assert (manifest.saved_at, len(manifest.sha256)) == (9.5, 1 + 4)


def test_the_library_safetensors_reads_the_tensors_by_name(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    snapshot = Snapshot()
    model = {
        "weight": torch.arange(6.0).reshape(2, 3),
        "mask": torch.tensor([True]),
        "steps": torch.tensor(7),
    }
    snapshot.copy({"program": {"model": model}, "complex": torch.ones(2, dtype=torch.complex128)})
    manifest = store_in(tmp_path).save(snapshot, INFO)
    read = safetensors.load_file(tmp_path / manifest.state)
    assert set(read) == {*(f"program.model.{name}" for name in model), "complex"}
    assert all(torch.equal(read[f"program.model.{name}"], tensor) for name, tensor in model.items())


def test_a_file_has_the_size_of_its_tensors_and_a_header(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1)
    assert (tmp_path / manifest.state).stat().st_size == manifest.bytes == 4000 + manifest.header_bytes
    assert manifest.header_bytes < 500


def test_load_returns_none_from_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert store_in(tmp_path / "missing").load() is None
    assert store_in(tmp_path).load() is None


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for number in range(1, 6):
        save(tmp_path, number)
    assert store_in(tmp_path).numbers() == [4, 5]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "missing", "longer"])
@pytest.mark.parametrize("part", ["state", "manifest"])
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_loaded(
    tmp_path: Path, damage: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2)
    damage_file(tmp_path / (manifest.state if part == "state" else "checkpoint-00000002.json"), damage)
    if (damage, part) == ("longer", "state"):  # what follows the state is not read
        assert load(tmp_path)[0]["number"] == 2
        return
    assert load(tmp_path)[0]["number"] == 1
    if (damage, part) != ("missing", "manifest"):  # a state without a manifest is ignored
        output = capsys.readouterr().out
        assert "checkpoint-00000002" in output
        assert "resuming from checkpoint 1, step 7" in output


def damage_file(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    match damage:
        case "flip":
            content[len(content) // 2] ^= 0xFF
            path.write_bytes(content)
        case "truncate":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "longer":
            path.write_bytes(content + b"}")
        case "missing":
            path.unlink()


def test_every_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2)
    for name in (manifest.state, "checkpoint-00000002.json"):
        path = tmp_path / name
        content = path.read_bytes()
        for position in range(0, len(content), 1 if len(content) < 2000 else 37):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            if name.endswith(".json") and json_of(damaged) == json_of(content):
                continue  # white space
            path.write_bytes(damaged)
            if name.endswith(".json") and (json_of(damaged) or {}).get("format", FORMAT) != FORMAT:
                with pytest.raises(CheckpointError, match="is not supported"):
                    load(tmp_path)
                continue
            assert load(tmp_path)[0]["number"] == 1, (name, position)
        path.write_bytes(content)
    assert load(tmp_path)[0]["number"] == 2


def json_of(content: bytes | bytearray) -> dict[str, Any] | None:
    try:
        return dict(json.loads(content))
    except ValueError:
        return None


def test_the_message_about_damage_names_the_place(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1)
    path = tmp_path / manifest.state
    content = bytearray(path.read_bytes())
    content[manifest.header_bytes + 2500] ^= 1
    path.write_bytes(content)
    part = rf"{manifest.header_bytes + 2000:,} to {manifest.header_bytes + 3000:,}"
    with pytest.raises(
        CheckpointError, match=rf"{manifest.state} is damaged in bytes {part}: their SHA-256 is"
    ):
        store_in(tmp_path).load()


def test_what_others_delete_while_it_is_read_is_not_taken_for_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replica that was replaced, and does not know it yet, saves while its successor reads."""

    class Slow(Folder):
        def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
            content = super().read(name, start, end)
            if name == manifest.state and start == 0:
                for number in range(3, 6):
                    save(tmp_path, number)
            return content

    save(tmp_path, 1)
    manifest = save(tmp_path, 2)
    loaded = CheckpointStore(Slow(tmp_path), CHUNK).load()
    assert loaded is not None
    assert loaded[0]["number"] == 5
    assert capsys.readouterr().out == ""


def test_the_message_about_a_file_that_cannot_be_read_names_it(tmp_path: Path) -> None:
    """Such as one with a bad sector of the disk."""
    manifest = save(tmp_path, 1)
    (tmp_path / manifest.state).unlink()
    (tmp_path / manifest.state).mkdir()
    with pytest.raises(CheckpointError, match=rf"cannot be read: {manifest.state}: Is a directory"):
        load(tmp_path)


def test_load_fails_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    for number in (1, 2):
        damage_file(tmp_path / save(tmp_path, number).state, "flip")
    with pytest.raises(
        CheckpointError,
        match=r"is left in \S+: checkpoint-00000002-\w+.safetensors is damaged.*another checkpoint folder",
    ):
        store_in(tmp_path).load()


def test_an_unsupported_format_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = tmp_path / "checkpoint-00000001.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(
        CheckpointError, match="format 99 is not supported: this version reads the formats 6 and 7"
    ):
        store_in(tmp_path).load()


def test_a_later_rank_0_keeps_the_result_that_an_earlier_one_has_saved(tmp_path: Path) -> None:
    save(tmp_path, 1, result={"best": 0.9, "loss": 2.0})
    assert save(tmp_path, 2, result={"loss": 1.0}).result == {"best": 0.9, "loss": 1.0}


def test_annotate_adds_a_result_without_changing_a_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2)
    before = (tmp_path / "checkpoint-00000002.json").read_bytes()
    annotated = store_in(tmp_path).annotate(manifest, {"accuracy": 0.98})
    state, loaded = load(tmp_path)
    assert (state["number"], loaded) == (2, annotated)
    assert (loaded.number, loaded.state, loaded.result) == (3, manifest.state, {"accuracy": 0.98})
    assert store_in(tmp_path).numbers() == [1, 3], "two states are kept"
    (tmp_path / "checkpoint-00000002.json").write_bytes(before)
    damage_file(tmp_path / "checkpoint-00000003.json", "flip")
    assert load(tmp_path)[1] == manifest


def test_a_replaced_generation_cannot_save(tmp_path: Path) -> None:
    save(tmp_path, 1, replace(INFO, generation=4))
    with pytest.raises(CheckpointError, match=r"generation 4 has saved in .*, but this is generation 3"):
        save(tmp_path, 2)
    assert store_in(tmp_path).numbers() == [1]


def test_a_generation_that_is_replaced_while_it_writes_cannot_save(tmp_path: Path) -> None:
    class Slow(Folder):
        def write(self, name: str, *arguments: Any, **options: Any) -> None:
            super().write(name, *arguments, **options)
            save(tmp_path, 2, replace(INFO, generation=4))

    save(tmp_path, 1)
    snapshot = Snapshot()
    snapshot.copy(state_of(3))
    with pytest.raises(CheckpointError, match=r"generation 4 has saved in .*, but this is generation 3"):
        CheckpointStore(Slow(tmp_path), CHUNK).save(snapshot, INFO)
    assert store_in(tmp_path).numbers() == [1, 2]
    assert load(tmp_path)[0]["number"] == 2
    save(tmp_path, 4, replace(INFO, generation=4))
    assert len(list(tmp_path.iterdir())) == 4, "the state without a manifest is deleted"


def test_a_save_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    files = set(tmp_path.iterdir())
    snapshot = Snapshot()
    snapshot.copy(state_of(2))
    answers = iter([False, False, True])
    with pytest.raises(WriteCancelledError):
        store_in(tmp_path).save(snapshot, INFO, is_cancelled=lambda: next(answers))
    assert set(tmp_path.iterdir()) == files


def test_a_state_whose_manifest_cannot_be_written_is_deleted_by_the_next_save(tmp_path: Path) -> None:
    class WithoutManifests(Folder):
        is_refusing = True

        def create(self, name: str, content: bytes) -> None:
            if self.is_refusing:
                raise StorageError("refused by the test")
            super().create(name, content)

    save(tmp_path, 1)
    folder = WithoutManifests(tmp_path)
    store, snapshot = CheckpointStore(folder, CHUNK), Snapshot()
    snapshot.copy(state_of(2))
    for _ in range(3):
        with pytest.raises(CheckpointError, match="refused by the test"):
            store.save(snapshot, INFO)
        assert len(list(tmp_path.glob("*.safetensors"))) == 2, "one more would fill the disk"
    folder.is_refusing = False
    store.save(snapshot, INFO)
    assert load(tmp_path)[0]["number"] == 2
    assert len(list(tmp_path.iterdir())) == 4


def test_a_state_is_kept_if_its_manifest_was_written_and_the_answer_was_lost(tmp_path: Path) -> None:
    class Forgetful(Folder):
        def create(self, name: str, content: bytes) -> None:
            super().create(name, content)
            if name.endswith("2.json"):
                raise StorageError("the answer is lost")

    save(tmp_path, 1)
    store, snapshot = CheckpointStore(Forgetful(tmp_path), CHUNK), Snapshot()
    snapshot.copy(state_of(2))
    with pytest.raises(CheckpointError, match="the answer is lost"):
        store.save(snapshot, INFO)
    assert load(tmp_path)[0]["number"] == 2
    snapshot.copy(state_of(3))
    store.save(snapshot, INFO)
    assert load(tmp_path)[0]["number"] == 3
    damage_file(tmp_path / "checkpoint-00000003.json", "flip")
    assert load(tmp_path)[0]["number"] == 2


def test_a_manifest_that_a_repeated_request_finds_is_the_writers_own(tmp_path: Path) -> None:
    class Repeating(Folder):
        def create(self, name: str, content: bytes) -> None:
            super().create(name, content)
            super().create(name, content)

    save(tmp_path, 1)
    store, snapshot = CheckpointStore(Repeating(tmp_path), CHUNK), Snapshot()
    snapshot.copy(state_of(2))
    manifest = store.save(snapshot, INFO, {"loss": 0.5})
    assert manifest.number == 2
    assert store.annotate(manifest, {"accuracy": 0.75}).number == 3
    assert load(tmp_path)[1].result == {"loss": 0.5, "accuracy": 0.75}


def test_a_folder_that_cannot_be_flushed_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems, such as those of SMB shares, flush files only."""
    flush = os.fsync

    def flush_files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", flush_files_only)
    for number in range(1, 5):
        save(tmp_path, number)
    assert load(tmp_path)[0]["number"] == 4
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_without_hard_links_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert load(tmp_path)[0]["number"] == 2
    with pytest.raises(NameTakenError):
        Folder(tmp_path).create("checkpoint-00000002.json", b"{}")

    def delete_drafts() -> Iterator[bytes]:
        yield b"{}"
        for draft in tmp_path.glob("*.draft"):
            draft.unlink()

    with pytest.raises(NameTakenError, match="has deleted its draft"):
        Folder(tmp_path).write("checkpoint-00000003.json", delete_drafts(), size=2)


def test_a_recreated_job_resumes_from_its_predecessor_although_its_generations_restart_at_one(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, replace(INFO, generation=9, incarnation=100))
    save(tmp_path, 2, replace(INFO, generation=1, incarnation=200))
    state, manifest = load(tmp_path)
    assert (state["number"], manifest.generation, manifest.incarnation) == (2, 1, 200)


@pytest.mark.parametrize("generation", [1, 4, 9])
def test_a_deleted_job_cannot_save_after_its_recreated_successor(tmp_path: Path, generation: int) -> None:
    save(tmp_path, 1, replace(INFO, generation=4, incarnation=200))
    with pytest.raises(CheckpointError, match=r"a later job of this name, created 100 s after this one, has"):
        save(tmp_path, 2, replace(INFO, generation=generation, incarnation=100))
    with pytest.raises(CheckpointError, match="this is generation 3"):
        save(tmp_path, 2, replace(INFO, generation=3, incarnation=200))
    assert store_in(tmp_path).numbers() == [1]


# Forks a child that saves the next checkpoint and ends at its n-th operation on a file in the folder, or
# before it writes a part of the state, for n = 0, 1, ... until a child completes. Prints each child's exit
# code and the checkpoint that is left. How the child ends: "kill": by SIGKILL; "lost peer": by the exit after
# the loss of a peer, while a thread writes; "close": at the end of its program, while a thread writes.
KILLER = """
import os, signal, sys, threading
from pathlib import Path
import torch
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process import exit as shutdown
from adascale_worker.process.environment import RankAssignment
from adascale_worker.state.store import CheckpointInfo, CheckpointStore
from adascale_worker.state.schedule import Checkpointing
from adascale_worker.state.schedule import Checkpointing
from adascale_worker.state.file import Snapshot
from adascale_storage.folder import Folder

torch.set_num_threads(1)
directory, end = Path(sys.argv[1]), sys.argv[2]
folder = CheckpointStore(Folder(directory), 1000)
info = CheckpointInfo(step=7, progress=21.5, epoch=1, replicas=2, generation=3, finished=False, saved_at=9.5)

def save_and_be_killed(survived):
    operations = 0
    main = threading.current_thread()
    reached, closing = threading.Event(), threading.Event()
    def operate():
        nonlocal operations
        operations += 1
        if operations != survived + 1 or (end != "kill" and threading.current_thread() is main):
            return
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        reached.set()
        if end == "lost peer":
            threading.Event().wait()
        assert closing.wait(60)
    def watch(event, arguments):
        watched = ("open", "os.rename", "os.link", "os.remove", "os.listdir", "os.scandir")
        if event in watched and str(directory) in str(arguments[0]):
            operate()
    class WatchedFolder(Folder):
        def write(self, name, parts, *, size):
            super().write(name, (operate() or part for part in parts), size=size)
    number = folder.load()[0]["number"] + 1
    state = {"weights": torch.full((1000,), float(number)), "number": number}
    store = CheckpointStore(WatchedFolder(directory), 1000)
    if end == "kill":
        snapshot = Snapshot()
        snapshot.copy(state)
        sys.addaudithook(watch)
        store.save(snapshot, info)
        os._exit(0)
    group = ReplicaGroup(RankAssignment(0, 1), torch.device("cpu"))
    checkpointing = Checkpointing(store, 1.0, group)
    sys.addaudithook(watch)
    checkpointing.start(state, info)
    while not reached.wait(0.01) and not checkpointing.wait(0.0):
        pass
    if end == "lost peer" and operations == survived + 1:
        shutdown.end_process(71)
    closing.set()
    checkpointing.close()
    os._exit(72 if operations > survived else 0)

for survived in range(1000):
    child = os.fork()
    if child == 0:
        save_and_be_killed(survived)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    state, _ = folder.load()
    whole = torch.equal(state["weights"], torch.full((1000,), float(state["number"])))
    print(code, state["number"], whole, len(folder.numbers()), flush=True)
    if code == 0:
        break
"""


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("kill", -signal.SIGKILL),
        pytest.param("lost peer", 71, marks=pytest.mark.slow),
        pytest.param("close", 72, marks=pytest.mark.slow),
    ],
)
def test_an_end_at_any_file_operation_leaves_an_intact_checkpoint(
    tmp_path: Path, end: str, exit_code: int
) -> None:
    save(tmp_path, 1)
    run = subprocess.run(
        [*PYTHON, "-c", KILLER, str(tmp_path), end],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    *killed, completed = [line.split() for line in run.stdout.splitlines()]
    newest = 1
    for code, number, whole, kept in killed:
        assert int(code) == exit_code
        assert newest <= int(number) <= newest + 1
        if end == "close":
            assert int(number) == newest + 1, "the end of the program waits for the checkpoint"
        assert whole == "True"
        assert int(kept) >= 1
        newest = int(number)
    assert completed == ["0", str(newest + 1), "True", "2"]
    assert len(killed) >= 20, "a save writes two files, one in five parts, and reads and removes others"
    assert len(list(tmp_path.iterdir())) == 4


def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint_unchanged(small_disk: Path) -> None:
    directory = small_disk / "checkpoints"
    save(directory, 1)
    snapshot = Snapshot()
    snapshot.copy({"weights": torch.zeros(1_000_000), "number": 2})
    with pytest.raises(
        CheckpointError, match=r"No space left on device; the last checkpoint, of step 7, is unchanged"
    ):
        store_in(directory).save(snapshot, INFO)
    assert load(directory)[0]["number"] == 1
    assert sorted(path.suffix for path in directory.iterdir()) == [".json", ".safetensors"]
    save(directory, 2)
    assert store_in(directory).numbers() == [1, 2]


@pytest.mark.parametrize("saved", [0, 2])
def test_what_killed_processes_have_left_does_not_keep_a_disk_full(small_disk: Path, saved: int) -> None:
    """There is room for three states of 300 KB, of which two are kept."""
    directory = small_disk / "checkpoints"
    snapshot = Snapshot()
    store = store_in(directory)
    for number in range(1, saved + 1):
        snapshot.copy(state_of(number, 75_000))
        store.save(snapshot, INFO)
    directory.mkdir(exist_ok=True)
    for writer in range(3 - saved):
        name = f"checkpoint-{saved + 1:08d}-0123456{writer}.safetensors.0123456{writer}.draft"
        (directory / name).write_bytes(b"x" * 300_000)
    snapshot.copy(state_of(3, 75_000))
    store_in(directory).save(snapshot, INFO)
    assert load(directory)[0]["number"] == 3
    assert not list(directory.glob("*.draft"))


def test_the_message_about_a_full_disk_says_how_much_to_free(small_disk: Path) -> None:
    snapshot = Snapshot()
    snapshot.copy(state_of(1, 8_000_000))
    with pytest.raises(CheckpointError, match=r"No space left .* Free 31 MiB: there must be space for three"):
        store_in(small_disk).save(snapshot, INFO)


def test_a_relative_folder_stays_the_same_if_the_program_changes_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    storages = [open_storage("mine"), open_storage(Path("mine")), open_storage("~/mine")]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert [str(each) for each in storages] == [
        str(tmp_path / "mine"),
        str(tmp_path / "mine"),
        str(tmp_path / "home" / "mine"),
    ]


@pytest.mark.parametrize("below", ["", "digits"])
def test_a_link_to_a_folder_that_is_not_mounted_is_an_error_and_no_fresh_start(
    tmp_path: Path, below: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "volume")
    with pytest.raises(CheckpointError, match=r"link is a link to \S+volume, which does not exist"):
        store_in(link / below).load()
    (tmp_path / "volume").mkdir()
    assert store_in(link / below).load() is None
    save(link / below, 1)
    assert load(link / below)[0]["number"] == 1


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(tmp_path / "file" / "checkpoints", 1)
