"""The command line: its output and exit codes."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from adascale_client import MetricsServiceClient
from adascale_controller.local.run_history import RunRecord, record_start
from adascale_controller.local.service_process import RunningService, write_service
from adascale_controller.local.state_dir import StateDir, StateLock
from adascale_core.decision.explanation import explain
from adascale_core.views.decision import DecisionView
from api.client import TOKEN
from controller.conftest import REPORT
from e2e.local_run import adascale_in_process as adascale
from e2e.local_run import write_job
from support.job_states import NOW, solved
from support.job_states import job as job_state
from support.service import Service

# -- help ------------------------------------------------------------------------------------------------


NO_LABELS = ["a b", "/gpu", "gpu/", "-gpu", "a/b/c", "x" * 64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *((["--accelerator-label", label], "is not the key of a label") for label in NO_LABELS),
        (["--tls-secret", "adascale-api-tls"], "got 'adascale-api-tls', expected NAMESPACE/NAME"),
        (["--tls-external"], "--tls-external: it needs --tls-secret"),
        (["--tls-secret", "a/b", "--api-url", "http://api"], "must begin with https://"),
        (
            ["--tls-secret", "a/b", "--api-url", "https://api", "--pod-api-url", "http://api"],
            "must begin with https://",
        ),
    ],
)
def test_the_operator_refuses_a_label_of_no_node_and_contradicting_options_for_tls(
    options: list[str], message: str
) -> None:
    refused = adascale("operator", *options)
    assert refused.returncode == 2
    assert message in " ".join(refused.stderr.replace("│", " ").split())


def test_version_shows_the_version() -> None:
    assert adascale("--version").stdout == "adascale 0.1.0\n"


# -- validate --------------------------------------------------------------------------------------------


def test_a_valid_job_is_shown_with_its_replica_counts(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (9000, "needs 2.50 steps at batchSize per second for 9,000 steps"),
        (None, "once the program reports it: set scaleInvariantSteps or trainSamples"),
    ],
)
def test_what_a_deadline_needs_is_shown(tmp_path: Path, steps: int | None, text: str) -> None:
    job = write_job(
        tmp_path / "job.yaml", ["python"], completionDeadlineSeconds=3600, scaleInvariantSteps=steps
    )
    shown = adascale("validate", job)
    assert shown.returncode == 0, shown.stderr
    assert text in shown.stdout
    assert "condition DeadlineFeasible" in shown.stdout


def test_gpus_that_a_replica_does_not_use_are_warned_of(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"])
    resources = r"\1resources: {limits: {nvidia.com/gpu: 8}}\n\g<0>"
    job.write_text(re.sub(r"^( +)command:", resources, job.read_text(), flags=re.MULTILINE))
    shown = adascale("validate", job)
    assert shown.returncode == 0, shown.stderr
    assert "Warning: a replica has 8 GPUs and uses 1 of them, because it is one process on" in shown.stdout


def test_a_script_that_is_not_here_is_warned_of(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", ["python", "absent.py"])
    shown = adascale("validate", job)
    assert shown.returncode == 0, shown.stderr
    assert "Warning: `adascale run` refuses it here: the script 'absent.py' of the job's" in shown.stdout


def test_every_error_of_a_job_is_shown_without_a_traceback(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"], maxReplica=2, bakoffLimit=1)
    for command in ("validate", "run"):
        failed = adascale(command, job)
        assert failed.returncode == 2
        assert failed.stdout == ""
        assert failed.stderr.splitlines() == [
            f"adascale: {job}:8: spec.maxReplica: unknown field; did you mean maxReplicas?",
            f"          {job}:9: spec.bakoffLimit: unknown field; did you mean backoffLimit?",
        ]


# -- explain ---------------------------------------------------------------------------------------------


def test_explain_shows_the_decision_with_its_limits_and_what_other_counts_would_give(
    service: Service,
) -> None:
    job = replace(job_state("default.digits", 2), remaining=1000.0)
    (decision,) = explain(solved([job], 8), NOW, time.time(), [job.id]).values()
    client = MetricsServiceClient(service.url, TOKEN)
    client.put_decision(decision)
    assert client.get_decision("default.digits") == decision
    client.close()
    shown = adascale("explain", "digits", "--url", service.url)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert "default.digits decision 2 -> 4 replicas" in text
    assert "limits 1 to 8 replicas are valid" in text
    assert text.count(decision.limits[-1].reason) == 1
    assert "4 of 8 replicas are free" in text
    assert "measured 1,450 progress per second on 2 replicas, mean of the last minute" in text
    assert "replicas predicted per second time left why" in text
    assert "chosen" in text
    answer = json.loads(adascale("explain", "digits", "--url", service.url, "-o", "json").stdout)
    assert DecisionView.from_json(answer) == decision


def test_a_job_without_a_decision_is_an_error_of_the_service(service: Service) -> None:
    failed = adascale("explain", "silent", "--url", service.url)
    assert failed.returncode != 0
    assert "there is no decision about job default.silent yet" in failed.stderr
    assert "Traceback" not in failed.stderr


# -- gain ------------------------------------------------------------------------------------------------


def test_gain_shows_the_gain_and_predictions(service: Service) -> None:
    shown = adascale("gain", "digits", "--url", service.url)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert "default.digits gain 6.25 at scale 8 efficiency 78%" in text
    assert "trains on 2 replicas, generation 1" in text
    assert "progress 4,512, in 1,200 steps" in text
    assert "loss 0.213" in text
    assert "replicas local batch scale gain efficiency progress per second" in text


def test_gain_prints_the_json_of_the_service(service: Service) -> None:
    shown = adascale("gain", "default.digits", "--url", service.url, "-o", "json")
    answer = json.loads(shown.stdout)
    assert {name: answer[name] for name in REPORT} == REPORT
    assert answer["efficiency"] == 0.78125


def test_gain_finds_the_service_in_the_state_folder(tmp_path: Path, service: Service) -> None:
    folder = StateDir(tmp_path / "default.digits")
    folder.create()
    record_start(folder, RunRecord("default.digits", time.time()))
    write_service(folder, RunningService(service.url, os.getpid(), "default.digits"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "service.json").write_text("{")
    lock = StateLock(folder, pytest.fail)
    try:
        for state_dir in (tmp_path, folder.path):
            shown = adascale("gain", "digits", "--state-dir", state_dir)
            assert shown.returncode == 0, shown.stderr
    finally:
        lock.release()
    unknown = adascale("gain", "other", "--state-dir", tmp_path)
    assert unknown.returncode == 69
    assert "no run of job other found in" in unknown.stderr


@pytest.mark.parametrize("job", ["unknown", "silent"])
def test_a_job_without_a_gain_is_an_error_of_the_service(service: Service, job: str) -> None:
    failed = adascale("gain", job, "--url", service.url)
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"adascale: the metrics service answers 404: job default.{job} ")


def test_a_service_that_does_not_answer_is_an_error() -> None:
    failed = adascale("gain", "digits", "--url", "http://127.0.0.1:9")
    assert failed.returncode == 69
    assert failed.stderr == (
        "adascale: the metrics service at http://127.0.0.1:9 does not answer: connection refused\n"
    )
