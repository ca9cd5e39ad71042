"""Deadlines of published workloads: how they are drawn, and which are met."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from published_workloads import (
    ProfiledApplication,
    read_application,
    read_workload,
    requested_duration,
    tightness_of,
    with_deadlines,
)

from adascale_controller.simulation.adascale_policy import AdaScalePolicy
from adascale_controller.simulation.engine import SimulationSettings, Submission, simulate
from adascale_controller.simulation.results import Results
from support.workload import write_profiles, write_workload

CLUSTER = SimulationSettings([4] * 2, free_moves=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deadlines")
    write_profiles(folder / "profiles")
    write_workload(folder / "workload.csv")
    return folder


@pytest.fixture(scope="module")
def small(files: Path) -> ProfiledApplication:
    return read_application(files / "profiles" / "small")


def test_a_deadline_is_the_time_on_the_requested_replicas_times_the_tightness(
    small: ProfiledApplication,
) -> None:
    """1440 steps at 0.1 s, after 30 s; on two replicas with the same batch they take 0.06 + 0.01 s."""
    one, two = (Submission(f"{n}", 50.0, small, n, 16) for n in (1, 2))
    assert requested_duration(one, CLUSTER) == pytest.approx(30 + 1440 * 0.1)
    assert requested_duration(two, CLUSTER) == pytest.approx(30 + 1440 * 0.07)
    drawn = with_deadlines([one] * 100, CLUSTER, (0.5, 1.5), seed=1)
    tightness = [(each.deadline - 50) / 174 for each in drawn if each.deadline is not None]
    assert 0.5 <= min(tightness) < 0.6
    assert 1.4 < max(tightness) <= 1.5
    assert drawn == with_deadlines([one] * 100, CLUSTER, (0.5, 1.5), seed=1)
    assert drawn != with_deadlines([one] * 100, CLUSTER, (0.5, 1.5), seed=2)


def test_the_share_of_deadlines_met_is_reported(files: Path) -> None:
    drawn = with_deadlines(
        read_workload(files / "workload.csv", files / "profiles"), CLUSTER, tightness_of("0.5-1.5"), 0
    )
    results = Results.of(simulate(drawn, AdaScalePolicy(), CLUSTER), CLUSTER).to_json()
    met = [job["completed"] <= job["deadline"] for job in results["jobs"]]
    assert results["deadlines_met_share"] == pytest.approx(sum(met) / len(met))
