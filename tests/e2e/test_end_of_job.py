"""`adascale run` of programs that end training by epochs, early, or not at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from e2e.local_run import ROOT, adascale, write_job

PROGRAM = ROOT / "tests" / "support" / "programs" / "finishes.py"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def write(path: Path, env: dict[str, str], **spec: Any) -> Path:
    """Write a job of `finishes.py`."""
    environ = {"PYTHONPATH": str(ROOT / "tests"), **env}
    return write_job(path, ["python", str(PROGRAM)], environ, batchSize=8, **spec)


def test_a_job_of_epochs_shows_its_true_end_and_its_result(tmp_path: Path, state: Path) -> None:
    job = write(tmp_path / "job.yaml", {"REQUIRED": "1"})
    run = adascale("run", job, "--state-dir", state, "--port", 0)
    assert run.returncode == 0, run.stdout
    assert re.search(r"Finished at progress 18 in [0-9.]+ s: accuracy 0.5\n\Z", run.stdout), run.stdout
    again = adascale("run", job, "--state-dir", state, "--port", 0)
    assert again.returncode == 0, again.stdout
    assert "Finished before, at step 18, progress 18" in again.stdout
    assert re.search(r"Finished at progress 18 in [0-9.]+ s: accuracy 0.5\n\Z", again.stdout), again.stdout
    log = (state / "logs" / "replica-0.log").read_text()
    assert "adascale: training has already finished, at step 18, progress 18" in log


def test_the_reason_of_an_early_end_is_on_the_last_line(tmp_path: Path, state: Path) -> None:
    job = write(tmp_path / "job.yaml", {"END": "finish"}, scaleInvariantSteps=100_000)
    run = adascale("run", job, "--state-dir", state, "--port", 0)
    assert run.returncode == 0, run.stdout
    assert re.search(r"Finished at progress 3 \(no longer improves\) in [0-9.]+ s: accuracy 0.5", run.stdout)
    again = adascale("run", job, "--state-dir", state, "--port", 0)
    assert again.returncode == 0
    assert "has already finished, at progress 3 (no longer improves): accuracy 0.5." in again.stdout


def test_a_program_without_a_required_end_shows_its_last_progress(tmp_path: Path, state: Path) -> None:
    run = adascale("run", write(tmp_path / "job.yaml", {}), "--state-dir", state, "--port", 0)
    assert run.returncode == 0, run.stdout
    assert "Finished at progress 18 in " in run.stdout


def test_a_program_that_ends_before_its_required_steps_fails_the_job(tmp_path: Path, state: Path) -> None:
    job = write(tmp_path / "job.yaml", {"END": "exit"}, scaleInvariantSteps=100_000, backoffLimit=0)
    run = adascale("run", job, "--state-dir", state, "--port", 0)
    assert run.returncode == 1
    assert "adascale: the program ended at progress 3 of 100,000 scale-invariant steps" in run.stdout
    assert "Traceback" not in run.stdout
