"""No job starves in a simulation: when it starts, and that it is never stopped, for drawn workloads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from published_workloads import ProfiledApplication, read_application

from adascale_controller.simulation.adascale_policy import AdaScalePolicy, PlacementMode
from adascale_controller.simulation.engine import SimulationSettings, Submission, simulate
from support.examples import examples
from support.workload import write_profiles

workloads = st.lists(
    st.tuples(st.integers(0, 900), st.sampled_from(["small", "small", "large"])), min_size=1, max_size=8
)
clusters = st.lists(st.integers(1, 3), min_size=1, max_size=3)
costs = st.sampled_from([(30.0, 60.0, 0.0), (2.0, 10.0, 13.0)])


@pytest.fixture(scope="module")
def applications(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProfiledApplication]:
    folder: Path = tmp_path_factory.mktemp("profiles")
    write_profiles(folder)
    return {name: read_application(folder / name) for name in ("small", "large")}


@pytest.mark.slow
@given(workloads, clusters, costs, st.sampled_from(PlacementMode))
@settings(max_examples=examples(10))
def test_a_job_starts_as_soon_as_a_place_is_left_by_earlier_jobs_and_runs_to_its_end(
    applications: dict[str, ProfiledApplication],
    drawn: Sequence[tuple[int, str]],
    nodes: Sequence[int],
    cost: tuple[float, float, float],
    placement: PlacementMode,
) -> None:
    """Each job runs on one replica at least, so it waits only while earlier jobs fill all places."""
    restart, interval, prepare = cost
    submissions = [
        Submission(f"{i}", float(time), applications[name], 1, applications[name].bounds.batch_size)
        for i, (time, name) in enumerate(sorted(drawn))
    ]
    jobs = simulate(
        submissions,
        AdaScalePolicy(placement),
        SimulationSettings(nodes, restart, interval, prepare),
        lambda: 1.0,
    )
    ends: list[float] = []
    for job in jobs:
        assert job.completed_at is not None
        free_at = max(0.0, *sorted(ends, reverse=True)[sum(nodes) - 1 :], job.submission.time)
        assert job.started_at == ceil(free_at / interval) * interval
        assert all(placed for _, placed in job.history), "it was stopped by a later job"
        ends.append(job.completed_at)
