"""`adascale run` with real processes: stopping, resuming, failures and kills."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from adascale_controller.local.run_history import RunRecord, read_runs, record_start
from adascale_controller.local.state_dir import StateDir
from adascale_core.names import SIGNAL_REPEAT_INTERVAL
from e2e.local_run import PACED, Run, adascale, adascale_in_process, running, write_light_job, write_paced_job
from support.fast_python import PYTHON
from support.launch import has_exited, wait_until
from support.manifests import make_manifest


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


# -- stopping and resuming --------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_resumes(tmp_path: Path, state: Path) -> None:
    # A shell does not pass signals on, and has the exit code of `cat`.
    command = ["sh", "-c", f"true && {' '.join(PYTHON)} {PACED} | cat"]
    job = write_paced_job(tmp_path / "job.yaml", pace=0.005, command=command)
    with running(job, state) as run:
        run.wait_for_step(50)
        step = run.job()["latest"]["step"]
        # As `timeout` does, which signals its child and then the group.
        run.send_signal(signal.SIGINT)
        run.send_signal(signal.SIGINT)
        signalled = time.monotonic()
        assert run.wait_for_exit() == 130
        assert time.monotonic() - signalled < 15
        assert "Interrupted: saving and stopping" in run.output
        assert "; run the same command to resume" in run.output
        assert "Killed" not in run.output
        assert run.processes() == []
        assert not (state / "service.json").exists()
    with running(job, state, "--until", 400) as run:
        run.wait_for_step(step)
        view = run.job()
        assert (view["disruptions"], view["failures"]) == (0, 0)
        assert run.wait_for_exit() == 0
        resumed = re.search(r"Resuming at step (\d+)", run.output)
        assert resumed is not None
        assert int(resumed[1]) >= step
        assert "lost" not in run.output
        assert "has reached --until 400: saving" in run.output
    done = adascale("run", job, "--state-dir", state, "--until", 300)
    assert done.returncode == 0
    assert re.search(r"test has already reached --until 300: its progress is \d", done.stdout), done.stdout
    assert "metrics" not in done.stdout


@pytest.mark.slow
def test_a_run_saves_what_the_metrics_service_does_not_remember_and_ignores_what_was_not_saved(
    tmp_path: Path, state: Path
) -> None:
    job = write_paced_job(tmp_path / "job.yaml", pace=0.002)
    first = adascale("run", job, "--state-dir", state, "--port", 0, "--until", 200)
    assert first.returncode == 0, first.stdout
    for path in state.glob("api.sqlite*"):
        path.unlink()
    # The service counts generations from 1 again, and the checkpoint is of a later one.
    second = adascale("run", job, "--state-dir", state, "--port", 0, "--until", 400)
    assert second.returncode == 0, second.stdout
    assert saved_progress(second.stdout) >= 400
    # The last report is of progress 400, but this run begins without a checkpoint.
    other = write_paced_job(
        tmp_path / "other.yaml", pace=0.002, checkpoint={"path": str(tmp_path / "others")}
    )
    third = adascale("run", other, "--state-dir", state, "--port", 0, "--until", 300)
    assert third.returncode == 0, third.stdout
    assert saved_progress(third.stdout) >= 300
    # As if a job on a cluster had saved it, whose pods know when it was created.
    checkpoints = tmp_path / "others"
    newest = max(checkpoints.glob("checkpoint-*.json"))
    newest.write_text(json.dumps({**json.loads(newest.read_text()), "incarnation": 1760000000}))
    fourth = adascale("run", other, "--state-dir", tmp_path / "new", "--port", 0, "--until", 500)
    assert fourth.returncode == 0, fourth.stdout
    assert saved_progress(fourth.stdout) >= 500


def saved_progress(output: str) -> int:
    """Return the progress at which a run has saved, from its last line."""
    saved = re.search(r"Saved at step [\d,]+, progress ([\d,]+); run the same command", output)
    assert saved is not None, output
    return int(saved[1].replace(",", ""))


# -- the user's program ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fresh_run_deletes_the_saved_state(tmp_path: Path, state: Path) -> None:
    job = write_light_job(tmp_path / "job.yaml", "exit", "0", scaleInvariantSteps=9)
    (state / "checkpoints").mkdir(parents=True)
    (state / "checkpoints" / "checkpoint-00000001.json").write_text(
        json.dumps(make_manifest(finished=True, result={"accuracy": 0.5}).to_json())
    )
    completed = adascale_in_process("run", job, "--state-dir", state)
    assert completed.returncode == 0
    assert "has already finished, at progress 9: accuracy 0.5" in completed.stdout
    assert adascale("run", job, "--state-dir", state, "--port", 0, "--fresh").returncode == 0
    assert list((state / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_a_job_fails_at_its_deadline(tmp_path: Path, state: Path) -> None:
    job = write_light_job(tmp_path / "job.yaml", "sleep", activeDeadlineSeconds=1)
    run = adascale("run", job, "--state-dir", state, "--port", 0)
    assert run.returncode == 1
    assert "activeDeadlineSeconds (1) exceeded" in run.stdout


# -- one folder, one run ---------------------------------------------------------------------------------


def test_a_run_keeps_an_early_request_is_alone_in_its_folder_and_replaces_killed_processes(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adascale_controller.cli.local_commands.ANSWER_TIMEOUT", 0.2)
    job = write_light_job(tmp_path / "job.yaml", "sleep", minReplicas=1, maxReplicas=2)
    with running(job, state, "--replicas", 2) as run:
        wait_until(lambda: read_runs(StateDir(state)), "the start of the run")
        run.send_signal(signal.SIGSTOP)  # as if its start took longer than the command waits
        scaled = adascale_in_process("scale", "test", "--replicas", 1, "--state-dir", state)
        assert scaled.stdout == (
            "test has not answered within 0.2 s. The request for at most 1 replica is kept, and carried out "
            "as soon as the run reads it\n"
        ), scaled.stderr
        run.send_signal(signal.SIGCONT)
        run.wait_for_output("Scaled to at most 1 replica, was 2")
        require_refused_beside(run, job)
        require_replaced_processes(run)
        run.send_signal(signal.SIGTERM)
        assert run.wait_for_exit() == 143
        assert "Received SIGTERM: saving and stopping" in run.output
        assert run.processes() == []


def require_refused_beside(run: Run, job: Path) -> None:
    """Start a second run in the folder of a run."""
    second = adascale_in_process("run", job, "--state-dir", run.state)
    assert second.returncode == 2
    assert f"is in use by another run (process {run.process.pid})" in second.stderr


def require_replaced_processes(run: Run) -> None:
    """Kill the service of a run, then its trainer, then its agent."""
    trainer, before = run.wait_for_trainer(), run.job()
    os.kill(run.pid("service"), signal.SIGKILL)
    run.wait_for_output("The metrics service exited (killed by SIGKILL); restarting it at the same address")
    wait_until(lambda: run.job().get("active") == before["active"], "the answer of the restarted service")
    assert not has_exited(trainer)
    os.kill(trainer, signal.SIGKILL)
    run.wait_for_output(" was lost")
    replacement = run.wait_for_trainer()
    assert replacement != trainer
    os.kill(run.pid("agent"), signal.SIGKILL)
    run.wait_for_output("The agent of replica 0 was lost (killed by SIGKILL); restarting it")
    wait_until(lambda: has_exited(replacement), "the exit of its trainer")
    assert run.wait_for_trainer() != replacement
    assert run.job()["failures"] == 0


def test_a_run_that_does_not_save_in_time_is_stopped_by_a_second_signal(tmp_path: Path, state: Path) -> None:
    with running(write_light_job(tmp_path / "job.yaml", "stubborn"), state) as run:
        run.wait_for_trainer()
        for _ in range(2):
            failed = adascale_in_process("stop", "test", "--state-dir", state, "--timeout", 0.3)
            assert failed.returncode == 1
            assert failed.stderr == (
                "adascale: job test has not ended within 0.3 s: wait longer with --timeout, or stop it "
                f"without saving with `kill {run.process.pid}`\n"
            )
        (listed,) = json.loads(adascale_in_process("list", "--state-dir", state, "-o", "json").stdout)
        assert listed["state"] == "Stopping"
        run.wait_for_output("Received SIGTERM: saving and stopping")
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + SIGNAL_REPEAT_INTERVAL, "the time of a second signal")
        assert "Killed" not in run.output
        run.send_signal(signal.SIGINT)
        assert run.wait_for_exit(10) == 143
        assert "Killed immediately: replica 0" in run.output
        wait_until(lambda: all(has_exited(pid) for pid in run.processes()), "the exit of all processes")


@pytest.mark.slow
def test_runs_that_start_together_get_a_port_each(tmp_path: Path) -> None:
    jobs = ("one", "two", "three")
    with ExitStack() as stack:
        runs = {}
        for name in jobs:
            job = write_paced_job(tmp_path / f"{name}.yaml", pace=0.005, name=name, maxReplicas=1)
            runs[name] = stack.enter_context(running(job, tmp_path / f"default.{name}", port=None))
        for run in runs.values():
            run.wait_for_step()
        urls = set()
        for name, run in runs.items():
            url = str(json.loads((run.state / "service.json").read_text())["url"])
            assert f"\n{url}/#/jobs/default.{name}" in run.output
            assert f"metrics  curl {url}/jobs/{name}/gain" in run.output
            urls.add(url)
            shown = adascale_in_process("gain", name, "--state-dir", tmp_path)
            assert f"default.{name}" in shown.stdout, shown.stderr
        assert len(urls) == len(jobs)


def test_a_running_job_is_listed_scaled_and_stopped(tmp_path: Path, state: Path) -> None:
    job = write_paced_job(tmp_path / "job.yaml", pace=0.02, minReplicas=2, maxReplicas=3)
    with running(job, state) as run:
        run.wait_for_step(5)
        lists: list[dict[str, object]] = []

        def is_running() -> bool:
            # It may grow to 3 replicas in the meantime.
            lists[:] = json.loads(adascale_in_process("list", "--state-dir", tmp_path, "-o", "json").stdout)
            return lists[0]["state"] == "Running"

        wait_until(is_running, "the job to run")
        (listed,) = lists
        assert (listed["name"], listed["process"]) == ("test", run.process.pid)
        assert listed["replicas"] == listed["desiredReplicas"] in {2, 3}
        shown = adascale_in_process("status", "test", "--state-dir", state).stdout
        assert f"Running (process {run.process.pid})" in shown
        found = re.search(r"^1 +running +\d+ +(\d+)$", shown, re.MULTILINE)
        assert found is not None
        assert int(found[1]) == run.pid("trainer", 1)
        explain = ("explain", "test", "--state-dir", state, "-o", "json")
        wait_until(lambda: adascale_in_process(*explain).returncode == 0, "the first explained decision")
        explained = json.loads(adascale_in_process(*explain).stdout)
        assert (explained["job"], explained["waiting"]) == ("default.test", False)
        assert explained["replicas"] in {each["replicas"] for each in explained["counts"]} == {2, 3}
        assert explained["limits"][0] == {"kind": "bounds", "reason": "2 to 3 replicas are valid"}
        refused = adascale_in_process("scale", "test", "--replicas", 1, "--state-dir", state)
        assert refused.returncode == 1
        assert "test needs at least 2 replicas, but --replicas is 1" in refused.stderr
        scaled = adascale_in_process("scale", "test", "--replicas", 2, "--state-dir", state)
        assert scaled.stdout == "test scaled to at most 2 replicas\n", scaled.stderr
        assert "Scaled to at most 2 replicas, was 3" in run.output
        follower = subprocess.Popen(
            [sys.executable, "-m", "adascale_controller", "logs", "test", "-f", "--state-dir", state],
            stdout=subprocess.PIPE,
            text=True,
        )
        stopped = adascale_in_process("stop", "test", "--state-dir", state)
        assert re.fullmatch(r"test stopped, saved at step [\d,]+\n", stopped.stdout), stopped.stderr
        assert run.wait_for_exit() == 143
        assert "Received SIGTERM: saving and stopping" in run.output
        assert run.processes() == []
        output, _ = follower.communicate(timeout=20)
        assert output.startswith("enters generation 1 at step 0\n")
    (listed,) = json.loads(adascale_in_process("list", "--state-dir", tmp_path, "-o", "json").stdout)
    assert (listed["state"], listed["process"], listed["exitCode"]) == ("Stopped", None, 143)


@pytest.mark.slow
def test_a_slow_replica_is_named_in_the_output_and_the_status(tmp_path: Path, state: Path) -> None:
    job = write_paced_job(tmp_path / "job.yaml", pace=0.1, env={"SLOW": "1"}, minReplicas=2, maxReplicas=2)
    # Where other programs use all cores, that is named as the cause.
    named = r"eplica 1 is slow(: in each step it computes \d\.\d+ times| because more processes compute)"
    with running(job, state) as run:
        run.wait_for_output("Replica 1 is slow", timeout=150.0)
        assert re.search(named, run.output)
        assert run.job()["latest"]["slow_replica"] == 1
        status = adascale_in_process("status", "test", "--state-dir", state)
        assert re.search(rf"slow +[rR]{named}", status.stdout), status.stdout + status.stderr

        def explained() -> str:
            return adascale_in_process("explain", "test", "--state-dir", state).stdout

        assert re.search(named, wait_until(explained, "the first explained decision"))


def test_a_folder_of_another_job_is_an_error(tmp_path: Path, state: Path) -> None:
    folder = StateDir(state)
    folder.create()
    record_start(folder, RunRecord("default.test", time.time()))
    folder.database.touch()
    other = write_light_job(tmp_path / "other.yaml", "sleep", name="other")
    for options in ([], ["--fresh"]):
        run = adascale_in_process("run", other, "--state-dir", state, *options)
        assert run.returncode == 2
        assert "contains the state of job default.test, not of default.other" in run.stderr
    assert folder.database.exists()
    assert [record.job for record in read_runs(folder)] == ["default.test"]


# -- the whole loop --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_grows_because_of_its_gain_and_survives_kills(tmp_path: Path, state: Path) -> None:
    job = write_paced_job(
        tmp_path / "job.yaml",
        pace=0.01,
        maxReplicas=2,
        scaleInvariantSteps=12_000,
        checkpoint={"intervalSeconds": 1},
    )
    with running(job, state) as run:
        run.wait_for_output("Generation 1 trains on 1 replica: batch size 4")
        run.wait_for_output("Rescaling 1 -> 2: predicted gain 1.0 -> ")
        run.wait_for_output("trains on 2 replicas")
        shown = adascale("gain", "test", "--state-dir", state)
        assert shown.returncode == 0, shown.stderr
        assert "trains on    2 replicas" in shown.stdout
        os.kill(run.wait_for_trainer(1), signal.SIGKILL)
        run.wait_for_output(
            "The trainer of replica 1 was lost (killed by SIGKILL); the others keep their state"
        )
        assert run.wait_for_exit() == 0
        assert "Finished at progress 12," in run.output
        result, comparison, hint = run.output.splitlines()[-3:]
        assert "on one replica" in comparison
        assert "loss" in result
        assert "`adascale ui` shows it" in hint
        assert run.processes() == []
    shown = adascale("goodput", "test", "-o", "json", "--state-dir", state)
    seconds = json.loads(shown.stdout)["replica_seconds"]
    assert min(seconds[cause] for cause in ("starting", "change", "repeated", "exchange")) > 0
    # The same efficiency as that of the gain, which differs from report to report.
    with closing(sqlite3.connect(StateDir(state).database)) as database:
        (least, most), *_ = database.execute("SELECT min(gain / scale), max(gain / scale) FROM reports")
    assert least < seconds["useful"] / (seconds["useful"] + seconds["efficiency_lost"]) < most
    again = adascale("run", job, "--state-dir", state)
    assert again.returncode == 0
    assert "test has already finished, at progress 12," in again.stdout
    more = write_paced_job(tmp_path / "more.yaml", pace=0.001, maxReplicas=2, scaleInvariantSteps=13_000)
    longer = adascale("run", more, "--state-dir", state, "--port", 0)
    assert longer.returncode == 0, longer.stdout
    assert "Resuming at step" in longer.stdout
    assert "Finished at progress 13," in longer.stdout


@pytest.mark.slow
def test_the_run_after_a_killed_one_resumes_at_its_last_step_on_fewer_replicas(
    tmp_path: Path, state: Path
) -> None:
    job = write_paced_job(tmp_path / "job.yaml", pace=0.01, minReplicas=1, maxReplicas=2)
    with running(job, state) as run:
        run.wait_for_output("trains on 2 replicas")
        run.wait_for_step(400)
        pids = run.processes()
        run.process.kill()
        run.process.wait()
        with running(job, state, "--replicas", 1) as again:
            again.wait_for_output("Resuming at step")
            assert all(map(has_exited, pids))
            again.wait_for_output("trains on 1 replica")
            again.send_signal(signal.SIGINT)
            assert again.wait_for_exit() == 130
            step = again.output.partition("Resuming at step ")[2].partition(", progress")[0]
            assert int(step.replace(",", "")) >= 400


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_says_how_to_go_on(tmp_path: Path, state: Path) -> None:
    job = write_paced_job(tmp_path / "job.yaml", pace=0.0)
    first = adascale("run", job, "--state-dir", state, "--port", 0, "--until", 100, timeout=120)
    assert first.returncode == 0, first.stdout
    assert "Saved at step" in first.stdout.splitlines()[-1]
    for path in state.rglob("*.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = adascale("run", job, "--state-dir", state, "--port", 0, timeout=120)
    assert again.returncode == 1
    output = " ".join(again.stdout.split())
    assert "no intact checkpoint is left in" in output
    assert "start from scratch (adascale run --fresh, or another checkpoint folder)" in output
    assert "Saved at step" not in output
    assert output.endswith("Correct the cause, and run the command again")
