"""The command line as a real process: what it prints, where, and its exit code."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adascale_client import MetricsServiceClient
from adascale_core.messages import Allocation, JobSpec
from e2e.local_run import adascale, write_job
from support.service import TOKEN, Service

REPORT = {
    "generation": 1, "step": 1200, "progress": 4512.5, "epoch": 3, "replicas": 2, "local_bsz": 16,
    "accumulation": 1, "scale": 8.0, "gain": 6.25, "grad_sqr": 0.01, "grad_var": 0.25, "step_time": 0.004,
    "loss": 0.2134,
}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A metrics service that knows of a job with a report, and of one without."""
    started = Service(tmp_path_factory.mktemp("service"), job="default.digits")
    client = MetricsServiceClient(started.url, TOKEN)
    client.declare_job("default.digits", JobSpec(4, 256, (4, 64), 1, 4, 12_000))
    client.declare_job("default.silent", JobSpec(4))
    client.allocate("default.digits", Allocation(1, 2))
    started.call("POST", "/gain", {**REPORT, "time": time.time()})
    client.close()
    yield started
    started.stop()


# -- help ------------------------------------------------------------------------------------------------


def test_without_a_command_the_commands_are_listed() -> None:
    shown = adascale()
    assert shown.returncode == 2
    for command in ("run", "validate", "gain"):
        assert f" {command} " in shown.stdout + shown.stderr


def test_help_names_every_option() -> None:
    shown = adascale("run", "--help").stdout
    for option in ("--replicas", "--until", "--state-dir", "--port", "--fresh"):
        assert option in shown


def test_the_version_is_shown() -> None:
    assert adascale("--version").stdout == "adascale 0.1.0\n"


def test_an_option_that_there_is_not_is_refused() -> None:
    refused = adascale("run", "job.yaml", "--replica", "2")
    assert refused.returncode == 2
    assert "--replicas" in refused.stderr


# -- validate --------------------------------------------------------------------------------------------


def test_a_right_job_is_shown_with_its_valid_counts(tmp_path: Path) -> None:
    job = write_job(
        tmp_path / "job.yaml",
        ["python"],
        batchSize=300,
        maxBatchSize=1000,
        localBszBounds={"lower": 100, "upper": 250},
        maxReplicas=12,
    )
    shown = adascale("validate", job)
    assert shown.returncode == 0, shown.stderr
    assert f"{job}: default.test is valid" in shown.stdout
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["1", "150", "2", "300", "1"] in rows
    assert ["2", "150", "to", "250", "1", "300", "to", "500", "1.67"] in rows
    assert ["10", "100", "1", "1,000", "3.33"] in rows
    assert "not valid: 11 to 12" in shown.stdout


def test_the_job_that_we_ship_is_valid() -> None:
    assert adascale("validate", "deploy/adascalejob.yaml").returncode == 0


def test_a_wrong_job_is_told_without_a_traceback(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"], maxBatchSize=2, bakoffLimit=1)
    for command in ("validate", "run"):
        refused = adascale(command, job)
        assert refused.returncode == 2
        assert refused.stdout == ""
        assert refused.stderr.splitlines() == [
            f"adascale: {job}:8: spec.maxBatchSize: 2 is below batchSize 4: "
            "raise maxBatchSize, or lower batchSize",
            f"          {job}:9: spec.bakoffLimit: unknown field; did you mean backoffLimit?",
        ]


def test_a_file_that_is_not_there_is_told() -> None:
    refused = adascale("validate", "absent.yaml")
    assert refused.returncode == 2
    assert refused.stderr == "adascale: absent.yaml: no such file\n"


# -- run, refused ----------------------------------------------------------------------------------------


def test_a_job_that_needs_more_replicas_than_there_may_be_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"], batchSize=12, minReplicas=5, maxReplicas=8)
    refused = adascale("run", job, "--state-dir", tmp_path / "state", "--replicas", 5)
    assert refused.returncode == 2
    assert refused.stderr == (
        "adascale: test needs at least 6 replicas at once, and --replicas is 5: "
        "give --replicas 6 or more, or lower spec.minReplicas\n"
    )
    assert not (tmp_path / "state").exists()


def test_a_port_that_is_taken_is_refused_if_it_was_asked_for(tmp_path: Path, service: Service) -> None:
    job = write_job(tmp_path / "job.yaml", ["python", "-c", "pass"])
    refused = adascale("run", job, "--state-dir", tmp_path / "state", "--port", service.port)
    assert refused.returncode == 2
    assert f"port {service.port} can't be used: address already in use" in refused.stderr


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", ["python", "-c", "pass"])
    refused = adascale("run", job, "--state-dir", "/proc/state")
    assert refused.returncode == 2
    assert "the state folder /proc/state can't be made" in refused.stderr


# -- gain ------------------------------------------------------------------------------------------------


def test_the_gain_of_a_job_is_shown_for_people(service: Service) -> None:
    shown = adascale("gain", "digits", "--url", service.url)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert "default.digits gain 6.25 at scale 8 efficiency 78%" in text
    assert "trains on 2 replicas x batch 16, generation 1" in text
    assert "progress 4,512 steps, in 1,200 optimizer steps" in text
    assert "loss 0.213" in text
    assert "replicas local batch scale gain efficiency progress per second" in text


def test_the_gain_of_a_job_is_shown_for_programs(service: Service) -> None:
    shown = adascale("gain", "default.digits", "--url", service.url, "--json")
    answer = json.loads(shown.stdout)
    assert {name: answer[name] for name in REPORT} == REPORT
    assert answer["efficiency"] == 0.78125


def test_the_service_is_found_where_the_run_announced_it(tmp_path: Path, service: Service) -> None:
    folder = tmp_path / "default.digits"
    folder.mkdir()
    announced = {"url": service.url, "pid": 1, "job": "default.digits"}
    (folder / "service.json").write_text(json.dumps(announced))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "service.json").write_text("{")
    for place in (tmp_path, folder):
        shown = adascale("gain", "digits", "--state-dir", place)
        assert shown.returncode == 0, shown.stderr
    unknown = adascale("gain", "other", "--state-dir", tmp_path)
    assert unknown.returncode == 69
    assert "no run of other is under way" in unknown.stderr


@pytest.mark.parametrize("job", ["unknown", "silent"])
def test_a_job_without_a_gain_is_told_in_the_services_words(service: Service, job: str) -> None:
    refused = adascale("gain", job, "--url", service.url)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"adascale: the metrics service answers 404: job default.{job} ")


def test_an_address_that_nobody_answers_at_is_told() -> None:
    refused = adascale("gain", "digits", "--url", "http://127.0.0.1:9")
    assert refused.returncode == 69
    assert refused.stderr == (
        "adascale: the metrics service at http://127.0.0.1:9 does not answer: connection refused\n"
    )


def test_a_name_that_is_none_is_told() -> None:
    refused = adascale("gain", "No_Name", "--url", "http://127.0.0.1:9")
    assert refused.returncode == 2
    assert "job name 'No_Name' is not valid" in refused.stderr
