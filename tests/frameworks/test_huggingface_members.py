"""Hugging Face's Trainer on several replicas, which join, leave and are killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.launch import run_python
from support.members import Members

PROGRAM = Path(__file__).parent / "programs" / "huggingface.py"
TESTS = Path(__file__).parents[1]
ELASTIC = json.dumps({"max_batch_size": 32, "local_bsz_bounds": [2, 8]})
BEST = {"eval_strategy": "steps", "eval_steps": 8, "save_strategy": "steps", "save_steps": 8}
BEST |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
SHARDED = {
    "ADASCALE_PROCESSES_PER_REPLICA": 2,
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": 2,
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
"""As `accelerate launch` sets them, of a configuration for FSDP2."""
MakeMembers = Callable[..., Members]


@pytest.fixture
def make_job(make_members: MakeMembers, tmp_path: Path) -> MakeMembers:
    """Makes jobs of this program."""

    def make(name: str = "job", **options: object) -> Members:
        output = tmp_path / name / "output"
        return make_members(name, PROGRAM=PROGRAM, PYTHONPATH=TESTS, OUTPUT=output, **options)

    return make


def calls_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what the loop of each process has called, by the name of its file."""
    return {
        path.name: [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
        ]
        for path in sorted((folder / "journal").glob("calls-*"))
    }


def results_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "journal").glob("result-*"))]


def require_alike(calls: dict[str, list[dict[str, Any]]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Check that no process calls anything twice in a step, and that all call it alike; return the calls."""
    seen: dict[tuple[str, int], dict[str, Any]] = {}
    for name, made in calls.items():
        own: set[tuple[str, int]] = set()
        for call in made:
            if call["event"] == "multiple of 4":
                place = call["event"], call["global_step"]
            elif call["event"] == "log":
                place = "log of " + ("an evaluation" if "eval_loss" in call else "losses"), call["step"]
            else:
                place = call["event"], call["step"]
            if "train_loss" in call:
                break  # What follows training is not inside of it.
            assert place not in own, (name, place)
            own.add(place)
            values = {key: value for key, value in call.items() if key not in ("is_main", "rank")}
            assert seen.setdefault(place, values) == values, name
            assert call["is_main"] == (call["rank"] == 0), call
    return seen


def require_multiples(
    calls: dict[tuple[str, int], dict[str, Any]], event: str, interval: int, last: int
) -> None:
    """Check that an event has happened in the step that has crossed a multiple, and for each multiple."""
    reached = [call["global_step"] // interval for (name, _), call in calls.items() if name == event]
    assert sorted(reached) == sorted(set(reached)), (event, reached)
    if interval >= 8:  # More than a step is worth.
        assert set(reached) == set(range(1, last // interval + 1)), (event, reached)
    assert max(reached) == last // interval


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["whole", "sharded"])
def test_two_replicas_train_as_the_plain_trainer(tmp_path: Path, sharding: dict[str, Any]) -> None:
    """Under `torchrun`, whose variables the framework finds before it is made elastic."""
    options = {
        "max_steps": 12,
        "learning_rate": 0.01,
        "optim": "sgd",
        "logging_steps": 3,
        **BEST,
        "eval_steps": 4,
    }
    environ: dict[str, Any] = {
        "ARGUMENTS": json.dumps(options | {"save_steps": 4}),
        "PYTHONPATH": TESTS,
    }
    count = 4 if sharding else 2
    for processes, more in ((0, {}), (count, sharding)):
        folder = tmp_path / str(processes)
        places = {"JOURNAL": folder / "journal", "OUTPUT": folder / "out"}
        run_python(PROGRAM, replicas=processes, **places, **environ, **more)
    alone, together = results_of(tmp_path / "0"), results_of(tmp_path / str(count))
    assert len(alone) == 1
    assert together == [together[0]] * count
    assert together[0] == pytest.approx(alone[0], rel=1e-5)
    calls = require_alike(calls_of(tmp_path / str(count)))
    require_multiples(calls, "evaluate", 4, 12)
    ours, theirs = tmp_path / str(count) / "out", tmp_path / "0" / "out"
    saved = sorted(str(path.relative_to(ours)) for path in ours.rglob("*"))
    assert saved == sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*"))


@pytest.mark.slow
def test_a_step_of_a_larger_batch_calls_callbacks_for_each_of_its_steps(tmp_path: Path) -> None:
    """Two replicas have batches of 32 samples, four times the initial batch."""
    options = {"max_steps": 48, "logging_steps": 4, **BEST}
    environ: dict[str, Any] = {
        "ARGUMENTS": json.dumps(options),
        "ELASTIC": json.dumps({"max_batch_size": 32, "local_bsz_bounds": [16, 16]}),
        "PYTHONPATH": TESTS,
        "COUNT": 96,
    }
    run_python(PROGRAM, replicas=2, JOURNAL=tmp_path / "journal", OUTPUT=tmp_path / "out", **environ)
    calls = require_alike(calls_of(tmp_path))
    multiples = sorted(step for event, step in calls if event == "multiple of 4")
    assert multiples == [*range(4, 49, 4)]
    steps = max(step for event, step in calls if event == "log of losses")
    assert steps < 40, "a step was worth more than one"
    for event, interval in (("evaluate", 8), ("save", 8), ("log of losses", 4)):
        require_multiples(calls, event, interval, 48)
    assert {result["global_step"] for result in results_of(tmp_path)} == {48}


@pytest.mark.slow
@pytest.mark.parametrize("data", [{}, {"STREAM": 1}, SHARDED], ids=["data set", "stream", "sharded"])
def test_replicas_join_leave_and_are_killed(make_job: MakeMembers, data: dict[str, Any]) -> None:
    options = {"max_steps": 80, "learning_rate": 0.003, "logging_steps": 5, "warmup_steps": 4, **BEST}
    job = make_job(ARGUMENTS=json.dumps(options), ELASTIC=ELASTIC, STEP_SECONDS=0.03, **data)
    first, lost, spare = job.start(3)
    job.activate([first])
    job.wait_step(3)
    job.train([first, lost], 5)
    lost.kill()
    job.wait_holding([first])
    job.train([first, spare], 5)
    job.activate([spare])
    assert len(job.finish()) == 1
    job.require_complete_stream()
    calls = require_alike(calls_of(job.folder))
    for event, interval in (("multiple of 4", 4), ("evaluate", 8), ("save", 8), ("log of losses", 5)):
        require_multiples(calls, event, interval, 80)
    assert {result["global_step"] for result in results_of(job.folder)} == {80}
    losses = [call["loss"] for (event, _), call in calls.items() if event == "log of losses"]
    assert max(losses) < 4.0, "a loss is that of a step, with any number of replicas"
    # Rank 0 has changed, and the files are those of the last saves.
    assert len([*(job.folder / "output").glob("checkpoint-*/model.safetensors")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("stops", ["0", pytest.param("01", marks=pytest.mark.release)])
def test_callbacks_stop_training_on_all_replicas(make_job: MakeMembers, stops: str) -> None:
    """Also if only one of them requests it."""
    options = {"max_steps": 1000, "logging_steps": 5}
    job = make_job(ARGUMENTS=json.dumps(options), STOPS=stops, STOP_AT=7)
    assert len(job.complete(2)) == 1
    (step,) = {result["global_step"] for result in results_of(job.folder)}
    assert step in (8, 9), "the replicas agree with the next exchange"
