"""A loop over an endless stream, and loops over a stream with a DataLoader of the program's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.launch import PROGRAMS, run_program
from support.members import Members

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


def require_equal_steps(job: Members) -> int:
    """Check that the members have made each step at the same place of an epoch; return the steps."""
    places: dict[int, set[tuple[int, int]]] = {}
    for record in job.records():
        if record["made"]:
            places.setdefault(record["step"], set()).add((record["generation"], record["batch"]))
    assert sorted(places) == list(range(1, len(places) + 1))
    assert all(len(place) == 1 for place in places.values()), places
    return len(places)


def test_a_stream_continues_with_the_next_epoch_when_a_member_is_lost(
    make_members: Callable[..., Members],
) -> None:
    batches = 6
    options = {"PROGRAM": PROGRAMS / "own_batches.py", "EPOCHS": 8, "BATCHES": batches, "STEP_SECONDS": 0.02}
    job = make_members("killed", **options)
    *members, spare = job.start(4)
    job.activate(members)
    job.wait_step(2 * batches + 2)
    lost, *survivors = members
    lost.kill()
    job.wait_holding(survivors)
    reached = survivors[0].messages[-1]["step"]
    assert reached >= 2 * batches + 2
    job.activate([*survivors, spare])
    assert len(job.finish()) == 1, "the weights are equal"
    assert all(member.code == 0 for member in survivors), "they stay in their processes"
    # The rest of the epoch in which the member was lost is left out, and no step is made twice.
    left_out = -reached % batches
    assert require_equal_steps(job) == 8 * batches - left_out
