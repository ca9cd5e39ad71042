"""A few runs of the fault harness; `make chaos` has many. And the harness finds what it must find."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.checks import problems
from chaos.harness import Harness
from chaos.run import Outcome
from chaos.schedule import Fault, Kind, Schedule, draw, undisturbed

STEPS = 100


# `.ci/run` calls the harness with more faults.
@pytest.mark.release
@pytest.mark.slow
def test_what_must_hold_holds_after_faults() -> None:
    assert Harness().run(draw(4, faults=5)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "loop", "processes"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.release)
            for each in (
                ("stream", "plain", None),
                ("stream with states", "plain", None),
                ("shards", "plain", None),
                ("items", "accelerate", None),
            )
        ),
        ("items", "plain", 2),
    ],
)
def test_each_sample_is_trained_once_over_changes_of_size_and_a_kill(
    data: str, loop: str, processes: int | None
) -> None:
    faults = [
        (Kind.SCALE, 0.2, 1),
        (Kind.KILL_TRAINER, 0.4, 0),
        (Kind.SCALE, 0.6, 0),
        (Kind.KILL_TRAINERS, 0.7, 0),
    ]
    spec = {
        "batchSize": 8,
        "maxBatchSize": 16,
        "localBszBounds": {"lower": 2 if processes is None else 4, "upper": 8},
        "maxReplicas": 2,
        "scaleInvariantSteps": 400,
        **({} if processes is None else {"processesPerReplica": processes}),
    }
    planned = tuple(Fault(kind, moment, 0.0, target, 0.0) for kind, moment, target in faults)
    assert Harness().run(Schedule(1, None, spec, faults=planned, data=data, loop=loop)) == []


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["lose", pytest.param("repeat", marks=pytest.mark.release)])
def test_the_harness_finds_a_sample_that_is_not_trained_once(bug: str) -> None:
    assert any("times, not" in problem for problem in Harness(bug).run(undisturbed(1, STEPS)))


def test_weights_that_differ_from_those_of_an_undisturbed_run_are_a_problem(tmp_path: Path) -> None:
    ended = {"steps": STEPS, "samples": 4 * STEPS, "progress": STEPS, "generations": [[1, 1]], "problems": []}
    result = {**ended, "finite": True, "weights": "own"}
    (tmp_path / "result-1.json").write_text(json.dumps(result))
    schedule = undisturbed(1, STEPS)
    outcome = Outcome(None, "", (), (), 1.0)
    assert problems(schedule, outcome, tmp_path, result) == []
    (found,) = problems(schedule, outcome, tmp_path, {**result, "weights": "others"})
    assert found == "the weights are ['own'], those of an undisturbed run others"


@pytest.mark.release
@pytest.mark.slow
def test_the_harness_finds_weights_that_differ_from_those_of_an_undisturbed_run() -> None:
    fault = Fault(Kind.INTERRUPT, progress=0.3, delay=0.0, target=0, seconds=0.0)
    found = Harness("diverge").run(replace(undisturbed(1, STEPS), faults=(fault,)))
    assert any("the weights are" in problem for problem in found)


def test_a_schedule_follows_from_its_seed() -> None:
    assert draw(7, 20) == draw(7, 20) != draw(8, 20)
    assert len(draw(7, 20).faults) == 20


def test_what_is_left_out_for_time_is_counted_and_no_run_at_all_is_an_error() -> None:
    arguments = ["--runs", "3", "--faults", "10", "--seed", "1", "--minutes", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "chaos", *arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "0 of 3 runs, 0 faults made; 0 runs with problems",
        "left out, because 0 minutes were over: 3 runs with 10 faults",
    ]
    assert done.returncode == 1, done.stderr
