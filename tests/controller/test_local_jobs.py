"""The commands for local jobs, on state folders without a run."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from adascale_controller.jobfile import load_job
from adascale_controller.local import run_history
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.log_follower import print_log
from adascale_controller.local.run_history import RunRecord
from adascale_controller.local.scale_requests import ScaleError, ScaleRequests, request_limit
from adascale_controller.local.state_dir import StateDir
from e2e.local_run import adascale_in_process as adascale
from e2e.local_run import write_light_job
from support.manifests import make_manifest


def write_state(
    path: Path,
    job_id: str,
    exit_code: int | None = None,
    steps: int | None = 1000,
    checkpoints: str | None = None,
) -> StateDir:
    """Create the state folder of a job that ran 12.5 minutes ago."""
    folder = StateDir(path)
    folder.create()
    run_history.record_start(folder, RunRecord(job_id, time.time() - 750, steps, checkpoints))
    if exit_code is not None:
        run_history.record_end(folder, exit_code)
    return folder


def write_checkpoint(folder: StateDir, progress: float, *, finished: bool) -> None:
    """Write the manifest of a checkpoint at step 12."""
    folder.checkpoints.mkdir()
    manifest = make_manifest(step=12, progress=progress, finished=finished, result={"accuracy": 0.5})
    (folder.checkpoints / "checkpoint-00000001.json").write_text(json.dumps(manifest.to_json()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_checkpoint(write_state(tmp_path / "a", "default.a", 0), 1000, finished=True)
    write_checkpoint(write_state(tmp_path / "b", "default.b", 143), 374, finished=False)
    write_state(tmp_path / "c", "team.c", 1)
    write_checkpoint(write_state(tmp_path / "d", "default.d", None, None), 1374, finished=False)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    return tmp_path


def test_list_has_the_columns_of_kubectl(root: Path) -> None:
    shown = adascale("list", "--state-dir", root)
    assert shown.returncode == 0, shown.stderr
    header, *rows = shown.stdout.splitlines()
    assert header.split() == [
        "NAME", "STATE", "REPLICAS", "DESIRED", "BATCH", "GAIN", "EFFICIENCY", "PROGRESS", "RESTARTS", "AGE",
    ]  # fmt: skip
    assert [row.split() for row in rows] == [
        ["a", "Complete", "0", "0", "100%", "12m"],
        ["b", "Stopped", "0", "0", "37%", "12m"],
        ["d", "Stopped", "0", "0", "1,374", "steps", "12m"],
        ["team.c", "Failed", "0", "0", "12m"],
    ]
    assert {row.index("12m") for row in rows} == {header.index("AGE")}


def test_a_job_whose_checkpoints_cannot_be_read_is_listed_with_the_others(tmp_path: Path) -> None:
    write_state(tmp_path / "a", "default.a", 143)
    write_state(tmp_path / "b", "default.b", 0, checkpoints="nostore://bucket/b")
    shown = adascale("list", "--state-dir", tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert [row.split()[:2] for row in shown.stdout.splitlines()[1:]] == [["a", "Stopped"], ["b", "Unknown"]]
    assert shown.stderr.startswith("adascale: b: nostore://bucket/b cannot be used: ")
    status = adascale("status", "b", "--state-dir", tmp_path)
    assert "unknown: nostore://bucket/b cannot be used" in status.stdout


def test_list_prints_json(root: Path) -> None:
    listed = json.loads(adascale("list", "--state-dir", root, "-o", "json").stdout)
    assert [(job["namespace"], job["name"], job["state"], job["exitCode"]) for job in listed] == [
        ("default", "a", "Complete", 0),
        ("default", "b", "Stopped", 143),
        ("default", "d", "Stopped", None),
        ("team", "c", "Failed", 1),
    ]
    assert listed[1]["checkpointStep"] == 12
    assert listed[1]["result"] == {"accuracy": 0.5}


def test_a_list_without_jobs_is_a_message(tmp_path: Path) -> None:
    shown = adascale("list", "--state-dir", tmp_path)
    assert (shown.returncode, shown.stdout) == (0, "")
    assert shown.stderr == (
        f"No jobs found in {tmp_path}: pass the --state-dir of a run, or change to the folder in which "
        "it was started.\n"
    )
    assert adascale("list", "--state-dir", tmp_path, "-o", "json").stdout == "[]\n"


def test_status_shows_a_stopped_job(root: Path) -> None:
    shown = adascale("status", "b", "--state-dir", root)
    assert shown.returncode == 0, shown.stderr
    text = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert text[:4] == ["name default.b", "state Stopped, exit code 143", "age 12m", "replicas 0"]
    assert "progress 374 of 1,000 steps (37%)" in text
    assert "checkpoint step 12" in text
    assert f"state dir {root / 'b'}" in text
    assert json.loads(adascale("status", "b", "--state-dir", root / "b", "-o", "json").stdout)["name"] == "b"


COMMANDS = [("status",), ("logs",), ("stop",), ("scale", "--replicas", 2)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_unknown_job_is_an_error_that_names_the_jobs(root: Path, command: tuple[object, ...]) -> None:
    failed = adascale(*command, "c", "--state-dir", root)
    assert failed.returncode == 1
    assert failed.stderr == f"adascale: no job c found in {root}: the jobs there are a, b, d, team.c\n"


def test_a_folder_without_jobs_is_an_error_that_names_the_fix(tmp_path: Path) -> None:
    failed = adascale("status", "c", "--state-dir", tmp_path)
    assert failed.returncode == 1
    assert "it contains no job; start one with `adascale run FILE`" in failed.stderr


def test_a_job_with_several_state_folders_is_an_error(root: Path) -> None:
    write_state(root / "z", "default.a")
    failed = adascale("status", "a", "--state-dir", root)
    assert failed.returncode == 2
    assert failed.stderr == (
        f"adascale: job a has several state folders: {root / 'a'}, {root / 'z'}; "
        "choose one with --state-dir\n"
    )
    assert adascale("status", "a", "--state-dir", root / "z").returncode == 0


@pytest.mark.parametrize("command", [("stop",), ("scale", "--replicas", 2), ("scale", "--replicas", 0)])
def test_a_job_that_does_not_run_cannot_be_stopped_or_scaled(root: Path, command: tuple[object, ...]) -> None:
    failed = adascale(*command, "team.c", "--state-dir", root)
    assert failed.returncode == 1
    assert failed.stderr == "adascale: job team.c is not running: start it with `adascale run FILE`\n"


def test_logs_print_the_output_of_a_replica(root: Path) -> None:
    StateDir(root / "a").replica_log(0).write_text("one\ntwo\n")
    StateDir(root / "a").replica_log(1).write_text("other\n")
    assert adascale("logs", "a", "--state-dir", root).stdout == "one\ntwo\n"
    assert adascale("logs", "a", "--state-dir", root, "--tail", 1).stdout == "two\n"
    assert adascale("logs", "a", "--state-dir", root, "--replica", 1, "-f").stdout == "other\n"
    failed = adascale("logs", "a", "--state-dir", root, "--replica", 2)
    assert failed.returncode == 1
    assert failed.stderr == "adascale: replica 2 of job a has no output; the replicas with output are 0, 1\n"
    assert "no replica has started yet" in adascale("logs", "b", "--state-dir", root).stderr


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        ("", 3, ""),
        ("a\nb\nc\n", 0, ""),
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\nc\n", 3, "a\nb\nc\n"),
        ("a\nb\nc\n", 9, "a\nb\nc\n"),
        ("a\nb\nc\n", None, "a\nb\nc\n"),
        ("x" * 100_000 + "\n" + "y" * 100_000 + "\n", 1, "y" * 100_000 + "\n"),
        ("x\n" * 100_000, 70_000, "x\n" * 70_000),
    ],
)
def test_the_last_lines_of_a_log(tmp_path: Path, content: str, lines: int | None, expected: str) -> None:
    (tmp_path / "log").write_text(content)
    output = io.StringIO()
    print_log(tmp_path / "log", output, lines, follow=False, runs=lambda: True)
    assert output.getvalue() == expected


def test_a_followed_log_is_printed_to_the_end_of_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    answers = iter([True, True, False])

    def runs() -> bool:
        """Add a line each time; the last one just before the run ends."""
        with log.open("a") as file:
            file.write("more\n")
        return next(answers)

    output = io.StringIO()
    print_log(log, output, 0, follow=True, runs=runs)
    assert output.getvalue() == "more\n" * 3


def test_a_scale_request_without_an_answer_is_kept_for_its_run_only(root: Path) -> None:
    folder = StateDir(root / "a")
    job = load_job(write_light_job(root / "job.yaml", "sleep", maxReplicas=2))
    for process, limit in ((os.getpid() + 1, 1), (os.getpid(), 2)):
        assert request_limit(folder, 2, process, lambda: True, 0.1) is None
        requests = ScaleRequests(folder, job, [], PlainDisplay(Console(file=io.StringIO())))
        assert requests.apply(1) == limit
        assert not folder.scale_request_file.exists()
    with pytest.raises(ScaleError, match="has ended before it read the request"):
        request_limit(folder, 2, os.getpid(), lambda: False, 10)


@pytest.mark.parametrize("command", ["explain", "gain"])
def test_a_job_that_does_not_run_has_no_service_and_is_described_by_its_status(
    root: Path, command: str
) -> None:
    shown = adascale(command, "a", "--state-dir", root)
    assert shown.returncode == 69
    assert "is not running, and its metrics service ended with the run: `adascale status a`" in shown.stderr
