"""`adascale run` with a program of Lightning: 1 -> 2 -> 1 replicas, and a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from e2e.local_run import running, write_job
from support.fast_python import PYTHON
from support.launch import PROGRAMS
from support.members import Members

PROGRAM = PROGRAMS / "lightning_job.py"
STEPS = 3_000


@pytest.mark.release
@pytest.mark.slow
def test_a_program_of_lightning_grows_and_survives_a_kill_under_adascale_run(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    trainer = {"max_epochs": -1, "check_val_every_n_epoch": None, "val_check_interval": 100}
    env = {"JOURNAL": str(journal), "STEP_SECONDS": "0.005", "TRAINER": json.dumps(trainer)}
    job = write_job(
        tmp_path / "job.yaml",
        [*PYTHON, str(PROGRAM)],
        env,
        batchSize=8,
        maxReplicas=2,
        maxBatchSize=24,
        localBszBounds={"lower": 2, "upper": 8},
        scaleInvariantSteps=STEPS,
    )
    with running(job, tmp_path / "state") as run:
        run.wait_for_output("Generation 1 trains on 1 replica", timeout=180)
        run.wait_for_output("trains on 2 replicas", timeout=180)
        os.kill(run.wait_for_trainer(1), signal.SIGKILL)
        run.wait_for_output(
            "The trainer of replica 1 was lost (killed by SIGKILL); the others keep their state"
        )
        assert run.wait_for_exit(timeout=180) == 0, run.output
        assert "Finished at progress 3," in run.output
    recorded = Members(tmp_path)
    assert recorded.require_complete_stream() < STEPS
    assert {record["replicas"] for record in recorded.records()} == {1, 2}
    losses = validations(journal)
    assert {step // 100 for step, _ in losses} >= set(range(1, STEPS // 100 + 1))
    plain = {**env, "JOURNAL": str(tmp_path / "plain"), "PLAIN": "1", "STEP_SECONDS": "0"}
    plain["TRAINER"] = json.dumps({**trainer, "max_steps": STEPS})
    subprocess.run([*PYTHON, str(PROGRAM)], env={**os.environ, **plain}, check=True, capture_output=True)
    expected = validations(tmp_path / "plain")
    for share in (0.2, 0.5, 1.0):
        ours, theirs = loss_at(losses, share * STEPS), loss_at(expected, share * STEPS)
        assert 0.8 < ours / theirs < 1.25, (share, ours, theirs)


def validations(folder: Path) -> list[tuple[int, float]]:
    """Return the losses of validation, with their steps."""
    lines = [line for path in folder.glob("validation-*") for line in path.read_text().splitlines()]
    return sorted((step, loss) for step, loss in map(json.loads, lines))


def loss_at(losses: list[tuple[int, float]], step: float) -> float:
    return min(losses, key=lambda each: abs(each[0] - step))[1]
