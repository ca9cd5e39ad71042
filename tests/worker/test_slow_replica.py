"""A replica that is slower than the others is found, in real processes."""

from __future__ import annotations

import re

import pytest

from support.launch import PROGRAMS, run_python

PROGRAM = PROGRAMS / "slow_replica.py"


def _found(output: str) -> list[tuple[int, int, float]]:
    """Return at which steps a replica was found, which, and its factor."""
    pattern = r"adascale: step (\d+): replica (\d+) is slow: in each step it computes ([\d.]+) times as long"
    return [(int(found[1]), int(found[2]), float(found[3])) for found in re.finditer(pattern, output)]


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "where"), [(0, "loading"), (1, "backward")])
def test_a_replica_that_is_slower_than_the_other_is_found(slow: int, where: str) -> None:
    """Others wait in the forward pass for the buffers of rank 0, and in the backward pass for gradients."""
    output = run_python(PROGRAM, replicas=2, SLOW=slow, WHERE=where, PACE=0.1, FACTOR=2.0)
    found = _found(output)
    assert {replica for _, replica, _ in found} == {slow}, output
    assert all(factor >= 1.15 for _, _, factor in found)
