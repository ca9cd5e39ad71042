"""The examples, each with its job file, trained by `adascale run` for a part of their steps.

Tests of the frameworks and of sharded models have several replicas; here their examples have one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from e2e.local_run import ROOT, adascale
from support.fast_python import PYTHON


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "replicas", "steps", "result", "low", "high"),
    [
        ("cnn", 2, 400, "accuracy", 0.9, 1.0),
        ("gpt", 2, 100, "bits", 2.0, 4.8),
        ("gpt_sharded", 1, 100, "bits", 2.0, 4.8),
        ("lightning_text", 1, 200, "val_loss", 1.0, 3.2),
        ("gan", 2, 600, "recognized", 0.3, 1.0),
        ("accelerate_text", 1, 300, "accuracy", 0.65, 1.0),
        ("huggingface", 1, 200, "bits", 2.0, 4.8),
    ],
)
def test_an_example_is_trained_by_its_job_file(
    tmp_path: Path, example: str, replicas: int, steps: int, result: str, low: float, high: float
) -> None:
    document = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text())
    document["spec"]["scaleInvariantSteps"] = steps
    (container,) = document["spec"]["template"]["spec"]["containers"]
    container["command"][:1] = PYTHON
    job, state = tmp_path / "job.yaml", tmp_path / "state"
    job.write_text(yaml.safe_dump(document))
    run = adascale("run", job, "--state-dir", state, "--port", 0, "--replicas", replicas, timeout=110)
    assert run.returncode == 0, run.stdout
    reported = re.search(rf"{result}[ =]([\d.]+)", run.stdout)
    assert reported, run.stdout
    assert low < float(reported[1]) < high
