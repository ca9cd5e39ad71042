"""Lightning's Trainer over changes of the replicas, with real trainers and a scripted agent."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.launch import PROGRAMS
from support.members import Members

PROGRAM = PROGRAMS / "lightning_job.py"
ELASTIC = json.dumps({"max_batch_size": 24, "local_bsz_bounds": [2, 8]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "package"),
    [
        pytest.param("automatic", "lightning.pytorch", marks=pytest.mark.release),
        pytest.param("automatic", "pytorch_lightning", marks=pytest.mark.release),
        pytest.param("manual", "lightning.pytorch", marks=pytest.mark.release),
        ("several", "pytorch_lightning"),
        ("stream", "lightning.pytorch"),
    ],
)
def test_no_step_and_no_sample_is_lost_when_replicas_join_leave_and_are_killed(
    make_members: Callable[..., Members], mode: str, package: str
) -> None:
    options: dict[str, Any] = {"max_epochs": 30, "val_check_interval": 0.5}
    if mode == "stream":
        options = {"max_steps": 180, "val_check_interval": 4, "check_val_every_n_epoch": None}
    trainer = json.dumps(options)
    job = make_members(
        PROGRAM=PROGRAM, STRATEGY=ELASTIC, TRAINER=trainer, STEP_SECONDS=0.01, MODE=mode, PACKAGE=package
    )
    trainers = job.start(3)
    job.activate(trainers[:1])
    job.wait_step(5)
    job.train(trainers[:2], 8)
    killed_after = job.last_step()
    trainers[0].kill()
    job.wait_holding([trainers[1]])
    job.train([trainers[1]], 5)
    job.train(trainers[1:], 5)
    assert len(job.finish()) == 1
    job.require_complete_stream()
    assert {record["replicas"] for record in job.records()} == {1, 2}
    indices: dict[int, set[int]] = {}
    for record in job.records():
        indices.setdefault(record["step"], set()).add(record["batch_idx"])
    assert all(len(each) == 1 for each in indices.values()), "the same on all replicas"
    require_counts_of_progress(job)
    (log,) = job.folder.rglob("metrics.csv")  # which the second rank 0 continues
    with log.open() as file:
        logged = [int(row["step"]) for row in csv.DictReader(file)]
    assert logged == sorted(logged)
    assert logged[0] < killed_after < logged[-1]


@pytest.mark.slow
def test_on_several_replicas_each_multiple_is_met_once_and_validations_are_equal(
    make_members: Callable[..., Members],
) -> None:
    doubled = json.dumps({"max_batch_size": 16, "local_bsz_bounds": [8, 8]})
    job = make_members(
        PROGRAM=PROGRAM, STRATEGY=doubled, TRAINER=json.dumps({"max_steps": 150, "val_check_interval": 3})
    )
    assert len(job.complete(2)) == 1
    job.require_complete_stream()
    require_counts_of_progress(job)
    folder = job.folder / "journal"
    logged = {step: [r for r in job.records() if r["step"] == step] for step in range(1, 40)}
    for shares in logged.values():
        mean = sum(record["own_loss"] for record in shares) / 2
        assert [record["loss"] for record in shares] == pytest.approx([mean, mean], rel=1e-5)
    steps = sorted({record["global_step"] for record in job.records()})
    assert len(steps) < 150 <= steps[-1]
    saved = sorted(int(path.stem.split("=")[1]) for path in folder.rglob("step=*.ckpt"))
    assert saved == sorted({min(s for s in steps if s // 10 == n) for n in {s // 10 for s in steps} - {0}})
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    rows_logged = [int(row["step"]) + 1 for row in rows if row["loss_step"]]
    assert rows_logged == sorted({step // 10 * 10 for step in steps} - {0})
    first, second = records(folder, "validation-*").values()
    assert first == second
    assert len(first) == len({step for step, _ in first}) > 30
    assert first[-1][1] < first[0][1]


@pytest.mark.slow
def test_early_stopping_ends_training_on_all_replicas(make_members: Callable[..., Members]) -> None:
    trainer = json.dumps({"max_epochs": 1000, "val_check_interval": 0.5})
    job = make_members(PROGRAM=PROGRAM, STRATEGY=ELASTIC, TRAINER=trainer, STOP_BELOW=0.1)
    assert len(job.complete(2)) == 1
    job.require_complete_stream()
    first, second = records(job.folder / "journal", "validation-*").values()
    assert first == second
    assert [loss < 0.1 for _, loss in first] == [False] * (len(first) - 1) + [True]


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.release), 5, 6])
def test_one_replica_ends_training_on_all(make_members: Callable[..., Members], step: int) -> None:
    """Inside an epoch of 6 steps, so late that they agree after its last step, and in the last step."""
    fixed = json.dumps({"max_batch_size": 8, "local_bsz_bounds": [4, 4]})
    job = make_members(
        PROGRAM=PROGRAM, STRATEGY=fixed, TRAINER=json.dumps({"max_epochs": 1000}), STOP_AT=step
    )
    assert len(job.complete(2)) == 1
    job.require_complete_stream()
    assert job.last_step() <= step + 2
    assert {record["epoch"] for record in job.records()} == {0}
    first, second = records(job.folder / "journal", "validation-*").values() or ([], [])
    assert first == second


def require_counts_of_progress(job: Members) -> None:
    """Check what Lightning, the schedule and the program count on all replicas."""
    for record in job.records():
        assert record["counted"] == record["step"]
        assert record["global_step"] == int(record["progress"])
        assert record["lr"] == pytest.approx(0.05 * 0.9 ** (record["global_step"] // 7))


def records(folder: Path, pattern: str) -> dict[str, list[Any]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob(pattern))
    }
