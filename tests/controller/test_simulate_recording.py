"""`adascale simulate --from-service`: jobs of a real metrics service are recorded, saved and replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from adascale_client import MetricsServiceClient
from adascale_controller.cli.app import app
from adascale_controller.simulation.adascale_policy import AdaScalePolicy
from adascale_controller.simulation.engine import SimulationSettings
from adascale_controller.simulation.engine import simulate as simulate_jobs
from adascale_controller.simulation.recording import record
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from api.client import TOKEN
from support.service import Service

SIZES = ((1, 32, 1.0), (2, 32, 1.8), (2, 64, 2.5))
"""Replicas, local batch size, gain."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with two jobs that can be replayed.

    One did not report, one has no known end, and the progress of two counts samples.
    """
    started = Service(tmp_path_factory.mktemp("service"))
    client = MetricsServiceClient(started.url, TOKEN)
    for name, spec in {
        "default.first": JobSpec(32, 512, (16, 64), 1, 4, 4000),
        "team.second": JobSpec(32, None, None, 1, 2, 3000),
        "default.silent": JobSpec(32, 512, (16, 64), 1, 4, 4000),
        "default.endless": JobSpec(32, 512, (16, 64), 1, 4),
        "default.samples": JobSpec(32, 512, (16, 64), 1, 4, train_samples=32_000),
        "default.samples-of-program": JobSpec(32, 512, (16, 64), 1, 4, 4000),
    }.items():
        client.declare_job(name, spec)
        client.allocate(name, Allocation(1, 1))
        if name != "default.silent":
            found = reports(1 if spec.max_batch_size is None else len(SIZES))
            of_samples = "samples" in name
            client.post_gain(name, [replace(each, counts_samples=of_samples) for each in found])
    client.close()
    yield started
    started.stop()


def reports(sizes: int) -> list[GainReport]:
    found = []
    for i, (replicas, local_bsz, gain) in enumerate(SIZES[:sizes]):
        report = GainReport(
            1, 100 * (i + 1), 150.0 * (i + 1), 0, replicas, local_bsz, 1, replicas * local_bsz / 32, gain,
            1.0, 5.0 + i, 0.05 + 0.001 * local_bsz, 1000.0 + 20 * i,
        )  # fmt: skip
        found += [report, replace(report, step=report.step + 50, progress=report.progress + 75.0)]
    return found


def simulate(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments, "--nodes", "1", "--output", "json"], env=environ)


def results(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_jobs_of_a_service_are_replayed_and_saved(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    recorded = results(simulate("--from-service", service.url, str(path), ADASCALE_TOKEN=TOKEN))
    assert [job["name"] for job in recorded["jobs"]] == ["default.first", "team.second"]
    assert results(simulate(str(path))) == recorded
    document = json.loads(path.read_text())
    assert document["version"] == 1
    assert [each["progress"] for each in document["jobs"][0]["reports"]][-1] == 525.0
    assert {each["replicas"] for each in document["jobs"][0]["step_times"]} == {1, 2}


def test_jobs_whose_progress_counts_samples_are_left_out_with_a_message(service: Service) -> None:
    result = simulate("--from-service", service.url, ADASCALE_TOKEN=TOKEN)
    assert [job["name"] for job in results(result)["jobs"]] == ["default.first", "team.second"]
    assert result.stderr == (
        "Left out, because their progress counts samples (trainSamples): default.samples, "
        "default.samples-of-program\n"
    )


def test_a_job_alone_takes_as_long_as_it_reported(service: Service, tmp_path: Path) -> None:
    """3,000 steps of a fixed batch on one replica, at 0.05 + 0.032 s, after a restart of 30 s."""
    path = tmp_path / "recorded.json"
    results(simulate("--from-service", service.url, str(path), ADASCALE_TOKEN=TOKEN))
    document = json.loads(path.read_text())
    document["jobs"] = document["jobs"][1:]
    document["jobs"][0]["time"] = 0.0
    document["jobs"][0]["spec"]["max_replicas"] = 1
    path.write_text(json.dumps(document))
    (job,) = results(simulate(str(path)))["jobs"]
    assert job["completion_time"] == pytest.approx(30 + 3000 * 0.082, rel=0.01)


def test_a_batch_that_did_not_fit_into_memory_is_not_used_in_the_replay(tmp_path: Path) -> None:
    started = Service(tmp_path)
    try:
        client = MetricsServiceClient(started.url, TOKEN)
        job = "default.limited"
        client.declare_job(job, JobSpec(32, 512, (16, 64), 2, 4, 4000))
        client.allocate(job, Allocation(1, 2))
        trainers = [
            Registration(i, f"{i}.1", ReplicaState.WAITING, 0, "127.0.0.1", 4000 + i, accelerator="cpu")
            for i in range(2)
        ]
        states: Sequence[dict[str, Any]] = (
            {},
            {"state": ReplicaState.RUNNING, "generation": 1, "assigned": 1, "replicas": 2, "stepped": 1},
            {"state": ReplicaState.HOLDING, "step": 3, "local_bsz_limit": 24},
        )
        for state in states:
            trainers = [replace(each, rank=each.replica if state else None, **state) for each in trainers]
            for each in trainers:
                client.register(job, each)
        client.post_gain(job, [each for each in reports(2) if each.replicas == 2])
        client.close()
        path = tmp_path / "recorded.json"
        (submission,) = record(MetricsServiceClient(started.url, TOKEN), path, print)
    finally:
        started.stop()
    assert json.loads(path.read_text())["jobs"][0]["spec"]["local_bsz_limit"] == 24
    (replayed,) = simulate_jobs([submission], AdaScalePolicy(), SimulationSettings([4]))
    used = {plan for _, _, plan in replayed.measured}
    assert used
    assert all(plan.local_bsz <= 24 and plan.replicas >= 2 for plan in used)


def test_a_service_that_refuses_the_token_or_has_no_job_is_reported(service: Service, tmp_path: Path) -> None:
    refused = simulate("--from-service", service.url, ADASCALE_TOKEN="wrong")
    assert refused.exit_code != 0
    assert "Traceback" not in refused.output
    empty = Service(tmp_path)
    try:
        result = simulate("--from-service", empty.url, ADASCALE_TOKEN=TOKEN)
    finally:
        empty.stop()
    assert result.exit_code != 0
    assert "no job to replay" in str(result.exception)
