"""`adascale run` of programs that end training by epochs, early, or not at all."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.local_run import adascale, running, write_job, write_paced_job
from support.fast_python import PYTHON
from support.launch import PROGRAMS, TESTS

PROGRAM = PROGRAMS / "finishes.py"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def write(path: Path, env: dict[str, str], **spec: Any) -> Path:
    """Write a job of `finishes.py`."""
    environ = {"PYTHONPATH": str(TESTS), **env}
    return write_job(path, [*PYTHON, str(PROGRAM)], environ, batchSize=8, **spec)


@pytest.mark.slow
def test_a_job_of_epochs_shows_its_true_end_and_its_result(tmp_path: Path, state: Path) -> None:
    job = write(tmp_path / "job.yaml", {"REQUIRED": "1"})
    run = adascale("run", job, "--state-dir", state, "--port", 0)
    assert run.returncode == 0, run.stdout
    end = r"Finished at progress 18 in [0-9.]+ s: accuracy 0.5\n(.*)`adascale ui` shows it.*\n\Z"
    found = re.search(end, run.stdout, re.DOTALL)
    assert found, run.stdout
    assert re.search(r"18 steps in .* s, instead of 18 in an estimated .* s on one replica\n", found[1])
    again = adascale("run", job, "--state-dir", state, "--port", 0)
    assert again.returncode == 0, again.stdout
    assert "Finished before, at step 18, progress 18" in again.stdout
    assert re.search(end, again.stdout, re.DOTALL), again.stdout
    log = (state / "logs" / "replica-0.log").read_text()
    assert "adascale: training has already finished, at step 18, progress 18" in log


def test_the_same_failure_before_the_first_step_is_shown_at_once_and_restarted_once(
    tmp_path: Path, state: Path
) -> None:
    output = "[red]the last line\n"
    job = write_job(tmp_path / "job.yaml", ["python", "-c", "raise SystemExit('[red]the last line')"])
    run = adascale("run", job, "--state-dir", state, "--port", 0)
    assert run.returncode == 1
    first, second = run.stdout.split("The program has failed twice in the same way before its first step")
    assert f"Failure 1 of the program (backoffLimit 3). Replica 0 failed: exit code 1:\n{output}" in first
    assert f"The last lines of its output:\n{output}" in second
    assert "Correct the cause, and run the command again" in second


@pytest.mark.slow
def test_a_count_on_which_the_program_fails_at_once_is_given_up(tmp_path: Path, state: Path) -> None:
    env = {"OUTSIDE": "1", "NOISE": "8"}
    job = write_paced_job(tmp_path / "job.yaml", pace=0.02, env=env, maxReplicas=2)
    with running(job, state) as run:
        run.wait_for_output(
            "Rescaling 2 -> 1: the program failed at once on 2 replicas (replica ", timeout=150
        )
        assert re.search(r"\(replica [01]: exit code 77\), but trained on 1", run.output)
        assert re.search(r"Failure 1 of the program .*Replica [01] failed: exit code 77:\n", run.output)
        run.wait_for_output(
            "the optimizer has 1 parameters that are not in the model (the first has shape (3,))"
        )
        failed = run.job()["latest"]["step"]
        run.wait_for_step(failed + 50)
        assert run.job()["latest"]["replicas"] == 1
        run.send_signal(signal.SIGINT)
        run.wait_for_exit()
    assert "Rescaling 1 -> 2" not in run.output.partition("Rescaling 2 -> 1")[2]


@pytest.mark.parametrize("delay", [0.2, 0.4])
def test_ctrl_c_in_the_first_second_shows_no_traceback(tmp_path: Path, state: Path, delay: float) -> None:
    with running(write(tmp_path / "job.yaml", {}), state) as run:
        time.sleep(delay)
        run.send_signal(signal.SIGINT)
        assert run.wait_for_exit() != 0
        # On a busy machine, the interpreter may not have started yet: then it shows a traceback of its own.
        of_the_interpreter = ("Fatal Python error: init", "Could not import runpy module")
        assert "Traceback" not in run.output or run.output.startswith(of_the_interpreter)
