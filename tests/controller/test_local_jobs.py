"""The commands for local jobs, on state folders without a run."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from adascale_controller.cli.local_commands import scaled_text
from adascale_controller.jobfile import load_job
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.replica_limit import ReplicaLimit, ScaleRequests, request_limit
from adascale_controller.local.run_history import (
    RunRecord,
    deregister_folder,
    record_end,
    record_start,
    register_folder,
    registered_folders,
)
from adascale_controller.local.state_dir import StateDir, StateLock
from adascale_core.errors import AdaScaleError
from e2e import local_run
from e2e.local_run import adascale_in_process as adascale
from e2e.local_run import write_light_job
from support.manifests import make_manifest
from support.observed_jobs import report


def write_state(
    path: Path,
    job_id: str,
    exit_code: int | None = None,
    steps: int | None = 1000,
    checkpoints: str | None = None,
    reason: str = "",
) -> StateDir:
    """Create the state folder of a job that ran 12.5 minutes ago."""
    folder = StateDir(path)
    folder.create()
    record_start(folder, RunRecord(job_id, time.time() - 750, steps, checkpoints))
    if exit_code is not None:
        record_end(folder, exit_code, time.time() - 60, reason)
    return folder


def write_checkpoint(folder: StateDir, progress: float, *, finished: bool) -> None:
    """Write the manifest of a checkpoint at step 12."""
    folder.checkpoints.mkdir()
    manifest = make_manifest(step=12, progress=progress, finished=finished, result={"accuracy": 0.5})
    (folder.checkpoints / "checkpoint-00000001.json").write_text(json.dumps(manifest.to_json()))


REASON = "replica 0 has failed:\n" + "a long explanation " * 10


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_checkpoint(write_state(tmp_path / "a", "default.a", 0), 1000, finished=True)
    ended = write_state(tmp_path / "b", "default.b", None, None)
    record_end(ended, 143, time.time(), latest=replace(report(), target=500.0, loss=0.25))
    write_checkpoint(ended, 374, finished=False)
    write_state(tmp_path / "c", "team.c", 1, reason=REASON)
    write_checkpoint(write_state(tmp_path / "d", "default.d", None, None), 1374, finished=False)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    return tmp_path


def test_list_has_the_columns_of_kubectl(root: Path) -> None:
    shown = adascale("list", "--state-dir", root)
    assert shown.returncode == 0, shown.stderr
    header, *rows = shown.stdout.splitlines()
    assert header.split() == [
        "NAME", "STATE", "REPLICAS", "DESIRED", "BATCH", "GAIN", "EFFICIENCY", "PROGRESS", "LOSS", "RESTARTS",
        "AGE", "FOLDER", "REASON",
    ]  # fmt: skip
    shortened = f"replica 0 has failed: {'a long explanation ' * 10}"[:79] + "…"
    assert rows[1].endswith(shortened)
    assert [row.removesuffix(shortened).split() for row in rows] == [
        ["d", "Stopped", "0", "0", "1,374", "12m", f"{root}/d"],
        ["team.c", "Failed", "0", "0", "12m", f"{root}/c"],
        ["b", "Stopped", "0", "0", "74%", "0.25", "12m", f"{root}/b"],
        ["a", "Complete", "0", "0", "100%", "12m", f"{root}/a"],
    ]
    assert {row.index("12m") for row in rows} == {header.index("AGE")}


def test_a_job_whose_checkpoints_cannot_be_read_is_listed_with_the_others(tmp_path: Path) -> None:
    write_state(tmp_path / "a", "default.a", 143)
    write_state(tmp_path / "b", "default.b", 0, checkpoints="nostore://bucket/b")
    shown = adascale("list", "--state-dir", tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert [row.split()[:2] for row in shown.stdout.splitlines()[1:]] == [["b", "Unknown"], ["a", "Stopped"]]
    assert shown.stderr.startswith("adascale: b: nostore://bucket/b cannot be used: ")
    status = adascale("status", "b", "--state-dir", tmp_path)
    assert "unknown: nostore://bucket/b cannot be used" in status.stdout


FOREIGN_LINES = [
    b"5", b"[1]", b'["began"]', b'{"began": 5}', b'{"began": 5, "job": 7}',
    b'{"began": "x", "job": "default.a"}', b'{"began": NaN, "job": "default.a"}',
    b'{"began": 1e999, "job": "default.a"}', b"\xff",
    b"[" * 100_000, b'{"began": 5, "job": "../../a"}',
    b'{"began": 5, "job": "default.\\u001b[31mred"}',
]  # fmt: skip


def test_folders_with_files_of_other_programs_do_not_hide_jobs(root: Path) -> None:
    for number, line in enumerate(FOREIGN_LINES):
        (root / f"foreign-{number}").mkdir()
        (root / f"foreign-{number}" / "runs.jsonl").write_bytes(line + b"\n")
    (root / "unreadable" / "runs.jsonl").mkdir(parents=True)
    (root / "loop").symlink_to(root / "loop")
    with (root / "a" / "runs.jsonl").open("a") as history:
        history.write('\n{"reason": 5, "ended": "x", "exit_code": 0}')
    listed = adascale("list", "--state-dir", root, "-o", "json")
    assert listed.returncode == 0, listed.stderr
    assert [(job["name"], job["reason"]) for job in json.loads(listed.stdout)] == [
        ("a", ""), ("b", ""), ("d", ""), ("c", REASON),
    ]  # fmt: skip
    # A folder that the user has given is an error.
    refused = adascale("list", "--state-dir", root / "unreadable")
    assert (refused.returncode, "Is a directory" in refused.stderr) == (os.EX_IOERR, True)


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
        f"No jobs found in {tmp_path}: pass another --state-dir, or omit it for all your runs.\n"
    )
    assert adascale("list", "--state-dir", tmp_path, "-o", "json").stdout == "[]\n"


def test_status_shows_a_stopped_job(root: Path) -> None:
    shown = adascale("status", "b", "--state-dir", root)
    assert shown.returncode == 0, shown.stderr
    text = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert text[:4] == ["name default.b", "state Stopped, exit code 143", "age 12m", "replicas 0"]
    assert "progress 374 of 500 (74%)" in text
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
    assert "there are no jobs; start one with `adascale run FILE`" in failed.stderr


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
    for options, expected in (
        ([], "one\ntwo\n"),
        (["--tail", 1], "two\n"),
        (["--tail", 0], ""),
        (["--replica", 1, "-f"], "other\n"),
    ):
        shown = local_run.adascale("logs", "a", "--state-dir", root, *options)
        assert (shown.stdout, shown.returncode) == (expected, 0), shown.stderr
    failed = adascale("logs", "a", "--state-dir", root, "--replica", 2)
    assert failed.returncode == 1
    assert failed.stderr == "adascale: replica 2 of job a has no output; the replicas with output are 0, 1\n"
    assert "no replica has started yet" in adascale("logs", "b", "--state-dir", root).stderr


def test_a_scale_request_without_an_answer_is_kept_for_its_run_only(root: Path) -> None:
    folder = StateDir(root / "a")
    job = load_job(write_light_job(root / "job.yaml", "sleep", maxReplicas=2))
    for process, limit in ((os.getpid() + 1, 1), (os.getpid(), 2)):
        assert request_limit(folder, 2, process, lambda: True, 0.1) is None
        requests = ScaleRequests(folder, job, [], PlainDisplay(Console(file=io.StringIO())))
        assert requests.apply(ReplicaLimit(1)) == ReplicaLimit(limit)
        assert not folder.scale_request_file.exists()
    with pytest.raises(AdaScaleError, match="has ended before it read the request"):
        request_limit(folder, 2, os.getpid(), lambda: False, 10)


@pytest.mark.parametrize(
    ("most", "text"),
    [
        (8, "a scaled to at most 2 replicas and 2 spares"),
        (1, "a scaled to at most 1 replica and 2 spares (spec.maxReplicas is 1)"),
    ],
)
def test_the_answer_to_a_scale_request_has_the_spares(root: Path, most: int, text: str) -> None:
    folder, output = StateDir(root / "a"), io.StringIO()
    job = load_job(write_light_job(root / "job.yaml", "sleep", maxReplicas=most, spareReplicas=2))
    requests = ScaleRequests(folder, job, [], PlainDisplay(Console(file=output)))

    def runs() -> bool:
        requests.apply(ReplicaLimit(1))
        return True

    limit = request_limit(folder, 4, os.getpid(), runs, 10)
    assert limit is not None
    assert scaled_text("a", 4, limit) == text
    assert f"Scaled to at most {limit}, was 1 replica" in output.getvalue()


def test_status_has_the_whole_reason_of_a_failure(root: Path) -> None:
    shown = adascale("status", "team.c", "--state-dir", root)
    assert " ".join(REASON.split()) in " ".join(shown.stdout.split())
    assert (
        json.loads(adascale("status", "team.c", "--state-dir", root, "-o", "json").stdout)["reason"] == REASON
    )
    assert "reason" not in adascale("status", "a", "--state-dir", root).stdout


# -- all runs of a user -----------------------------------------------------------------------------------


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a registry of its own, without runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    # The commands run in the folder of the repository, which may have jobs.
    monkeypatch.setattr(local_run, "ROOT", tmp_path)
    return tmp_path


def test_jobs_of_all_folders_are_listed_without_a_state_folder(registry: Path) -> None:
    assert "No jobs on this machine: start one with `adascale run FILE`" in adascale("list").stderr
    one = write_state(registry / "one" / "state", "default.same", 0)
    two = write_state(registry / "two" / "state", "default.same", 0)
    for folder in (one, two, one):
        register_folder(folder.path)
    listed = json.loads(adascale("list", "-o", "json").stdout)
    assert [job["stateDir"] for job in listed] == [str(one.path), str(two.path)]
    failed = adascale("status", "same")
    assert failed.returncode == 2
    assert f"job same has several state folders: {one.path}, {two.path}; choose one with" in failed.stderr
    # The one that runs is meant.
    lock = StateLock(one, pytest.fail)
    try:
        assert json.loads(adascale("status", "same", "-o", "json").stdout)["stateDir"] == str(one.path)
    finally:
        lock.release()
    # A folder that is gone is no job.
    shutil.rmtree(one.path)
    assert str(two.path) in adascale("status", "same").stdout
    unknown = adascale("status", "other")
    assert unknown.stderr == "adascale: no job other found on this machine: the jobs there are same\n"


def test_a_registry_that_two_runs_change_at_once_has_both(registry: Path) -> None:
    folders = [registry / f"run-{number}" for number in range(16)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(register_folder, folders))
        list(threads.map(deregister_folder, folders[::2]))
    assert sorted(registered_folders()) == sorted(folders[1::2])


@pytest.mark.parametrize("name", [b"caf\xe9", "line\u2028break".encode(), b" spaces "])
def test_a_folder_with_any_name_is_registered(registry: Path, name: bytes) -> None:
    folder = registry / os.fsdecode(name)
    folder.mkdir()
    register_folder(folder)
    assert registered_folders() == [folder]


def test_a_folder_whose_name_has_a_line_break_is_not_registered(registry: Path) -> None:
    (registry / "two\n").mkdir()
    with pytest.raises(ValueError, match="line break"):
        register_folder(registry / "two\n")


def test_a_registered_folder_that_cannot_be_read_does_not_hide_others(registry: Path) -> None:
    folder = write_state(registry / "one", "default.one", 0)
    loop = registry / "loop"
    loop.symlink_to(loop)
    for each in (folder.path, loop, registry / ("x" * 300)):
        register_folder(each)
    assert registered_folders() == [folder.path]
    assert [row.split()[0] for row in adascale("list").stdout.splitlines()[1:]] == ["one"]


def test_a_run_without_a_place_for_the_registry_is_listed_with_its_state_folder(registry: Path) -> None:
    (registry / "state-home").write_text("a file")
    with pytest.raises(OSError, match="state-home"):
        register_folder(registry)
    assert registered_folders() == []
    deregister_folder(registry)


# -- adascale rm ------------------------------------------------------------------------------------------


def test_a_removed_job_leaves_only_files_of_others(registry: Path) -> None:
    folder = write_state(registry / "a", "default.a", 0)
    write_checkpoint(folder, 1000, finished=True)
    register_folder(folder.path)
    folder.database.touch()
    folder.replica_log(0).write_text("output\n")
    (folder.path / "mine.txt").touch()
    refused = adascale("rm", "a")
    assert refused.returncode == 2
    assert "Confirm it with --yes" in refused.stderr
    removed = adascale("rm", "a", "--yes")
    assert (removed.returncode, removed.stdout) == (0, "a deleted\n"), removed.stderr
    assert [path.name for path in folder.path.iterdir()] == ["mine.txt"]
    assert registered_folders() == []
    assert adascale("rm", "a", "--yes").returncode == 1


def test_a_removed_job_leaves_the_project_whose_folder_was_its_state_folder(registry: Path) -> None:
    project = registry / "project"
    (project / "logs").mkdir(parents=True)
    (project / ".gitignore").write_text("*.pyc\n")
    (project / "logs" / "server.log").write_text("mine\n")
    folder = write_state(project, "default.a", 0)
    folder.replica_log(0).touch()
    removed = adascale("rm", "a", "--yes", "--state-dir", project)
    assert removed.stdout == "a deleted\n", removed.stderr
    assert sorted(str(path.relative_to(project)) for path in project.rglob("*")) == [
        ".gitignore", "logs", "logs/server.log",
    ]  # fmt: skip


@pytest.mark.parametrize("option", [True, False], ids=["an option", "a folder of the job's own"])
def test_checkpoints_that_stay_are_named(registry: Path, option: bool) -> None:
    own = None if option else str(registry / "elsewhere")
    folder = write_state(registry / "a", "default.a", 0, checkpoints=own)
    checkpoints = folder.checkpoints if own is None else Path(own)
    checkpoints.mkdir()
    (checkpoints / "checkpoint-00000001.json").touch()
    options = ["--keep-checkpoints"] if option else []
    removed = adascale("rm", "a", "--yes", "--state-dir", registry, *options)
    assert removed.stdout == f"a deleted; its checkpoints stay in {checkpoints}\n", removed.stderr
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-00000001.json"]
    assert not folder.history_file.exists()


def test_a_job_that_runs_is_not_removed(root: Path) -> None:
    lock = StateLock(StateDir(root / "a"), pytest.fail)
    try:
        refused = adascale("rm", "a", "--yes", "--state-dir", root)
    finally:
        lock.release()
    assert refused.returncode == 1
    assert refused.stderr == (
        f"adascale: job a runs (process {os.getpid()}): stop it with `adascale stop a`\n"
    )
    assert (root / "a" / "runs.jsonl").exists()
