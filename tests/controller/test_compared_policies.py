"""The policies of `bench/compare_policies.py`: their rules, and fairness to an isolated cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, floor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import compare_policies
from compare_policies import POLICIES, isolated_fairness
from elasticflow import ElasticFlow, satisfactory_plan
from isolated_cluster import IsolatedCluster, limited_to
from policies import EarliestDeadlineFirst, FirstComeFirstServed, Tiresias
from published_workloads import ProfiledApplication, read_application, read_workload, requested_duration

from adascale_controller.simulation.adascale_policy import AdaScalePolicy
from adascale_controller.simulation.engine import (
    Policy,
    SimulatedJob,
    SimulationSettings,
    Submission,
    simulate,
)
from adascale_controller.simulation.results import Results
from support.examples import examples
from support.workload import write_profiles, write_workload

TYPES = {"fast": 0.5, "slow": 2.0}
"""type -> the factor of its step times."""
SETTINGS = SimulationSettings([4] * 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    write_profiles(folder / "profiles", {"": 1.0, **TYPES})
    write_workload(folder / "workload.csv")
    return folder


@pytest.fixture(scope="module")
def application(files: Path) -> ProfiledApplication:
    return read_application(files / "profiles" / "small")


def compare(files: Path, *arguments: str) -> None:
    compare_policies.main(
        [str(files / "workload.csv"), "--profiles", str(files / "profiles"), "--nodes", "2", *arguments]
    )


def test_every_policy_completes_every_job(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(files, "--policies", *POLICIES, "--deadlines", "0.5-1.5", "--json", str(tmp_path))
    table = capsys.readouterr().out
    for policy in POLICIES:
        results = json.loads((tmp_path / f"{policy}-workload-0.json").read_text())
        assert {job["name"] for job in results["jobs"]} == {f"job-{i}" for i in range(8)}
        mean = f"{results['mean_completion_time']:,.0f}"
        assert f"| {policy}: mean completion time, seconds | {mean} | {mean} |" in table
        assert f"| {policy}: deadlines met | {results['deadlines_met_share']:.1%} |" in table
        if policy == "fcfs":
            assert results["restarts_per_job"] == 0


def test_the_decision_beats_policies_of_fixed_size(files: Path) -> None:
    submissions = read_workload(files / "workload.csv", files / "profiles")
    random = Random(0)

    def mean(policy: Any) -> float:
        jobs = simulate(submissions, policy, SETTINGS, lambda: random.lognormvariate(0, 0.04))
        return Results.of(jobs, SETTINGS).summary()["mean_completion_time"]

    adascale = mean(AdaScalePolicy())
    for other in (Tiresias(), FirstComeFirstServed()):
        assert adascale < mean(other)


@pytest.mark.parametrize("policy", [AdaScalePolicy(), EarliestDeadlineFirst(), ElasticFlow()])
def test_the_job_with_a_deadline_is_served_before_an_earlier_one(
    application: ProfiledApplication, policy: Policy
) -> None:
    """Both want all 4 GPUs. The later job can meet its deadline only if it does not wait for the earlier."""
    jobs = [
        Submission("early", 0.0, application, 4, 64, deadline=1e5),
        Submission("late", 60.0, application, 4, 64, deadline=60.0 + 240.0),
    ]
    found = simulate(jobs, policy, SimulationSettings([4], restart=10.0, interval=10.0, free_moves=True))
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


def test_an_admitted_job_keeps_its_share_when_others_come(application: ProfiledApplication) -> None:
    """Of two jobs that both need 4 of 4 GPUs the first is admitted, although the second is due earlier."""
    settings = SimulationSettings([4], interval=10.0, free_moves=True)
    duration = requested_duration(Submission("a", 0.0, application, 4, 64), settings)
    jobs = [
        Submission(f"{i}", 10.0 * i, application, 4, 64, deadline=(1.3 - i / 10) * duration) for i in range(2)
    ]
    result = Results.of(simulate(jobs, ElasticFlow(), settings), settings)
    assert [job.completed <= (job.deadline or 0.0) for job in result.jobs] == [True, False]
    result = Results.of(simulate(jobs, ElasticFlow(keeps_all=True), settings), settings)
    assert max(job.started - job.submitted for job in result.jobs) <= 10.0


@pytest.fixture(scope="module")
def small(files: Path) -> Submission:
    """Return a job of 1,200 steps at 0.1 s on one replica, and 0.07 s on two, submitted at a decision."""
    job = read_workload(files / "workload.csv", files / "profiles", list(TYPES))[1]
    untyped = read_workload(files / "workload.csv", files / "profiles")[1]
    return replace(job, time=0.0, replicas=1, batch_size=16, application=untyped.application)


def twin(
    jobs: Sequence[SimulatedJob], settings: SimulationSettings, new_policy: Callable[[], Policy]
) -> list[float]:
    """Return the finish-time fairness of each job, as its definition reads."""
    found = []
    for job in jobs:
        begin, end = job.submission.time, job.completed_at or 0.0
        overlaps = [min(end, other.completed_at or 0.0) - max(begin, other.submission.time) for other in jobs]
        share = settings.total * (end - begin) / sum(overlap for overlap in overlaps if overlap > 0)
        expected = 0.0
        for name, nodes in settings.nodes_by_type().items():
            gpus = sum(settings.nodes[node] for node in nodes)
            own = min(share, gpus)

            def alone(replicas: int, name: str = name, nodes: Sequence[int] = nodes) -> float:
                limited = limited_to(job.application_on(name), max(replicas, 1))  # noqa: B023
                sizes = [settings.nodes[node] for node in nodes]
                submission = replace(job.submission, application=limited, by_type={})  # noqa: B023
                (result,) = simulate([submission], new_policy(), replace(settings, nodes=sizes, types=()))
                return (result.completed_at or 0.0) - submission.time

            low, high = alone(floor(own)), alone(ceil(own))
            seconds = low + (own - floor(own)) * (high - low) if own >= 1 else high / own
            expected += gpus / settings.total * seconds
        found.append((end - begin) / expected)
    return found


@pytest.mark.parametrize("types", [(), ("fast", "slow", "slow")], ids=["one type", "two types"])
def test_the_results_agree_with_a_readable_twin(files: Path, types: Sequence[str]) -> None:
    submissions = read_workload(files / "workload.csv", files / "profiles", list(dict.fromkeys(types)))[:4]
    settings = SimulationSettings([2] * 3, types=types)
    jobs = simulate(submissions, AdaScalePolicy(), settings)
    found = isolated_fairness(jobs, IsolatedCluster(settings, AdaScalePolicy, fixed_size=False))
    assert found == pytest.approx(twin(jobs, settings, AdaScalePolicy))
    assert len(set(found)) == len(found)
