"""Tests of checkpoints: after any interruption of a save, an intact checkpoint is left."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adascale_worker.checkpoint import CheckpointFolder, CheckpointInfo
from adascale_worker.errors import CheckpointError

INFO = CheckpointInfo(step=7, progress=21.5, epoch=1, replicas=2, generation=3, finished=False)


def state_of(number: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(number)), "number": number}


def test_load_returns_what_was_saved(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "folders" / "created" / "by save")
    saved = folder.save(state_of(1), INFO, {"accuracy": 0.5})
    loaded = folder.load()
    assert loaded is not None
    state, manifest = loaded
    assert state["number"] == 1
    assert torch.equal(state["weights"], state_of(1)["weights"])
    assert manifest == saved
    assert (manifest.step, manifest.progress, manifest.result) == (7, 21.5, {"accuracy": 0.5})


def test_load_returns_none_from_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path / "missing").load() is None
    assert CheckpointFolder(tmp_path).load() is None


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for number in range(1, 6):
        folder.save(state_of(number), INFO)
    assert folder.numbers() == [4, 5]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "missing"])
@pytest.mark.parametrize("part", ["pt", "json"])
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_loaded(
    tmp_path: Path, damage: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(state_of(1), INFO)
    folder.save(state_of(2), INFO)
    damage_file(tmp_path / f"checkpoint-00000002.{part}", damage)
    loaded = folder.load()
    assert loaded is not None
    assert loaded[0]["number"] == 1
    if (damage, part) != ("missing", "json"):  # a state without a manifest is ignored
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
        case "missing":
            path.unlink()


def test_load_fails_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for number in (1, 2):
        folder.save(state_of(number), INFO)
        damage_file(tmp_path / f"checkpoint-{number:08d}.pt", "flip")
    with pytest.raises(
        CheckpointError, match=r"no intact checkpoint is left .*00000002.pt is damaged.*remove the folder"
    ):
        folder.load()


def test_an_unsupported_format_is_an_error(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(state_of(1), INFO)
    manifest = tmp_path / "checkpoint-00000001.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99 is not supported: this version reads format 2"):
        folder.load()


def test_annotate_adds_a_result_to_the_manifest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    manifest = folder.save(state_of(1), INFO)
    folder.annotate(manifest, {"accuracy": 0.98})
    loaded = folder.load()
    assert loaded is not None
    assert loaded[1].result == {"accuracy": 0.98}


def test_a_replaced_generation_cannot_save(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(state_of(1), replace(INFO, generation=4))
    with pytest.raises(CheckpointError, match=r"generation 4 has saved in .*, but this is generation 3"):
        folder.save(state_of(2), INFO)
    assert folder.numbers() == [1]


def test_a_recreated_job_resumes_from_its_predecessor_although_its_generations_restart_at_one(
    tmp_path: Path,
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(state_of(1), replace(INFO, generation=9, incarnation=100))
    folder.save(state_of(2), replace(INFO, generation=1, incarnation=200))
    loaded = folder.load()
    assert loaded is not None
    assert (loaded[0]["number"], loaded[1].generation, loaded[1].incarnation) == (2, 1, 200)


@pytest.mark.parametrize("generation", [1, 4, 9])
def test_a_deleted_job_cannot_save_after_its_recreated_successor(tmp_path: Path, generation: int) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(state_of(1), replace(INFO, generation=4, incarnation=200))
    with pytest.raises(CheckpointError, match=r"a later job of this name, created 100 s after this one, has"):
        folder.save(state_of(2), replace(INFO, generation=generation, incarnation=100))
    with pytest.raises(CheckpointError, match="this is generation 3"):
        folder.save(state_of(2), replace(INFO, generation=3, incarnation=200))
    assert folder.numbers() == [1]


def test_a_manifest_without_an_incarnation_counts_as_the_oldest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(state_of(1), replace(INFO, generation=4))
    manifest = tmp_path / "checkpoint-00000001.json"
    members = json.loads(manifest.read_text())
    assert members.pop("incarnation") == 0
    manifest.write_text(json.dumps(members))
    with pytest.raises(CheckpointError, match="generation 4 has saved"):
        folder.save(state_of(2), INFO)
    folder.save(state_of(2), replace(INFO, generation=1, incarnation=100))
    assert folder.numbers() == [1, 2]


# Forks a child that saves the next checkpoint and is killed at its n-th operation on a file in the folder,
# for n = 0, 1, ... until a child completes. Prints each child's exit code and the checkpoint that is left.
KILLER = """
import os, signal, sys
from pathlib import Path
import torch
from adascale_worker.checkpoint import CheckpointFolder, CheckpointInfo

directory = Path(sys.argv[1])
folder = CheckpointFolder(directory)
info = CheckpointInfo(step=7, progress=21.5, epoch=1, replicas=2, generation=3, finished=False)

def save_and_be_killed(survived):
    operations = 0
    def watch(event, arguments):
        nonlocal operations
        if event in ("open", "os.rename", "os.remove") and str(directory) in str(arguments[0]):
            if operations == survived:
                os.kill(os.getpid(), signal.SIGKILL)
            operations += 1
    number = folder.load()[0]["number"] + 1
    sys.addaudithook(watch)
    folder.save({"weights": torch.full((1000,), float(number)), "number": number}, info)
    os._exit(0)

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


def test_a_kill_at_any_file_operation_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).save(state_of(1), INFO)
    run = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    *killed, completed = [line.split() for line in run.stdout.splitlines()]
    newest = 1
    for code, number, whole, kept in killed:
        assert int(code) == -signal.SIGKILL
        assert newest <= int(number) <= newest + 1
        assert whole == "True"
        assert 1 <= int(kept) <= 3  # the new checkpoint exists before the oldest is deleted
        newest = int(number)
    assert completed == ["0", str(newest + 1), "True", "2"]
    assert len(killed) >= 8, "a save opens, renames and flushes two files, and removes two"


def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint_unchanged(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk / "checkpoints")
    folder.save(state_of(1), INFO)
    large = {"weights": torch.zeros(1_000_000), "number": 2}
    with pytest.raises(
        CheckpointError, match=r"No space left on device; the last checkpoint, of step 7, is unchanged"
    ):
        folder.save(large, INFO)
    loaded = folder.load()
    assert loaded is not None
    assert loaded[0]["number"] == 1
    assert sorted(path.suffix for path in folder.directory.iterdir()) == [".json", ".pt"]
    folder.save(state_of(2), INFO)
    assert folder.numbers() == [1, 2]


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        CheckpointFolder(tmp_path / "file" / "checkpoints").save(state_of(1), INFO)
