"""Replicas of several processes at a fixed size: their weights and gains are those of the plain model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adascale_worker.state.weights import export
from support.fast_python import PYTHON
from support.launch import PROGRAMS, free_port

PROGRAM = PROGRAMS / "shards.py"


def start(folder: Path, replicas: int, processes: int | None, **options: Any) -> list[subprocess.Popen[str]]:
    """Start the program as torchrun does.

    Args:
        folder: of the journal.
        replicas: their number.
        processes: of each replica; None for replicas of one process with the plain model.
        options: of the program.
    """
    count = replicas * (processes or 1)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ADASCALE_")},
        "OMP_NUM_THREADS": "1",
        "JOURNAL": str(folder),
        "OPTIONS": json.dumps(options),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    if processes is not None:
        environ["ADASCALE_PROCESSES_PER_REPLICA"] = str(processes)
    return [
        subprocess.Popen(
            [*PYTHON, str(PROGRAM)],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]


def train(folder: Path, replicas: int, processes: int | None, **options: Any) -> Path:
    """Run the program, see `start`, and return its journal."""
    running = start(folder, replicas, processes, **options)
    outputs = [each.communicate(timeout=100)[0] for each in running]
    assert {each.returncode for each in running} == {0}, "\n".join(outputs)
    return folder


def weights(journal: Path) -> list[dict[str, torch.Tensor]]:
    """Return the final weights of all processes."""
    return [torch.load(path) for path in sorted(journal.glob("weights-*"))]


def steps(journal: Path, lane: int = 0) -> list[dict[str, Any]]:
    """Return the records of rank 0 in a lane, of complete steps."""
    found = []
    for path in journal.glob(f"{lane}-*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found += [record for record in records if record["rank"] == 0 and record["made"]]
    return found


STEPS = 6
FIXED = {"batch_size": 24, "scale_invariant_steps": STEPS, "single_replica_gain": "consecutive"}
ACCUMULATING = {**FIXED, "local_bsz_bounds": (4, 4)}
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"trainer": FIXED, "optimizer": "adamw"},
    "clipping": {"trainer": ACCUMULATING, "clip": 0.3},
    "weights": {"trainer": ACCUMULATING, "weighted": True},
    "scaled": {
        "trainer": {"batch_size": 6, "local_bsz_bounds": (12, 12), "scale_invariant_steps": 12},
        "optimizer": "adamw",
    },
    "meshes": {"trainer": ACCUMULATING, "optimizer": "adamw", "meshes": True},
}
QUICK = [("weights", (1, 2)), ("scaled", (2, 2)), ("meshes", (2, 2))]
SLOW = [("adamw", (1, 4)), ("clipping", (2, 2)), ("meshes", (1, 4))]
"""Cases with a shape: replicas, and processes of each. A single replica makes no larger batch than B0."""


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("case", "shape"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_weights_and_gains_are_those_of_replicas_with_the_whole_model(
    tmp_path: Path, case: str, shape: tuple[int, int]
) -> None:
    replicas, processes = shape
    plain = train(tmp_path / "plain", replicas, None, **CASES[case])
    sharded = train(tmp_path / "sharded", replicas, processes, **CASES[case])
    (expected, *_), found = weights(plain), weights(sharded)
    assert len(found) == replicas * processes
    for each in found:
        assert difference(expected, each) < 2e-6
    if case == "scaled":
        assert steps(plain)[-1]["gain"] > 1.0
    for before, after in zip(steps(plain), steps(sharded), strict=True):
        assert after["samples"] == before["samples"]
        assert after["gain"] == pytest.approx(before["gain"], rel=1e-4)
        assert after["estimate"] == pytest.approx(before["estimate"], rel=1e-3, abs=1e-9)


def test_in_bfloat16_the_weights_are_near_those_of_the_whole_model_in_float32(tmp_path: Path) -> None:
    options = {"trainer": ACCUMULATING, "optimizer": "adamw", "clip": 1.0}
    plain = train(tmp_path / "plain", 1, None, **options)
    sharded = train(tmp_path / "sharded", 2, 2, bf16=True, **options)
    (expected,), found = weights(plain), weights(sharded)
    assert 1e-6 < difference(expected, found[0]) < 0.1
    assert all(difference(found[0], each) == 0.0 for each in found)


ADAMW: dict[str, Any] = {"optimizer": "adamw"}


def test_a_job_that_is_killed_in_a_save_continues_bit_for_bit(tmp_path: Path) -> None:
    """Also that of a single replica, which measures the gain with the gradient of the step before."""
    checkpoints = tmp_path / "checkpoints"
    saved = {**ACCUMULATING, "checkpoint_dir": str(checkpoints), "checkpoint_interval": 0}
    running = start(tmp_path / "job", 1, 2, **ADAMW, trainer=saved, killed=(4, 1))
    assert running[1].wait(100) == -signal.SIGKILL
    for each in running:
        # The agent kills the others.
        each.kill()
        each.communicate()
    left = [path.name for path in checkpoints.iterdir()]
    assert any(name.startswith("checkpoint-00000004-") for name in left), "the save had begun"
    assert "checkpoint-00000004.json" not in left
    resumed = train(tmp_path / "job", 1, 2, **ADAMW, trainer=saved)
    whole = train(tmp_path / "whole", 1, 2, **ADAMW, trainer=ACCUMULATING)
    found = {each["step"]: (each["gain"], each["estimate"], each["norm"]) for each in steps(resumed)}
    assert found == {each["step"]: (each["gain"], each["estimate"], each["norm"]) for each in steps(whole)}
    for after, before in zip(weights(resumed), weights(whole), strict=True):
        assert difference(after, before) == 0.0


def test_a_checkpoint_continues_with_another_number_of_processes(tmp_path: Path) -> None:
    """Also without shards, and after it, with them again, on meshes of other shapes."""
    shapes: list[tuple[int, int | None]] = [(1, 2), (2, None), (1, 4)]
    saved = {**FIXED, "checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_interval": 0}
    whole = train(tmp_path / "whole", 1, None, **ADAMW, trainer=FIXED)
    share = STEPS // len(shapes)
    for number, (replicas, processes) in enumerate(shapes, start=1):
        trainer = {**saved, "scale_invariant_steps": number * share}
        options = {**ADAMW, "trainer": trainer, "meshes": True}
        journal = train(tmp_path / f"part {number}", replicas, processes, **options)
        made = [each["step"] for each in steps(journal)]
        assert made == list(range((number - 1) * share + 1, number * share + 1))
    assert difference(weights(whole)[0], weights(journal)[0]) < 2e-6
    exported = tmp_path / "weights.safetensors"
    export(str(tmp_path / "checkpoints"), exported, best=False)
    found = load_file(exported)
    assert found.keys() == weights(journal)[0].keys()
    assert difference(weights(journal)[0], found) == 0.0
