"""`ElasticAccelerator` with real processes: replicas join, leave and are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from e2e.local_run import ROOT, adascale, running, write_job
from support.fast_python import PYTHON
from support.launch import run_python
from support.members import Members

PROGRAM = Path(__file__).parent / "programs" / "accelerated.py"
VISION = PROGRAM.with_name("vision.py")
TEXT = ROOT / "examples" / "accelerate_text.py"
EPOCHS, SAMPLES = 40, 480
"""Of the job that `adascale run` trains."""
ELASTIC = json.dumps({"batch_size": 8, "max_batch_size": 24, "local_bsz_bounds": [2, 8]})


@pytest.fixture
def make_members(tmp_path: Path) -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(name: str, **options: object) -> Members:
        made.append(Members(tmp_path / name, **{"PROGRAM": PROGRAM, **options}))
        return made[-1]

    yield make
    for members in made:
        members.close()


def plain_losses(seed: int, epochs: int) -> list[float]:
    """Train the model of the program with plain Accelerate, and return the evaluation loss of each epoch."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    features = torch.randn(SAMPLES, 6)
    targets = (features.sum(1) + 0.5 * torch.randn(SAMPLES) > 0).long()
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches: Any = DataLoader(TensorDataset(features, targets), batch_size=8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    losses = []
    for _ in range(epochs):
        model.train()
        for x, y in batches:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(features[:43]), targets[:43]).item())
    AcceleratorState._reset_state(reset_partial_state=True)
    return losses


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
    job = make_members("job", BOUNDS=ELASTIC, EPOCHS=30, STEP_SECONDS=0.01)
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
    assert len({record["lr"] for record in records if record["progress"] > 29 * 6}) > 0


@pytest.mark.slow
def test_a_replica_that_is_killed_in_an_evaluation_does_not_change_its_results(
    make_members: Callable[..., Members],
) -> None:
    calm = make_members("calm", EPOCHS=4)
    expected = calm.complete(2)
    job = make_members("killed", EPOCHS=4, WAITS=0)
    victim, survivor, spare = job.start(3)
    job.activate([victim, survivor])
    folder = job.folder / "journal"
    job.wait(lambda: len(list(folder.glob("evaluates-*"))) == 2, "both evaluate")
    victim.kill()
    job.wait_holding([survivor])
    job.activate([survivor, spare])
    assert job.finish() == expected
    require_evaluations(folder)
    results = evaluations(folder)[str(survivor.replica)]
    assert results == evaluations(calm.folder / "journal")["0"]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "result"),
    [
        (VISION, r"epoch 5: (\d+\.\d+) of 360"),
        (TEXT, r"epoch 5: accuracy (\d+\.\d+)%"),
    ],
)
def test_examples_of_accelerate_train_on_one_two_and_one_replicas_with_a_kill(
    make_members: Callable[..., Members], program: Path, result: str
) -> None:
    job = make_members("job", PROGRAM=program, EPOCHS=6, STEP_SECONDS=0.05)
    first, second, third = job.start(3)

    def stepped() -> bool:
        return all(trainer.has_sent("stepped", job.generation) for trainer in job.active)

    for members in ([first], [first, second]):
        job.activate(members)
        job.wait(stepped, "a step")
    second.kill()
    job.wait_holding([first])
    job.activate([first, third])
    job.wait(stepped, "a step after the kill")
    job.activate([third])  # the first replica leaves, so another one prints and saves
    job.wait(stepped, "a step of the other")
    job.finish()
    (accuracy,) = re.findall(result, job.output())
    assert float(accuracy) > 80


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


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adascale_run_trains_on_one_two_and_one_replicas_with_a_kill(tmp_path: Path) -> None:
    journal, joins, state = tmp_path / "journal", tmp_path / "joins", tmp_path / "state"
    job = write_job(
        tmp_path / "job.yaml",
        [*PYTHON, str(PROGRAM)],
        {
            "JOURNAL": str(journal),
            "JOIN_AFTER": str(joins),
            "STEP_SECONDS": "0.01",
            "EPOCHS": str(EPOCHS),
            "SAMPLES": str(SAMPLES),
        },
        batchSize=8,
        maxReplicas=2,
        maxBatchSize=24,
        localBszBounds={"lower": 4, "upper": 8},
    )
    members = Members(tmp_path)  # reads the journal
    with running(job, state) as run:
        run.wait_for_output("trains on 1 replica")
        run.wait_for_step(10)
        joins.touch()
        run.wait_for_output("trains on 2 replicas")
        step = members.last_step()
        run.wait_for_step(step + 10)
        os.kill(run.wait_for_trainer(1), signal.SIGKILL)
        run.wait_for_output(
            "The trainer of replica 1 was lost (killed by SIGKILL); the others keep their state"
        )
        run.wait_for_trainer(1)
        run.wait_for_step(members.last_step() + 10)
        scaled = adascale("scale", "test", "--replicas", 1, "--state-dir", state)
        assert scaled.returncode == 0, scaled.stderr
        run.wait_for_output("Scaled to at most 1 replica")
        assert run.wait_for_exit(timeout=300) == 0, run.output
    members.require_complete_stream()
    require_evaluations(journal)
    counts = [record["replicas"] for record in sorted(members.records(), key=lambda each: each["step"])]
    assert counts[0] == counts[-1] == 1
    assert 2 in counts
    last = max(members.records(), key=lambda each: each["step"])
    assert last["progress"] == pytest.approx(EPOCHS * SAMPLES // 8, abs=3.5), (
        "the epochs end at their steps at batch size 8"
    )
    assert last["lr"] == pytest.approx(0, abs=1e-4), "so the schedule has ended"
    # An epoch has as many steps at batch size 8 as with plain Accelerate.
    elastic = {
        each["epoch"]: statistics.mean(loss for _, loss in each["results"])
        for each in evaluations(journal)["0"]
    }
    assert sorted(elastic) == list(range(EPOCHS))
    plain = [plain_losses(seed, EPOCHS) for seed in range(4)]
    for part in (range(1, 10), range(10, 25), range(25, EPOCHS)):
        means = [statistics.mean(losses[epoch] for epoch in part) for losses in plain]
        found = statistics.mean(elastic[epoch] for epoch in part)
        # With four seeds, the deviation may be estimated too low by half.
        assert abs(found - statistics.mean(means)) < 8 * statistics.stdev(means), (part, found, means)
