"""Deadlines in `adascale simulate`: how they are drawn, and the policies that know them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from adascale_controller.cli.app import app
from adascale_controller.simulation.adascale_policy import AdaScalePolicy
from adascale_controller.simulation.application import ProfiledApplication
from adascale_controller.simulation.competitors import EarliestDeadlineFirst
from adascale_controller.simulation.deadlines import requested_duration, with_deadlines
from adascale_controller.simulation.elasticflow import ElasticFlow, remaining_steps, satisfactory_plan
from adascale_controller.simulation.engine import Policy, Settings, SimulatedJob, Submission, simulate
from adascale_controller.simulation.profiles import read_application
from adascale_controller.simulation.results import Results
from support.examples import examples
from support.workload import write_profiles, write_workload

CLUSTER = Settings([4] * 2, free_moves=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deadlines")
    write_profiles(folder / "profiles")
    write_workload(folder / "workload.csv")
    return folder


@pytest.fixture(scope="module")
def small(files: Path) -> ProfiledApplication:
    return read_application(files / "profiles" / "small")


def run(files: Path, *arguments: str) -> Any:
    workload = ["simulate", str(files / "workload.csv"), "--profiles", str(files / "profiles")]
    return CliRunner().invoke(app, [*workload, "--nodes", "2", *arguments])


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


@pytest.mark.parametrize("policy", ["adascale", "edf", "elasticflow", "fcfs"])
def test_the_share_of_deadlines_met_is_reported(files: Path, policy: str) -> None:
    arguments = ("--deadlines", "0.5-1.5", "--policy", policy)
    results = json.loads(run(files, *arguments, "--output", "json").stdout)
    met = [job["completed"] <= job["deadline"] for job in results["jobs"]]
    assert results["deadlines_met_share"] == pytest.approx(sum(met) / len(met))
    assert "deadlines met" in run(files, *arguments).stdout


def test_without_deadlines_none_are_reported(files: Path) -> None:
    results = json.loads(run(files, "--policy", "edf", "--output", "json").stdout)
    assert "deadlines_met_share" not in results
    assert {job["deadline"] for job in results["jobs"]} == {None}


@pytest.mark.parametrize("value", ["", "0-1", "1.5-0.5", "a-b", "1", "-1-2", "1-inf"])
def test_an_invalid_tightness_is_refused(files: Path, value: str) -> None:
    result = run(files, "--deadlines", value)
    assert result.exit_code == 2
    assert "as in 0.5-1.5" in " ".join(result.output.replace("│", " ").split())


def test_elasticflow_without_deadlines_says_what_to_add(files: Path) -> None:
    result = run(files, "--policy", "elasticflow")
    assert "add --deadlines 0.5-1.5" in str(result.exception)


@pytest.mark.parametrize("policy", [AdaScalePolicy(), EarliestDeadlineFirst(), ElasticFlow()])
def test_the_job_with_a_deadline_is_served_before_an_earlier_one(
    small: ProfiledApplication, policy: Policy
) -> None:
    """Both want all 4 GPUs. The later job can meet its deadline only if it does not wait for the earlier."""
    jobs = [
        Submission("early", 0.0, small, 4, 64, deadline=1e5),
        Submission("late", 60.0, small, 4, 64, deadline=60.0 + 240.0),
    ]
    found = simulate(jobs, policy, Settings([4], restart=10.0, interval=10.0, free_moves=True))
    met = [job.submission.deadline >= (job.completed_at or 0) for job in found]  # type: ignore[operator]
    assert met == [True, True]


class _Known:
    """A job of a known throughput, for the plan of ElasticFlow."""

    def __init__(self, deadline: float, remaining: float, throughput: dict[int, float]) -> None:
        self.deadline, self.remaining, self.throughput = deadline, remaining, throughput

    @property
    def counts(self) -> Sequence[int]:
        return list(self.throughput)

    def pause(self, count: int) -> float:
        return 0.0


LINEAR = {1: 1.0, 2: 2.0, 4: 4.0}


@pytest.mark.parametrize(
    ("deadline", "remaining", "free", "expected"),
    [
        # the smallest share that suffices, until the end
        (40.0, 40.0, [4] * 4, [1, 1, 1, 1]),
        (40.0, 41.0, [4] * 4, [2, 2, 2, 0]),
        (40.0, 160.0, [4] * 4, [4, 4, 4, 4]),
        (40.0, 161.0, [4] * 4, None),
        # jobs of earlier deadlines leave fewer, and a power of two is used of them
        (40.0, 60.0, [0, 0, 4, 4], [0, 0, 4, 4]),
        (40.0, 60.0, [3, 3, 3, 3], [2, 2, 2, 0]),
        # only the part of a slot before the deadline counts
        (35.0, 36.0, [4] * 4, [2, 2, 0, 0]),
        (35.0, 70.0, [4] * 4, [2, 2, 2, 2]),
    ],
)
def test_the_minimum_satisfactory_share(
    deadline: float, remaining: float, free: Sequence[int], expected: list[int] | None
) -> None:
    job: Any = _Known(deadline, remaining, LINEAR)
    plan = satisfactory_plan(job, np.array(free), 10.0, 0.0)
    assert (None if plan is None else plan.tolist()) == expected


@given(
    st.floats(1, 100),
    st.floats(1, 300),
    st.lists(st.integers(0, 6), min_size=10, max_size=10),
)
@settings(max_examples=examples(100), deadline=None)
def test_a_plan_ends_the_job_before_its_deadline_within_what_is_free(
    deadline: float, remaining: float, free: Sequence[int]
) -> None:
    job: Any = _Known(deadline, remaining, LINEAR)
    plan = satisfactory_plan(job, np.array(free), 10.0, 0.0)
    seconds = np.clip(deadline - 10.0 * np.arange(10), 0.0, 10.0)
    if plan is None:
        usable = [max((count for count in LINEAR if count <= each), default=0) for each in free]
        assert (np.array(usable) * seconds).sum() < remaining * (1 + 1e-9)
    else:
        assert (plan <= free).all()
        assert set(plan.tolist()) <= {0, *LINEAR}
        assert (plan * seconds).sum() >= remaining * (1 - 1e-9)


def test_an_admitted_job_keeps_its_share_when_others_come(small: ProfiledApplication) -> None:
    """Of two jobs that both need 4 of 4 GPUs the first is admitted, although the second is due earlier."""
    settings = Settings([4], interval=10.0, free_moves=True)
    duration = requested_duration(Submission("a", 0.0, small, 4, 64), settings)
    jobs = [Submission(f"{i}", 10.0 * i, small, 4, 64, deadline=(1.3 - i / 10) * duration) for i in range(2)]
    result = Results.of(simulate(jobs, ElasticFlow(), settings), settings)
    assert [job.completed <= (job.deadline or 0.0) for job in result.jobs] == [True, False]


def test_the_remaining_steps_fall_from_all_to_none(small: ProfiledApplication) -> None:
    job = SimulatedJob(Submission("a", 0.0, small, 1, 64))
    ends = small.epoch_ends
    found = [remaining_steps(job)]
    for epoch, end in enumerate(ends):
        job.epoch, job.progress = epoch, end - 1.0
        found.append(remaining_steps(job))
    assert found[0] == pytest.approx(small.iterations(64, len(ends) - 1))
    assert found == sorted(found, reverse=True)
    assert 0 < found[-1] < 2
