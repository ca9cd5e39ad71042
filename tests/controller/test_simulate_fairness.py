"""Finish-time fairness to an isolated cluster: cases computed by hand, a readable twin, and every policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, floor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adascale_controller.cli.app import app
from adascale_controller.simulation.adascale_policy import AdaScalePolicy
from adascale_controller.simulation.competitors import EqualShares, FirstComeFirstServed
from adascale_controller.simulation.engine import Policy, Settings, SimulatedJob, Submission, simulate
from adascale_controller.simulation.isolated_cluster import IsolatedCluster
from adascale_controller.simulation.profiles import read_workload
from adascale_controller.simulation.results import Results
from support.workload import write_profiles, write_workload

TYPES = {"fast": 0.5, "slow": 2.0}
"""type -> the factor of its step times."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    write_profiles(folder / "profiles", {"": 1.0, **TYPES})
    write_workload(folder / "workload.csv")
    return folder


@pytest.fixture(scope="module")
def small(files: Path) -> Submission:
    """Return a job of 1,200 steps at 0.1 s on one replica, and 0.07 s on two, submitted at a decision."""
    job = read_workload(files / "workload.csv", files / "profiles", list(TYPES))[1]
    untyped = read_workload(files / "workload.csv", files / "profiles")[1]
    return replace(job, time=0.0, replicas=1, batch_size=16, application=untyped.application)


def test_jobs_that_share_a_gpu_one_after_the_other(small: Submission) -> None:
    """Alone a job takes 30 + 120 s. One runs until 150 s, the other from 180 s to 330 s.

    The first has a contention of 2, so its share is half a GPU, on which it takes 300 s. The contention of
    the other is (150 + 330) / 330, so it takes 150 * 480 / 330 s.
    """
    settings = Settings([1])
    jobs = simulate(
        [replace(small, name=name, by_type={}) for name in "ab"], FirstComeFirstServed(), settings
    )
    isolated = IsolatedCluster(settings, FirstComeFirstServed, fixed_size=True)
    results = Results.of(jobs, settings, isolated)
    found = [job.isolated_finish_time_fairness for job in results.jobs]
    assert found == [pytest.approx(150 / 300), pytest.approx(330 / (150 * 480 / 330))]
    summary = results.summary()
    assert summary["worst_isolated_finish_time_fairness"] == found[1]
    assert summary["isolated_unfairly_treated_share"] == 0.5


@pytest.mark.parametrize(
    ("submitted", "contention", "seconds"),
    [
        # One GPU is fast: 30 + 60 s. Two are slow: 30 + 240 s on one, 30 + 168 s on both.
        (0.0, 1.0, (90 + 2 * 198) / 3),
        (0.0, 2.0, (90 + 2 * (270 + 198) / 2) / 3),
        (0.0, 3.0, (90 + 2 * 270) / 3),
        (0.0, 6.0, 2 * (90 + 2 * 270) / 3),
        (10.0, 3.0, 50 + (90 + 2 * 270) / 3),
        (10.0, 6.0, 2 * (50 + (90 + 2 * 270) / 3)),
    ],
    ids=["alone", "one and a half", "one", "half", "waits for a decision", "half, waits"],
)
def test_the_time_on_a_share_of_two_types(
    small: Submission, submitted: float, contention: float, seconds: float
) -> None:
    settings = Settings([1, 2], types=["fast", "slow"])
    isolated = IsolatedCluster(settings, EqualShares, fixed_size=False)
    found = isolated.completion_time(replace(small, time=submitted), contention)
    assert found == pytest.approx(seconds)


def test_a_policy_of_fixed_size_takes_its_replicas_for_longer_than_its_share(small: Submission) -> None:
    """On 2 of 4 GPUs it takes 30 + 84 s, and with a share of one GPU twice as long."""
    isolated = IsolatedCluster(Settings([4]), FirstComeFirstServed, fixed_size=True)
    pair = replace(small, replicas=2, by_type={})
    assert isolated.completion_time(pair, 1.0) == pytest.approx(114.0)
    assert isolated.completion_time(pair, 4.0) == pytest.approx(2 * 114.0)


def twin(jobs: Sequence[SimulatedJob], settings: Settings, new_policy: Callable[[], Policy]) -> list[float]:
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
                limited = job.application_on(name).limited_to(max(replicas, 1))  # noqa: B023
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
    submissions = read_workload(files / "workload.csv", files / "profiles", list(dict.fromkeys(types)))[:5]
    settings = Settings([2] * 3, types=types)
    jobs = simulate(submissions, AdaScalePolicy(), settings)
    results = Results.of(jobs, settings, IsolatedCluster(settings, AdaScalePolicy, fixed_size=False))
    found = [job.isolated_finish_time_fairness for job in results.jobs]
    assert found == pytest.approx(twin(jobs, settings, AdaScalePolicy))
    assert len(set(found)) == len(found)


def run(files: Path, *arguments: str) -> str:
    command = ["simulate", str(files / "workload.csv"), "--profiles", str(files / "profiles"), *arguments]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    "policy", ["adascale", "tiresias", "optimus", "fcfs", "equal", "sia", "edf", "elasticflow"]
)
def test_a_job_that_is_alone_is_treated_exactly_fairly_by_every_policy(
    files: Path, tmp_path: Path, policy: str
) -> None:
    header, *_ = (files / "workload.csv").read_text().splitlines()
    (tmp_path / "workload.csv").write_text(f"{header}\njob,60,small,2,64\n")
    (tmp_path / "profiles").symlink_to(files / "profiles")
    arguments = ["--nodes", "2", "--noise", "0", "--policy", policy, "--deadlines", "0.5-1.5"]
    results: Any = json.loads(run(tmp_path, *arguments, "--isolated", "--output", "json"))
    assert results["worst_isolated_finish_time_fairness"] == pytest.approx(1.0)
    (job,) = results["jobs"]
    assert job["isolated_finish_time_fairness"] == pytest.approx(1.0)


def test_the_table_has_it_only_if_it_is_asked_for(files: Path) -> None:
    once = partial(run, files, "--nodes", "2", "--policy", "fcfs")
    assert "isolated" in once("--isolated")
    assert "isolated" not in once()


def test_the_setting_changes_the_results_of_the_decision_and_is_refused_elsewhere(files: Path) -> None:
    def completed(*arguments: str) -> list[float]:
        text = run(files, "--nodes", "2", "--noise", "0", "--output", "json", *arguments)
        return [job["completed"] for job in json.loads(text)["jobs"]]

    assert completed("--fairness", "0") == completed()
    assert completed("--fairness", "1") != completed()
    command = ["simulate", str(files / "workload.csv"), "--policy", "fcfs", "--fairness", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "a setting of the policy adascale" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("command", [["simulate", "workload.csv"], ["operator"]])
@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan"])
def test_an_invalid_fairness_is_refused(command: Sequence[str], value: str) -> None:
    result = CliRunner().invoke(app, [*command, "--fairness", value])
    assert result.exit_code == 2
    assert f"a number from 0 to 1 is needed, got {value}" in " ".join(result.output.replace("│", " ").split())
