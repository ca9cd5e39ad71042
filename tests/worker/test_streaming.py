"""The README's loop over a stream, with a DataLoader of the program's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "streams.py"
BATCHES = 200
"""Batches of an epoch in the README."""


def run(folder: Path, *, replicas: int = 1, **environ: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ADASCALE_")}
    return subprocess.run(
        [sys.executable, *(launcher if replicas > 1 else []), str(PROGRAM)],
        env={
            **inherited,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OUT": str(folder / "out"),
            "CHECKPOINTS": str(folder / "checkpoints"),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def result(folder: Path, rank: int = 0) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / f"out.{rank}").read_text())
    return loaded


@pytest.mark.slow
def test_a_stream_trains_until_the_end_of_the_epoch_in_which_it_is_finished(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stderr
    trained = result(tmp_path)
    assert trained["epochs"] == [0, 1]
    assert trained["batches"] == 2 * BATCHES
    assert trained["sizes"] == [trained["local_bsz"]] == [8]
    assert trained["progress"] == trained["schedule"] == 2 * BATCHES


@pytest.mark.slow
def test_a_stream_trains_on_two_replicas_and_the_schedule_follows_progress(tmp_path: Path) -> None:
    ended = run(tmp_path, replicas=2)
    assert ended.returncode == 0, ended.stderr
    first, second = result(tmp_path, 0), result(tmp_path, 1)
    assert first == second
    assert first["sizes"] == [8]
    # A step at twice the batch size is worth more than one step of the schedule.
    assert first["batches"] < first["progress"]
    assert first["schedule"] == int(first["progress"])


@pytest.mark.slow
def test_an_interrupted_epoch_of_a_stream_is_repeated(tmp_path: Path) -> None:
    failed = run(tmp_path, STOP="1")
    assert failed.returncode == 1
    assert "fails on purpose" in failed.stderr
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stderr
    trained = result(tmp_path)
    assert trained["start"] == [1, BATCHES]
    assert trained["epochs"] == [1]
    assert trained["batches"] == BATCHES
