"""A replica that is slower than the others is found, in real processes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from adascale_core.performance.slow_replica import SLOW_FACTOR
from support.fast_python import torchrun

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "slow_replica.py"


def _found(output: str) -> list[tuple[int, int, float]]:
    """Return at which steps a replica was found, which, and its factor."""
    pattern = r"adascale: step (\d+): replica (\d+) is slow: in each step it computes ([\d.]+) times as long"
    return [(int(found[1]), int(found[2]), float(found[3])) for found in re.finditer(pattern, output)]


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "where"), [(0, "loading"), (1, "backward")])
def test_a_replica_that_is_slower_than_the_other_is_found(slow: int, where: str) -> None:
    """Others wait in the forward pass for the buffers of rank 0, and in the backward pass for gradients."""
    environ = {"SLOW": str(slow), "WHERE": where, "PACE": "0.1", "FACTOR": "2"}
    output = ""
    with subprocess.Popen(
        [*torchrun(2), str(PROGRAM)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output += line
            if found := _found(line):
                run.terminate()
                break
        else:
            pytest.fail(f"no replica was found:\n{output}")
        run.stdout.read()
    ((_, replica, factor),) = found
    assert replica == slow
    assert factor >= SLOW_FACTOR
