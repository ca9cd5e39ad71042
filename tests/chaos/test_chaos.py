"""The harness finds what it must find. `make chaos` has runs with faults."""

import json
from pathlib import Path

import pytest

from chaos.checks import problems
from chaos.harness import Harness
from chaos.run import Outcome
from chaos.schedule import draw, undisturbed

STEPS = 100


@pytest.mark.slow
def test_the_harness_finds_a_sample_that_is_not_trained_once() -> None:
    assert any("times, not" in problem for problem in Harness(has_bug=True).run(undisturbed(1, STEPS)))


def test_weights_that_differ_from_those_of_an_undisturbed_run_are_a_problem(tmp_path: Path) -> None:
    ended = {"steps": STEPS, "samples": 4 * STEPS, "progress": STEPS, "generations": [[1, 1]], "problems": []}
    result = {**ended, "finite": True, "weights": "own"}
    (tmp_path / "result-1.json").write_text(json.dumps(result))
    schedule = undisturbed(1, STEPS)
    outcome = Outcome(None, "", (), (), 1.0)
    assert problems(schedule, outcome, tmp_path, result) == []
    (found,) = problems(schedule, outcome, tmp_path, {**result, "weights": "others"})
    assert found == "the weights are ['own'], those of an undisturbed run others"


def test_a_schedule_follows_from_its_seed() -> None:
    assert draw(7, 20) == draw(7, 20) != draw(8, 20)
    assert len(draw(7, 20).faults) == 20
