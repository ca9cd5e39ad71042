"""The state folder: its lock, its history, and which files are deleted."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adascale_controller.local import state_dir
from adascale_controller.local.run_history import (
    RunRecord,
    read_runs,
    record_end,
    record_start,
    require_folder_of,
)
from adascale_controller.local.service_process import (
    RunningService,
    mark_stopping,
    read_service,
    remove_service,
    write_service,
)
from adascale_controller.local.state_dir import StateDir, StateLock, running_process
from adascale_core.errors import UsageError
from support.observed_jobs import report

HOLD = """
import signal, subprocess, sys, time
from pathlib import Path
from adascale_controller.local.state_dir import StateDir, StateLock
from adascale_core.errors import UsageError
lock = StateLock(StateDir(Path(sys.argv[1])), print)
child = subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[lock.descriptor], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> StateDir:
    created = StateDir(tmp_path / "state")
    created.create()
    return created


@pytest.fixture
def holder(folder: StateDir) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A run that holds the lock, and a child process of it that inherited the lock."""
    run = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path), "1.5"], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    with run.stdout:
        child = int(run.stdout.readline())
        yield run, child
    run.kill()
    run.wait()


def test_a_locked_folder_is_an_error_that_names_the_holder(
    folder: StateDir, holder: tuple[subprocess.Popen[str], int]
) -> None:
    with pytest.raises(UsageError, match=rf"is in use by another run \(process {holder[0].pid}\)") as raised:
        StateLock(folder, pytest.fail)
    assert raised.value.exit_code == 2


def test_the_lock_is_free_when_the_last_process_of_a_killed_run_has_exited(
    folder: StateDir, holder: tuple[subprocess.Popen[str], int]
) -> None:
    run, _ = holder
    run.kill()
    run.wait()
    messages: list[str] = []
    started = time.monotonic()
    StateLock(folder, messages.append).release()
    assert time.monotonic() - started > 0.2
    assert messages == ["The previous run was killed; waiting for its processes to save and exit"]


def test_the_process_of_a_run_is_found_while_it_runs(
    folder: StateDir, holder: tuple[subprocess.Popen[str], int]
) -> None:
    run, _ = holder
    assert running_process(folder) == run.pid
    run.kill()
    run.wait()
    assert running_process(folder) is None


def test_a_folder_without_a_run_has_no_process(folder: StateDir) -> None:
    assert running_process(folder) is None
    StateLock(folder, pytest.fail).release()
    # This process still runs, but it no longer holds the lock.
    assert running_process(folder) is None


def test_waiting_for_the_lock_can_be_cancelled(
    folder: StateDir, holder: tuple[subprocess.Popen[str], int]
) -> None:
    run, child = holder
    run.kill()
    run.wait()
    with pytest.raises(UsageError, match=rf"is still in use by process {child}"):
        StateLock(folder, lambda _: None, cancelled=lambda: True)
    os.kill(child, signal.SIGKILL)


def test_a_lock_file_that_another_process_deletes_is_locked_at_its_path(
    folder: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete_then_lock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
        # As `adascale rm` does between the opening of the file and its lock.
        if not deleted:
            deleted.append(folder.lock_file)
            folder.lock_file.unlink()
        return try_lock(descriptor, operation)

    deleted: list[Path] = []
    try_lock = state_dir.try_lock
    monkeypatch.setattr(state_dir, "try_lock", delete_then_lock)
    lock = StateLock(folder, pytest.fail)
    try:
        with pytest.raises(UsageError, match="in use by another run"):
            StateLock(folder, pytest.fail)
    finally:
        lock.release()


def test_the_history_has_the_exit_codes_of_runs_that_ended(folder: StateDir) -> None:
    assert read_runs(folder) == []
    ended, killed = RunRecord("default.a", 1.0, 100, "/data", {"torch": "2.9"}), RunRecord("default.a", 2.0)
    record_start(folder, ended)
    record_end(folder, 1, 1.5, "the program failed")
    record_start(folder, killed)
    assert read_runs(folder) == [
        replace(ended, exit_code=1, ended=1.5, reason="the program failed"),
        killed,
    ]


def test_the_end_of_a_run_that_diverged_is_recorded(folder: StateDir) -> None:
    record_start(folder, RunRecord("default.a", 1.0))
    record_end(folder, 3, 1.5, "the program failed", replace(report(), loss=1e300))
    (run,) = read_runs(folder)
    assert (run.exit_code, run.reason, run.loss) == (3, "the program failed", None)


def test_a_line_that_a_crash_cut_off_is_skipped(folder: StateDir) -> None:
    record_start(folder, RunRecord("default.a", 1.0))
    with folder.history_file.open("a") as file:
        file.write('\n{"job": "defa')
    assert record_start(folder, RunRecord("default.a", 2.0)) == [1.0, 2.0]
    assert record_start(folder, RunRecord("default.a", 3.0)) == [1.0, 2.0, 3.0]


def test_the_folder_of_another_job_is_an_error(folder: StateDir) -> None:
    record_start(folder, RunRecord("default.a", 1.0))
    with pytest.raises(UsageError, match=r"contains the state of job default\.a, not of default\.b"):
        require_folder_of(folder, "default.b")
    require_folder_of(folder, "default.a")


def test_only_our_own_files_are_deleted(folder: StateDir, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ours = [
        folder.database,
        folder.database.with_name("api.sqlite-wal"),
        folder.service_log,
        folder.replica_log(0),
        elsewhere / "checkpoint-00000001.json",
        elsewhere / "checkpoint-00000001-0123abcd.safetensors",
        elsewhere / "checkpoint-00000002.json.0123abcd.draft",
    ]
    theirs = [folder.path / "notes.txt", elsewhere / "checkpoint-best.safetensors", elsewhere / "data.pt"]
    for file in (*ours, *theirs):
        file.touch()
    record_start(folder, RunRecord("default.a", 1.0))
    folder.delete_saved_state(elsewhere)
    assert [file for file in (*ours, folder.history_file) if file.exists()] == []
    assert [file for file in theirs if not file.exists()] == []


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError,
        match=r"cannot create the state folder .*: Not a directory; use another with --state-dir",
    ):
        StateDir(tmp_path / "file" / "state").create()


def test_the_address_of_the_service_is_in_a_file_until_it_is_removed(folder: StateDir) -> None:
    service = RunningService("http://127.0.0.1:1", os.getpid(), "default.a", read_token="secret")
    write_service(folder, service)
    assert folder.service_file.stat().st_mode & 0o077 == 0
    assert read_service(folder) == service
    mark_stopping(folder)
    assert read_service(folder) == replace(service, stopping=True)
    remove_service(folder)
    mark_stopping(folder)
    assert not folder.service_file.exists()
