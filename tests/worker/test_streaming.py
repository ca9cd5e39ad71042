"""A loop over an endless stream."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.launch import PROGRAMS, run_program

PROGRAM = PROGRAMS / "streams.py"


def run(folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return run_program(PROGRAM, OUT=folder / "out", CHECKPOINTS=folder / "checkpoints", **options)


def result(folder: Path, rank: int = 0) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / f"out.{rank}").read_text())
    return loaded


@pytest.mark.slow
def test_an_endless_stream_ends_within_a_step_and_continues_after_a_failure(tmp_path: Path) -> None:
    ended = run(tmp_path / "calm")
    assert ended.returncode == 0, ended.stderr
    calm = result(tmp_path / "calm")
    assert calm["seen"] == list(range(250 * 8))
    assert calm["progress"] == calm["schedule"] == 250
    failed = run(tmp_path, STOP="100")
    assert failed.returncode == 1
    assert "fails on purpose" in failed.stderr
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stderr
    resumed = result(tmp_path)
    assert 0 < resumed["start"] <= 100
    assert resumed["seen"] == calm["seen"][8 * resumed["start"] :]
    assert resumed["weights"] == calm["weights"]
