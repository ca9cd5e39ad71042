"""`adascale run` of programs whose batches do not fit into memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.local_run import ROOT, adascale, write_job
from support.fast_python import PYTHON

PROGRAM = ROOT / "tests" / "chaos" / "program.py"


@pytest.mark.slow
def test_a_job_learns_what_fits_without_losing_or_repeating_a_sample(tmp_path: Path) -> None:
    """Local batches of 8 do not fit in the model, and then those of 4 not in the loss function."""
    env = {
        "CHAOS_FOLDER": str(tmp_path),
        "PACE": "0.001",
        "CHAOS_FITS": "5 3",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    job = write_job(
        tmp_path / "job.yaml",
        [*PYTHON, str(PROGRAM)],
        env,
        batchSize=16,
        maxBatchSize=32,
        localBszBounds={"lower": 2, "upper": "auto"},
        minReplicas=2,
        maxReplicas=2,
        scaleInvariantSteps=60,
    )
    state = tmp_path / "state"
    run = adascale("run", job, "--state-dir", state, "--port", 0, timeout=180)
    assert run.returncode == 0, run.stdout
    results = [json.loads(path.read_text()) for path in tmp_path.glob("result-*.json")]
    assert [result["problems"] for result in results] == [[], []]
    assert len({result["weights"] for result in results}) == 1
    assert "training continues with at most 4" in run.stdout
    assert "training continues with at most 2" in run.stdout
    assert "was lost" not in run.stdout
