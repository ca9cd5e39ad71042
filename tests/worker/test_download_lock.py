"""Several processes of one machine that download the same files."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adascale_worker.errors import WorkerError
from adascale_worker.process.download_lock import download_lock
from support.launch import wait_until
from support.training import FIXED, MakeTrainer

DOWNLOAD = """
import os, sys, time
from pathlib import Path
from adascale_worker.process.download_lock import download_lock

folder = Path(sys.argv[1])
data, log = folder / "data", folder / "log"
with download_lock(folder) as was_interrupted:
    if was_interrupted:
        data.unlink(missing_ok=True)
    if not data.exists():
        with data.open("wb", buffering=0) as file:
            for _ in range(20):
                file.write(b"x" * 100)
                time.sleep(0.005)
                if os.environ.get("HANG"):
                    print("hangs", flush=True)
                    time.sleep(600)
        with log.open("a") as file:
            file.write(f"{os.getpid()}\\n")
print(was_interrupted, data.stat().st_size)
"""


class Processes:
    """Processes that download into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[subprocess.Popen[str]] = []

    def start(self, **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", DOWNLOAD, str(self.folder)]
        process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True)
        self.all.append(process)
        return process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path / "data set")
    yield processes
    for process in processes.all:
        process.kill()
        process.communicate()


def test_one_process_downloads_and_the_others_find_the_files(processes: Processes) -> None:
    started = [processes.start() for _ in range(4)]
    assert [process.communicate(timeout=60)[0] for process in started] == ["False 2000\n"] * 4
    (downloader,) = (processes.folder / "log").read_text().splitlines()
    assert int(downloader) in {process.pid for process in started}


def test_if_the_process_that_downloads_is_killed_the_next_one_does(processes: Processes) -> None:
    holder = processes.start(HANG="1")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "hangs\n"
    others = [processes.start() for _ in range(2)]
    lock = processes.folder / ".adascale-download-lock"
    wait_until(lambda: all(has_open(process.pid, lock) for process in others), "the others to wait")
    assert all(process.poll() is None for process in others)
    holder.kill()
    printed = sorted(process.communicate(timeout=60)[0] for process in others)
    assert printed == ["False 2000\n", "True 2000\n"]
    assert len((processes.folder / "log").read_text().splitlines()) == 1


def has_open(pid: int, file: Path) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It was closed since.
            if link.readlink() == file:
                return True
    return False


def test_the_trainer_locks_a_folder_and_releases_it_after_an_error(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(**FIXED)
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(ValueError), trainer.download_lock("data") as was_interrupted:
        assert not was_interrupted
        raise ValueError("no network")
    with trainer.download_lock(Path("data")) as was_interrupted:
        assert was_interrupted
    with trainer.download_lock("data") as was_interrupted:
        assert not was_interrupted


def test_a_folder_that_cannot_be_written_is_an_error(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = make_trainer(**FIXED)
    with (
        pytest.raises(WorkerError, match=r"cannot lock the folder .*/file: File exists\. Use a folder"),
        trainer.download_lock(tmp_path / "file"),
    ):
        pass


def test_a_process_that_waits_names_the_holder(
    processes: Processes, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adascale_worker.process.download_lock.PATIENCE", 1)
    holder = processes.start(HANG="1")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "hangs\n"
    threading.Timer(0.5, holder.kill).start()
    with download_lock(processes.folder):
        pass
    expected = f"waiting for process {holder.pid}, which has locked {processes.folder} by download_lock()"
    assert expected in capfd.readouterr().err
