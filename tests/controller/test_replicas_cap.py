"""`spec.replicas`, the wish of a person or an autoscaler, caps a local run as it does one on a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from adascale_controller.job import Job
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.runner import CapacityError, RunOptions, max_concurrent_replicas, run_job
from adascale_core.messages import JobSpec

JOB = Job("default.digits", JobSpec(4, 64, (4, 16), 2, 8, 1000), command=("python", "-c", "pass"))
SIX = RunOptions(replicas=6)


@pytest.mark.parametrize(("wish", "most"), [(None, 6), (2, 2), (5, 5), (7, 6), (1024, 6)])
def test_the_wish_caps_the_replicas(wish: int | None, most: int) -> None:
    assert max_concurrent_replicas(replace(JOB, replicas=wish), SIX, []) == most


def test_a_wish_for_fewer_than_the_job_needs_is_refused() -> None:
    with pytest.raises(CapacityError) as refused:
        max_concurrent_replicas(replace(JOB, replicas=1), SIX, [])
    assert str(refused.value) == (
        "digits needs at least 2 replicas at once, and spec.replicas is 1: raise spec.replicas to 2 or more, "
        "or lower spec.minReplicas"
    )


def test_a_wish_for_none_lets_the_job_rest() -> None:
    console = Console(record=True, width=100)
    assert run_job(replace(JOB, replicas=0), SIX, PlainDisplay(console)) == 0
    assert "digits is scaled to no replicas (spec.replicas is 0), so it does not run" in console.export_text()
