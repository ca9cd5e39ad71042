"""`ElasticAccelerator` with real processes: replicas join, leave and are killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.launch import run_python
from support.members import Members

PROGRAM = Path(__file__).parent / "programs" / "accelerated.py"
ELASTIC = json.dumps({"batch_size": 8, "max_batch_size": 24, "local_bsz_bounds": [2, 8]})


def evaluations(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name.removeprefix("evaluations-"): [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("evaluations-*")
    }


def require_evaluations(folder: Path) -> None:
    """Check that each evaluation has each sample once, and the same results on all replicas."""
    results: dict[int, Any] = {}
    for own in evaluations(folder).values():
        for each in own:
            assert [number for number, _ in each["results"]] == list(range(43)), each
            assert results.setdefault(each["epoch"], each["results"]) == each["results"]


@pytest.mark.slow
def test_replicas_join_and_leave_and_one_is_killed(make_members: Callable[..., Members]) -> None:
    job = make_members(PROGRAM=PROGRAM, BOUNDS=ELASTIC, EPOCHS=30, STEP_SECONDS=0.01)
    first, second, third = job.start(3)
    for members in ([first], [first, second]):
        job.train(members, 5)
    second.kill()
    job.wait_holding([first])
    job.train([first, third], 5)
    job.train([first], 5)
    assert len(job.finish()) == 1
    job.require_complete_stream()
    require_evaluations(job.folder / "journal")
    records = job.records()
    assert {record["replicas"] for record in records} == {1, 2}
    epochs = [record["epoch"] for record in records if record["file"].startswith("2-")]
    assert epochs[0] > 0, "a replica that joins begins with the present epoch"
    last = max(records, key=lambda record: record["step"])
    assert last["progress"] == pytest.approx(30 * 6, abs=3.5), "the epochs end at their steps at batch size 8"
    assert last["lr"] == pytest.approx(0, abs=1e-4), "so the schedule has ended"


@pytest.mark.slow
def test_under_torchrun_the_replicas_communicate(tmp_path: Path) -> None:
    output = run_python(
        PROGRAM,
        replicas=2,
        JOURNAL=tmp_path / "journal",
        REPLICA="",
        COMMUNICATES=1,
        BOUNDS=ELASTIC,
        EPOCHS=4,
    )
    assert output.count("communicates") == 1, output
    Members(tmp_path).require_complete_stream()
    require_evaluations(tmp_path / "journal")
