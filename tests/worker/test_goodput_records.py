"""Which steps `bench/goodput.py` counts, from what the processes have recorded before they were lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from goodput import Step, made_steps

A, B, C, D, E = 1, 2, 3, 4, 5
"""Process ids; D is lost at 10.5, and E is started after that."""


def step(pid: int, number: int, made: bool | None, *, at: float, replicas: int = 4) -> Step:
    ended = at if made is None else at + 1
    return Step(made, at, ended, number, replicas, pid, (24 * number + pid,), pid)


BEFORE = [step(pid, 1, True, at=9) for pid in (A, B, C, D)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param(
            [*(step(pid, 2, True, at=10) for pid in (A, B, C)), step(D, 2, None, at=10)],
            {A, B, C, D},
            id="all have its gradients",
        ),
        pytest.param(
            [
                step(A, 2, True, at=10),
                *(step(pid, 2, False, at=10) for pid in (B, C)),
                step(D, 2, None, at=10),
            ],
            {A, B, C, D},
            id="B and C take the weights of A",
        ),
        pytest.param(
            [
                *(step(pid, 2, False, at=10) for pid in (A, B, C)),
                step(D, 2, True, at=10),
                *(step(pid, 2, True, at=11.5, replicas=3) for pid in (A, B, C)),
            ],
            {A, B, C},
            id="made by the lost process alone",
        ),
        pytest.param(
            [*(step(pid, 2, False, at=10) for pid in (A, B, C)), step(D, 2, None, at=10)],
            set(),
            id="made by none",
        ),
        pytest.param(
            [step(D, 2, None, at=10), *(step(pid, 2, True, at=20) for pid in (E, E + 1))],
            {E, E + 1},
            id="made again by other processes",
        ),
        pytest.param(
            [
                *(step(pid, 2, False, at=10) for pid in (A, B, C)),
                step(D, 2, None, at=10),
                *(step(pid, 2, True, at=11.5) for pid in (A, B, C, E)),
            ],
            {A, B, C, E},
            id="discarded, and made with a spare",
        ),
        pytest.param(
            [
                *(step(pid, 2, False, at=10) for pid in (A, B, C, D)),
                *(step(pid, 2, True, at=10.9) for pid in (A, B, C, D)),
                *(step(pid, 3, True, at=12) for pid in (A, B, C, D)),
            ],
            {A, B, C, D},
            id="discarded and made again with as many",
        ),
    ],
)
def test_a_step_counts_if_training_went_on_from_it(records: list[Step], expected: set[int]) -> None:
    records = sorted([*BEFORE, *records], key=lambda step: step.ended)
    found = made_steps(records, {D})
    assert {step.pid for step in found if step.step == 2} == expected
    assert sum(step.step == 2 for step in found) == len(expected)
    assert {step.pid for step in found if step.step == 1} == {A, B, C, D}
