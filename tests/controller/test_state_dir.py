"""The state folder: one run at a time, and nothing lost but what is ours to drop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adascale_controller.local.state_dir import Lock, StateDir, StateDirError

HOLD = """
import signal, subprocess, sys, time
from pathlib import Path
from adascale_controller.local.state_dir import Lock, StateDir
lock = Lock(StateDir(Path(sys.argv[1])), print)
child = subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[lock.descriptor], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> StateDir:
    made = StateDir(tmp_path / "state")
    made.create()
    return made


@pytest.fixture
def holder(folder: StateDir) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A run that holds the lock, and a process that it has started."""
    run = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path), "1.5"], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    with run.stdout:
        child = int(run.stdout.readline())
        yield run, child
    run.kill()
    run.wait()


def test_a_second_run_is_told_who_holds_the_folder(
    folder: StateDir, holder: tuple[subprocess.Popen[str], int]
) -> None:
    with pytest.raises(
        StateDirError, match=rf"is in use by another run \(process {holder[0].pid}\)"
    ) as raised:
        Lock(folder, pytest.fail)
    assert raised.value.exit_code == 2


def test_after_a_killed_run_its_processes_are_waited_for(
    folder: StateDir, holder: tuple[subprocess.Popen[str], int]
) -> None:
    run, _ = holder
    run.kill()
    run.wait()
    told: list[str] = []
    began = time.monotonic()
    Lock(folder, told.append).release()
    assert time.monotonic() - began > 0.2
    assert told == ["The run before this one was killed; waiting for its processes to save and leave"]


def test_waiting_for_the_processes_of_a_killed_run_can_be_given_up(
    folder: StateDir, holder: tuple[subprocess.Popen[str], int]
) -> None:
    run, child = holder
    run.kill()
    run.wait()
    with pytest.raises(StateDirError, match=rf"is still in use by process {child}"):
        Lock(folder, lambda _: None, stop=lambda: True)
    os.kill(child, signal.SIGKILL)


def test_the_lock_is_free_once_it_is_released(folder: StateDir) -> None:
    Lock(folder, pytest.fail).release()
    Lock(folder, pytest.fail).release()


def test_the_runs_of_a_job_are_remembered(folder: StateDir) -> None:
    assert folder.begin_run("default.a", 1.0) == [1.0]
    assert folder.begin_run("default.a", 2.0) == [1.0, 2.0]


def test_a_line_cut_off_by_a_crash_is_passed_over(folder: StateDir) -> None:
    folder.begin_run("default.a", 1.0)
    with folder.runs_file.open("a") as file:
        file.write('\n{"job": "defa')
    assert folder.begin_run("default.a", 2.0) == [1.0, 2.0]
    assert folder.begin_run("default.a", 3.0) == [1.0, 2.0, 3.0]


def test_the_folder_of_another_job_is_refused(folder: StateDir) -> None:
    folder.begin_run("default.a", 1.0)
    with pytest.raises(StateDirError, match=r"holds the state of job default\.a, not of default\.b"):
        folder.begin_run("default.b", 2.0)


def test_what_is_forgotten_is_ours_only(folder: StateDir, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ours = [
        folder.database,
        folder.database.with_name("api.sqlite-wal"),
        folder.service_log,
        folder.replica_log(0),
        elsewhere / "checkpoint-00000001.json",
        elsewhere / "checkpoint-00000001.pt",
        elsewhere / "checkpoint-00000002.pt.draft",
    ]
    theirs = [folder.path / "notes.txt", elsewhere / "checkpoint-best.pt", elsewhere / "data.pt"]
    for file in (*ours, *theirs):
        file.touch()
    folder.begin_run("default.a", 1.0)
    folder.forget(elsewhere)
    assert [file for file in (*ours, folder.runs_file) if file.exists()] == []
    assert [file for file in theirs if not file.exists()] == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateDirError, match=r"can't be made: Not a directory; give another with --state-dir"):
        StateDir(tmp_path / "file" / "state").create()


def test_the_service_is_announced_while_it_is_there(folder: StateDir) -> None:
    folder.announce("http://127.0.0.1:1", "default.a")
    assert json.loads(folder.service_file.read_text()) == {
        "url": "http://127.0.0.1:1",
        "pid": os.getpid(),
        "job": "default.a",
    }
    folder.withdraw()
    assert not folder.service_file.exists()
