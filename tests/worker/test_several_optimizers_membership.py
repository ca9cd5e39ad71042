"""A GAN with two optimizers on several replicas: losses between the two, changes of size, memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adascale_core.failures import EXIT_OUT_OF_MEMORY
from support.gan import Gan, noise_of
from support.launch import PROGRAMS
from support.members import REPLACED_CODES, Members
from support.training import samples

PROGRAM = PROGRAMS / "gan.py"


def calm_run(make_members: Callable[..., Members], **options: object) -> tuple[set[str], Members]:
    calm = make_members("calm", PROGRAM=PROGRAM, **options)
    return calm.complete(2), calm


@pytest.mark.parametrize(
    "loop",
    [
        "alternating",
        pytest.param("gradient penalty", marks=pytest.mark.slow),
        pytest.param("changed between two passes", marks=pytest.mark.slow),
    ],
)
def test_two_replicas_make_the_steps_of_a_plain_loop_with_the_whole_batch(
    make_members: Callable[..., Members], loop: str
) -> None:
    digests, job = calm_run(make_members, EPOCHS=3, LOOP=loop, PLAIN_NOISE=1)
    assert len(digests) == 1, "both replicas have the same weights"
    steps: dict[int, list[int]] = {}
    for record in job.records():
        steps.setdefault(record["step"], []).extend(record["indices"])
        assert record["progress"] == record["step"]
    plain = Gan()
    for step in range(1, 13):
        index = torch.tensor(steps[step])
        plain.learn(samples()[index][1], noise_of(index), loop=loop)
        plain.step_schedulers()
    found = torch.load(job.folder / "journal" / "parameters.pt")
    for own, expected in zip(found, plain.parameters(), strict=True):
        assert torch.allclose(own, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("victim", "loop"),
    [
        (0, "alternating"),
        pytest.param(1, "generator first", marks=pytest.mark.slow),
    ],
)
def test_a_member_killed_between_two_optimizer_steps_costs_no_step_and_no_bit(
    make_members: Callable[..., Members], victim: int, loop: str
) -> None:
    options = {"EPOCHS": 4, "LOOP": loop, "NORM": 1}
    expected, calm = calm_run(make_members, **options)
    at = 5 if loop != "generator first" else 6
    job = make_members("killed", PROGRAM=PROGRAM, **options, STOP_REPLICA=victim, STOP_AT=at)
    *members, spare = job.start(3)
    job.activate(members)
    job.wait((job.folder / "journal" / "stopped").exists, "one member is between its optimizer steps")
    members[victim].kill()
    survivor = members[1 - victim]
    job.wait_holding([survivor])
    job.activate([survivor, spare])
    assert job.finish() == expected
    assert survivor.code == 0, "it stays in its process"
    assert job.require_complete_stream() == calm.require_complete_stream()


def test_a_survivor_that_leaves_its_loop_after_the_discarded_step_is_in_the_next_epoch(
    make_members: Callable[..., Members],
) -> None:
    job = make_members(PROGRAM=PROGRAM, EPOCHS=3, BATCHES=3, STOP_REPLICA=1, STOP_AT=3)
    *members, spare = job.start(3)
    job.activate(members)
    job.wait((job.folder / "journal" / "stopped").exists, "one member is between its optimizer steps")
    members[1].kill()
    job.wait_holding(members[:1])
    job.activate([members[0], spare])
    assert len(job.finish()) == 1, "the weights are equal"
    assert members[0].code == 0, "it stays in its process"
    assert job.last_step() == 2 + 3 + 3


def test_an_error_between_the_two_parts_of_a_step_leaves_the_state_from_before_it(
    make_members: Callable[..., Members], tmp_path: Path
) -> None:
    """Rank 0 saves the state before it ends, because the batch may have been too large for all."""
    bounds = {"batch_size": 12, "local_bsz_bounds": [2, 12]}
    saves = {**bounds, "checkpoint_dir": str(tmp_path / "state"), "checkpoint_interval": 1000}
    job = make_members(PROGRAM=PROGRAM, BOUNDS=json.dumps(saves), EPOCHS=4, FAILS_AT=6)
    trainers = job.start(2)
    job.activate(trainers)
    job.wait(lambda: all(t.code is not None for t in trainers), "the processes end")
    assert {t.code for t in trainers} <= {EXIT_OUT_OF_MEMORY, *REPLACED_CODES}
    replacements = job.start(2)
    job.activate(replacements, env={"ADASCALE_LOCAL_BSZ_LIMIT": "3"})
    assert len(job.finish()) == 1
    assert job.require_complete_stream() == 16


def test_a_batch_that_does_not_fit_into_the_second_part_is_repeated_in_smaller_batches(
    make_members: Callable[..., Members],
) -> None:
    bounds = json.dumps({"batch_size": 12, "local_bsz_bounds": [2, 12]})
    job = make_members(PROGRAM=PROGRAM, BOUNDS=bounds, EPOCHS=4, SHORT_REPLICA=1, SHORT_AT=0, FITS=4)
    trainers = job.start(2)
    job.activate(trainers)
    job.wait_holding(trainers)
    limits = [m["local_bsz_limit"] for m in trainers[1].messages if m["type"] == "limited"]
    assert limits == [3]
    job.activate(trainers, env={"ADASCALE_LOCAL_BSZ_LIMIT": "3"})
    assert len(job.finish()) == 1, "the weights are equal"
    assert job.require_complete_stream() == 16
    assert {len(record["indices"]) for record in job.records()} == {6}, "two batches of 3"
