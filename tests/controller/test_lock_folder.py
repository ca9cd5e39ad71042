"""A state folder on a file system without file locks, with real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.test_state_dir import HOLD
from e2e.local_run import adascale, write_light_job
from support.file_systems import limited_folder

TRY = """
import sys
from pathlib import Path
from adascale_controller.local.state_dir import StateDir, StateDirError, StateLock, running_process
folder = StateDir(Path(sys.argv[1]))
try:
    folder.create()
    print("running:", running_process(folder))
    StateLock(folder, print)
    print("locked")
except StateDirError as error:
    print(error)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return limited_folder(tmp_path / "state", tmp_path, locks=False)


def run(code: str, *arguments: object, environ: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def test_one_run_at_a_time_uses_a_folder_without_file_locks(tmp_path: Path, environ: dict[str, str]) -> None:
    state = tmp_path / "state"
    assert run(TRY, state, environ=environ) == "running: None\nlocked\n"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state), "60"],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    with holder.stdout:
        child = int(holder.stdout.readline())
        printed = run(TRY, state, environ=environ)
        assert printed.startswith(f"running: {holder.pid}\n{state} is in use by another run (process ")
        os.kill(child, 9)
        holder.kill()
        holder.wait()
    assert run(TRY, state, environ=environ).endswith("locked\n")
    other = tmp_path / "other"
    assert run(TRY, other, environ=environ) == "running: None\nlocked\n"
    assert (other / "lock").exists()


def test_a_job_runs_in_a_folder_without_file_locks(tmp_path: Path, environ: dict[str, str]) -> None:
    job, state = write_light_job(tmp_path / "job.yaml", "exit", "0"), tmp_path / "state"
    completed = adascale("run", job, "--state-dir", state, "--port", 0, timeout=60, **environ)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    printed = " ".join(completed.stdout.split())
    assert f"The file system of {state} has no file locks, so the database" in printed
    assert "Do not run test on another machine" in printed
    assert not (state / "api.sqlite").exists()
    assert list(tmp_path.glob("adascale-*/*/api.sqlite"))
