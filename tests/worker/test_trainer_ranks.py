"""Under plain torchrun: what two replicas do together, and what becomes of a model that is on both."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parents[1] / "support" / "programs"
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def python(*arguments: str, **environ: object) -> str:
    """The output of a program that comes to a good end."""
    run = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in environ.items()}},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two replicas found out."""
    folder = tmp_path_factory.mktemp("ranks")
    python(*TORCHRUN, "2", str(PROGRAMS / "ranks.py"), OUT=folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_weights_are_the_same_on_both(told: list[dict[str, Any]]) -> None:
    assert told[0]["weights"] == told[1]["weights"]
    assert told[0]["weights_of_micro_batches"] == told[1]["weights_of_micro_batches"]


def test_frozen_and_unused_parameters_stay_and_names_are_kept(told: list[dict[str, Any]]) -> None:
    for one in told:
        assert not one["frozen_moved"]
        assert not one["never_moved"]
        assert one["same_names"]


def test_gains_are_agreed_on_and_make_steps_fewer(told: list[dict[str, Any]]) -> None:
    assert [one["progress"] for one in told] == [told[0]["progress"]] * 2
    assert told[0]["gain"] == told[1]["gain"]
    assert 1 <= told[0]["gain"] <= told[0]["scale"]
    assert told[0]["progress"] >= 24
    assert told[0]["steps"] <= told[0]["progress"]


def test_micro_batches_on_two_replicas_make_the_step_of_one_large_batch(told: list[dict[str, Any]]) -> None:
    assert told[0]["plan"] == [2, 4, 2]
    assert told[0]["difference"] < 1e-6


@pytest.mark.parametrize("kind", ["copied", "saved_and_loaded"])
def test_a_copy_of_the_model_is_a_model_of_its_own(told: list[dict[str, Any]], kind: str) -> None:
    """As an average of weights, or `torch.save(model)`, needs it."""
    for one in told:
        copied = one["copies"][kind]
        assert copied["own"] == 0
        assert copied["training"] == 0
        assert copied["original"] > 0


def test_a_checkpoint_that_is_due_once_is_saved_once(told: list[dict[str, Any]]) -> None:
    assert len(told[0]["saved"]) == 1
    assert told[1]["saved"] == []


@pytest.mark.slow
def test_the_example_trains_by_itself() -> None:
    output = python(str(EXAMPLE), ADASCALE_SCALE_INVARIANT_STEPS=1000)
    found = re.search(r"test accuracy ([\d.]+)% after (\d+) steps at batch size 4", output)
    assert found, output
    assert float(found[1]) > 70
    assert int(found[2]) == 1000


@pytest.mark.slow
def test_the_example_trains_under_torchrun_with_a_gain_over_one(tmp_path: Path) -> None:
    output = python(
        *TORCHRUN, "2", str(EXAMPLE), ADASCALE_SCALE_INVARIANT_STEPS=1000, ADASCALE_CHECKPOINT_DIR=tmp_path
    )
    found = re.search(r"test accuracy ([\d.]+)% after (\d+) steps at batch size 4", output)
    assert found, output
    assert output.count("test accuracy") == 1
    assert float(found[1]) > 70
    manifest = json.loads(sorted(tmp_path.glob("*.json"))[-1].read_text())
    assert manifest["finished"]
    assert manifest["progress"] >= 1000
    assert manifest["step"] < manifest["progress"], "a step is worth more than one at batch size 4"
    assert manifest["result"]["accuracy"] == pytest.approx(float(found[1]) / 100, abs=1e-3)


@pytest.mark.slow
def test_three_replicas_that_begin_again_round_as_those_that_go_on() -> None:
    undisturbed, *disturbed = python(*TORCHRUN, "3", str(PROGRAMS / "buckets.py")).split()
    assert disturbed == [undisturbed] * 2
