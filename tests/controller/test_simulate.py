"""`adascale simulate` and published workloads: formulas, a small workload, and its files and errors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from published_workloads import nodes_of, read_application, read_costs, read_workload

from adascale_controller.cli.app import app
from adascale_controller.simulation.adascale_policy import AdaScalePolicy, PlacementMode, place
from adascale_controller.simulation.application import fixed_plan
from adascale_controller.simulation.engine import SimulatedJob, SimulationSettings, simulate
from adascale_controller.simulation.recording import read_recording
from adascale_controller.simulation.results import Results
from adascale_core.batch.plans import BatchPlan
from adascale_core.errors import AdaScaleError
from support.workload import write_profiles, write_workload

SETTINGS = SimulationSettings([4] * 2)


class Scripted:
    """Places each job on the next nodes of a script in each round, with the batch size of the workload."""

    def __init__(self, *script: tuple[int, ...]) -> None:
        self._script = iter(script)
        self._nodes: tuple[int, ...] = ()

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> dict[str, tuple[int, ...]]:
        self._nodes = next(self._script, self._nodes)
        return {job.name: self._nodes for job in jobs}

    def plan(self, job: SimulatedJob) -> BatchPlan:
        return fixed_plan(job.application, len(job.training_nodes), job.submission.batch_size)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    write_profiles(folder / "profiles")
    write_workload(folder / "workload.csv")
    write_recording(folder / "recorded.json", 8)
    return folder


def write_recording(path: Path, jobs: int) -> None:
    document = {
        "version": 1,
        "jobs": [
            {
                "name": f"job-{i}",
                "time": 10.0 * i,
                "total": 9000.0 if i % 3 == 0 else 1000.0,
                "spec": {
                    "batch_size": 16,
                    "max_batch_size": 256,
                    "local_bsz_bounds": [4, 32],
                    "max_replicas": 4,
                },
                "step_times": [
                    {"replicas": k, "local_bsz": b, "accumulation": 1, "step_time": 0.02 + 0.005 * b}
                    for k in (1, 2)
                    for b in (8, 16)
                ],
                "reports": [{"progress": 10.0, "grad_sqr": 1.0, "grad_var": 9.0 * (i + 1)}],
            }
            for i in range(jobs)
        ],
    }
    path.write_text(json.dumps(document))


def run(files: Path, *arguments: str) -> Any:
    result = CliRunner().invoke(
        app, ["simulate", str(files / "recorded.json"), *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_step_times_and_statistics_are_interpolated_linearly(files: Path) -> None:
    application = read_application(files / "profiles" / "small")
    assert application.step_time((1,), 6) == pytest.approx((0.05, 0.0))
    assert application.step_time((2, 1), 8) == pytest.approx((0.14, 0.08))
    assert application.step_time((1, 2), 8) == application.step_time((2, 1), 8)
    assert application.step_time((4, 4, 4, 4, 4), 8) == pytest.approx((0.14, 0.08))
    assert application.estimate(40, 1).grad_var == pytest.approx(8.0)
    assert application.iterations(16, 1) == pytest.approx(720.0)
    assert list(application.epoch_ends) == [300.0, 600.0, 900.0, 1200.0]
    assert (application.bounds.batch_size, application.bounds.max_batch_size) == (16, 256)


def test_a_job_alone_takes_as_long_as_its_step_times_say(files: Path) -> None:
    """4 epochs of 300 steps at 0.1 s, after a restart of 30 s; submitted 10 s before the first decision."""
    submission = replace(
        read_workload(files / "workload.csv", files / "profiles")[1], time=50.0, replicas=1, batch_size=16
    )
    (job,) = simulate([submission], Scripted((0,)), SETTINGS)
    assert job.completed_at == pytest.approx(60 + 30 + 1200 * 0.1)
    assert job.replica_seconds == pytest.approx(150.0)


def test_every_job_completes(files: Path) -> None:
    results = json.loads(run(files, "--nodes", "2", "--output", "json"))
    assert {job["name"] for job in results["jobs"]} == {f"job-{i}" for i in range(8)}
    for name in ("mean", "median", "p95", "p99"):
        assert results[f"{name}_completion_time"] > 0
    assert results["makespan"] >= results["p99_completion_time"]
    assert results["gpu_hours"] > 0
    assert results["restarts_per_job"] >= 0
    assert "deadlines_met_share" not in results
    assert {job["deadline"] for job in results["jobs"]} == {None}


def test_the_same_seed_gives_the_same_results(files: Path) -> None:
    arguments = ("--nodes", "2", "--placement", "spread", "--output", "json")
    first = run(files, *arguments, "--seed", "3")
    assert first == run(files, *arguments, "--seed", "3")
    assert first != run(files, *arguments, "--seed", "4")


def test_a_change_is_prepared_while_training_continues(files: Path) -> None:
    """With a preparation of 20 s, a job trains on its old nodes for 20 s more."""

    submission = replace(read_workload(files / "workload.csv", files / "profiles")[0], time=0.0)
    steps = []
    for prepare in (0.0, 20.0):
        job = simulate([submission], Scripted((0,), (0,), (0, 0)), SimulationSettings([4], 30, 60, prepare))[
            0
        ]
        assert job.restarts == 1
        steps.append(job.completed_at or 0.0)
    assert steps[1] > steps[0]


def test_a_job_starts_although_the_multiple_of_the_interval_is_rounded(files: Path) -> None:
    """0.9 / 0.3 is 3, and 3 * 0.3 is less than 0.9."""
    submission = replace(read_workload(files / "workload.csv", files / "profiles")[1], time=0.9, replicas=1)
    job = simulate([submission], Scripted((0,)), SimulationSettings([4], interval=0.3))[0]
    assert job.started_at == pytest.approx(0.9)


def test_a_policy_that_uses_more_than_a_node_holds_is_refused(files: Path) -> None:
    submissions = read_workload(files / "workload.csv", files / "profiles")
    with pytest.raises(AdaScaleError, match="placed 5 replicas on node 0, which holds 4"):
        simulate(submissions, Scripted((0,) * 5), SETTINGS)


def test_packed_replicas_share_nodes_and_spread_replicas_do_not() -> None:
    assert place({}, {"a": 4, "b": 2}, [4, 4]) == {"a": (0,) * 4, "b": (1, 1)}
    assert place({}, {"a": 2}, [4, 4], PlacementMode.SPREAD) == {"a": (0, 1)}
    # One pod after the other, to the nodes of the job, else to the emptiest.
    assert place({"a": (1,)}, {"a": 2, "b": 2}, [2, 2], PlacementMode.AFFINITY) == {"a": (1, 1), "b": (0, 0)}
    assert place({"a": (0,)}, {"a": 1, "b": 3}, [2, 2], PlacementMode.AFFINITY) == {"a": (0,), "b": (1, 1, 0)}
    assert place({"a": (1,), "b": (0, 0, 0)}, {"a": 3, "b": 3}, [4, 4])["a"] == (1, 1, 1)
    assert place({"a": (0, 0, 1)}, {"a": 2}, [4, 4]) == {"a": (0, 0)}


def test_the_table_has_every_number(files: Path) -> None:
    text = run(files, "--nodes", "2")
    for word in ("mean", "median", "p95", "p99", "makespan", "GPU-hours", "restarts", "queueing", "fairness"):
        assert word in text


HEAD = "name,time,application,num_replicas,batch_size\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,time\n", "has no column application"),
        (HEAD, "has no jobs"),
        (f"{HEAD}a,nan,small,1,16\n", "time must be a finite number from 0 to 3.456e+07, got 'nan'"),
        (f"{HEAD}a,1,../profiles,1,16\n", "must be the name of a folder of --profiles, got '../profiles'"),
        (f"{HEAD}a,1,unknown,1,16\n", "application 'unknown' is unknown"),
        (f"{HEAD}a,1,small,1,8\n", "batch_size of a must be a whole number from 16 to 256, got '8'"),
        (f"{HEAD}a,1,small,1,16\na,2,small,1,16\n", "two jobs of the name 'a'"),
    ],
)
def test_an_invalid_workload_is_refused_with_what_is_allowed(
    files: Path, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "workload.csv"
    path.write_text(text)
    with pytest.raises(AdaScaleError, match=re.escape(message)):
        read_workload(path, files / "profiles")


TIMES = "placement,local_bsz,step_time,sync_time\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("placements.csv", f"{TIMES}1,4,nan,0\n", "step_time must be a finite number, got 'nan'"),
        ("placements.csv", f"{TIMES}13,4,2,1\n22,8,2,1\n", "placements 13 and 22 have different values"),
        ("validation-x.csv", "", "the name must be validation-<batch size>.csv, got 'x'"),
    ],
)
def test_an_invalid_profile_is_refused_with_its_file(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    write_profiles(tmp_path)
    path = tmp_path / "small" / name
    path.write_text(text)
    with pytest.raises(AdaScaleError, match=re.escape(message)) as raised:
        read_application(tmp_path / "small")
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--restart", "nan"], "--restart"),
        (["--prepare", "-1"], "--prepare"),
        (["--nodes", "1000000000"], "--nodes"),
    ],
)
def test_an_invalid_option_is_refused(files: Path, arguments: Sequence[str], message: str) -> None:
    result = CliRunner().invoke(app, ["simulate", str(files / "recorded.json"), *arguments])
    assert isinstance(result.exception, (AdaScaleError, SystemExit))
    assert message in result.output + str(result.exception)


def test_a_workload_that_is_missing_is_named() -> None:
    assert "WORKLOAD is needed" in CliRunner().invoke(app, ["simulate"]).output
    with pytest.raises(AdaScaleError, match=r"cannot read x.json: No such file"):
        read_recording(Path("x.json"))


RECORDED = {
    "version": 1,
    "jobs": [
        {
            "name": "a",
            "time": 0.0,
            "total": 200.0,
            "spec": {"batch_size": 16, "max_replicas": 4},
            "step_times": [{"replicas": 1, "local_bsz": 16, "accumulation": 1, "step_time": 0.1}],
            "reports": [{"progress": 10.0, "grad_sqr": 1.0, "grad_var": 9.0}],
        }
    ],
}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["version"], 2, "not a recorded workload of version 1, but of version 2"),
        (["jobs"], [], "jobs: List should have at least 1 item"),
        (["jobs", 0], "x", "jobs.0: an object is needed, got 'x'"),
        (["jobs", 0, "time"], -1, "jobs.0.time: Input should be greater than or equal to 0, got '-1'"),
        (["jobs", 0, "total"], float("nan"), "jobs.0.total: Input should be"),
        (["jobs", 0, "total"], 1e300, "job a: total is 1e+300, which takes more than 400 days on 4 replicas"),
        (["jobs", 0, "spec"], {}, "jobs.0.spec.batch_size: Field required"),
        (["jobs", 0, "spec", "min_replicas"], 8, "minReplicas 8 is greater than maxReplicas 4"),
        (["jobs", 0, "spec", "local_bsz_bounds"], [9, 3], "lower 9 is greater than upper 3"),
        (["jobs", 0, "step_times", 0, "step_time"], 1e20, "must be from 1e-9 to 1e9 s"),
    ],
)
def test_an_invalid_recording_is_refused_with_its_place(
    tmp_path: Path, place: Sequence[str | int], value: object, message: str
) -> None:
    document = json.loads(json.dumps(RECORDED))
    parent = document
    for part in place[:-1]:
        parent = parent[part]
    parent[place[-1]] = value
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(document))
    with pytest.raises(AdaScaleError, match=re.escape(message)) as raised:
        read_recording(path)
    assert str(path) in str(raised.value)


def test_a_file_that_is_no_json_or_has_two_jobs_of_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    path.write_text("{")
    with pytest.raises(AdaScaleError, match=r"json is not valid JSON \(Expecting .*\): record it again with"):
        read_recording(path)
    path.write_text(json.dumps({**RECORDED, "jobs": 2 * RECORDED["jobs"]}))  # type: ignore[operator]
    with pytest.raises(AdaScaleError, match="two jobs of the name 'a'"):
        read_recording(path)


# -- types of accelerators -----------------------------------------------------------------------------------

TYPES = {"fast": 0.5, "slow": 2.0}
"""type -> the factor of its step times."""


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a workload, profiles of two types, and costs."""
    folder = tmp_path_factory.mktemp("typed")
    write_profiles(folder / "profiles", TYPES)
    write_workload(folder / "workload.csv")
    costs = {"restart": {"small": 20, "large": 40}, "slowdown": {"small": 1.5}, "cluster": {}}
    (folder / "costs.json").write_text(json.dumps(costs))
    return folder


def test_every_job_completes_on_several_types(typed: Path) -> None:
    sizes, types = nodes_of("fast=1x4,slow=2x4")
    costs, settings = read_costs(typed / "costs.json"), SimulationSettings(sizes, types=types)
    jobs = read_workload(typed / "workload.csv", typed / "profiles", list(TYPES), costs)
    simulated = simulate(jobs, AdaScalePolicy(), settings)
    results = Results.of(simulated, settings)
    assert {job.name for job in results.jobs} == {f"job-{i}" for i in range(8)}
    used = {name: sum(job.replica_seconds_on.get(name, 0.0) for job in simulated) for name in TYPES}
    assert sum(used.values()) / 3600 == pytest.approx(results.summary()["gpu_hours"])
    assert used["fast"] / 4 > used["slow"] / 8


def test_restarts_and_slowdowns_of_an_application_are_counted(typed: Path) -> None:
    """Alone on a slow GPU: 20 s, then 4 epochs of 300 steps at 0.1 s, twice as slow and slowed by 1.5."""
    costs = read_costs(typed / "costs.json")
    (_, small, *_) = read_workload(typed / "workload.csv", typed / "profiles", ["slow", "fast"], costs)
    small = replace(small, time=60.0, replicas=1, batch_size=16)
    (job,) = simulate([small], Scripted((0,)), SimulationSettings([1], types=["slow"]))
    assert job.completed_at == pytest.approx(60 + 20 + 1200 * 0.1 * 2 * 1.5)
    assert job.replica_seconds_on == {"slow": pytest.approx(380.0)}


@pytest.mark.parametrize(
    ("script", "free_moves", "restarts"),
    [
        (((0, 0), (0, 0)), False, 0),
        (((0, 0), (1, 1)), False, 1),
        (((0, 0), (1, 1)), True, 0),
        (((0, 0), (0, 1)), True, 1),
        (((0, 0), (2, 2)), True, 1),
    ],
    ids=["stays", "other node", "other node, free", "other shape", "other type"],
)
def test_what_a_move_costs(
    typed: Path, script: Sequence[tuple[int, ...]], free_moves: bool, restarts: int
) -> None:
    (_, small, *_) = read_workload(typed / "workload.csv", typed / "profiles", ["fast", "slow"])
    settings = SimulationSettings([2, 2, 2], types=["fast", "fast", "slow"], free_moves=free_moves)
    (job,) = simulate([replace(small, time=0.0)], Scripted(*script), settings)
    assert job.restarts == restarts
    assert set(job.replica_seconds_on) == {settings.type_of(nodes) for nodes in script}


def test_a_policy_that_mixes_types_is_refused(typed: Path) -> None:
    (_, small, *_) = read_workload(typed / "workload.csv", typed / "profiles", ["fast", "slow"])
    with pytest.raises(AdaScaleError, match="one type at a time"):
        simulate([small], Scripted((0, 1)), SimulationSettings([1, 1], types=["fast", "slow"]))


def test_the_setting_changes_the_results_of_the_decision(files: Path) -> None:
    def completed(*arguments: str) -> list[float]:
        text = run(files, "--nodes", "2", "--noise", "0", "--output", "json", *arguments)
        return [job["completed"] for job in json.loads(text)["jobs"]]

    default = completed()
    assert completed("--fairness", "0") == default
    assert completed("--fairness", "1") != default


@pytest.mark.parametrize("command", [["simulate", "workload.csv"], ["operator"]])
@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan"])
def test_an_invalid_fairness_is_refused(command: Sequence[str], value: str) -> None:
    result = CliRunner().invoke(app, [*command, "--fairness", value])
    assert result.exit_code == 2
    assert f"a number from 0 to 1 is needed, got {value}" in " ".join(result.output.replace("│", " ").split())
