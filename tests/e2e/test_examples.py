"""The examples, each with its job file, trained by `adascale run` for a part of their steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from e2e.local_run import ROOT, adascale
from support.fast_python import PYTHON


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "steps", "result", "low", "high"),
    [
        ("cnn", 400, "accuracy", 0.9, 1.0),
        ("gpt", 100, "bits", 2.0, 4.8),
        ("gpt_sharded", 100, "bits", 2.0, 4.8),
        ("lightning_text", 200, "val_loss", 1.0, 3.2),
        ("gan", 600, "recognized", 0.3, 1.0),
        ("accelerate_text", 300, "accuracy", 0.65, 1.0),
        ("huggingface", 200, "bits", 2.0, 4.8),
    ],
)
def test_an_example_is_trained_by_its_job_file(
    tmp_path: Path, example: str, steps: int, result: str, low: float, high: float
) -> None:
    document = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text())
    document["spec"]["scaleInvariantSteps"] = steps
    (container,) = document["spec"]["template"]["spec"]["containers"]
    container["command"][:1] = PYTHON
    job, state = tmp_path / "job.yaml", tmp_path / "state"
    job.write_text(yaml.safe_dump(document))
    run = adascale("run", job, "--state-dir", state, "--port", 0, timeout=110)
    assert run.returncode == 0, run.stdout
    reported = re.search(rf"{result}[ =]([\d.]+)", run.stdout)
    assert reported, run.stdout
    assert low < float(reported[1]) < high
