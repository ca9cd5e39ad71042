"""`adascale run` with checkpoints in an object store: a real S3 server."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.local_run import adascale, running, write_paced_job
from support import s3
from support.launch import wait_until

pytest.importorskip("s3fs", reason="s3fs is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

URL = f"s3://{s3.BUCKET}/runs"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.S3Server]:
    server = s3.S3Server(s3.require_server(), tmp_path / "objects")
    for name, value in s3.environment(server.port).items():
        monkeypatch.setenv(name, value)
    server.start()
    yield server
    server.stop()


def test_a_run_that_is_killed_resumes_from_an_object_store(tmp_path: Path, server: s3.S3Server) -> None:
    state, job, objects = tmp_path / "state", tmp_path / "job.yaml", tmp_path / "objects" / s3.BUCKET / "runs"
    log = state / "logs" / "replica-0.log"

    def manifests() -> list[Path]:
        return sorted(objects.glob("default.test/checkpoint-*.json"))

    def write(steps: int, pace: float) -> None:
        checkpoint = {"url": URL, "intervalSeconds": 1}
        write_paced_job(job, pace, checkpoint=checkpoint, scaleInvariantSteps=steps)

    write(100_000, 0.01)
    with running(job, state) as run:
        wait_until(lambda: len(manifests()) >= 2, "two checkpoints", 200)
        run.process.kill()
        run.process.wait()
    saved = json.loads(manifests()[-1].read_text())
    assert saved["step"] > 0
    write(int(saved["progress"]) + 1000, 0.01)
    with running(job, state) as run:
        run.wait_for_output("Resuming at step ")
        step = run.output.partition("Resuming at step ")[2].partition(", progress")[0]
        assert int(step.replace(",", "")) >= saved["step"], run.output
        run.wait_for_step(saved["step"] + 1)
        # The server is away when the trainer starts again, and when training ends.
        server.stop()
        os.kill(run.wait_for_trainer(), signal.SIGKILL)
        wait_until(lambda: "cannot be read" in log.read_text(), "the start of the trainer", 200)
        assert "trying again" in log.read_text()
        server.start()
        wait_until(lambda: "the storage of checkpoints works again" in log.read_text(), "the server", 200)
        run.wait_for_trainer()
        server.stop()
        wait_until(lambda: log.read_text().count("trying again") == 2, "the end of training", 200)
        assert run.process.poll() is None
        server.start()
        assert run.wait_for_exit(200) == 0, run.output
        assert "Finished at progress" in run.output
        assert "Traceback" not in run.output
    status = adascale("status", "test", "--state-dir", state, "-o", "json")
    assert json.loads(status.stdout)["checkpointStep"] > saved["step"], status.stdout


def test_a_job_that_starts_for_the_first_time_without_its_object_store_fails_at_once(
    tmp_path: Path, server: s3.S3Server
) -> None:
    server.stop()
    job = write_paced_job(tmp_path / "job.yaml", 0.0, checkpoint={"url": URL})
    away = adascale("run", job, "--state-dir", tmp_path / "state", "--port", 0, timeout=120)
    assert away.returncode == 1
    assert f"{URL}/default.test cannot be read" in away.stdout + away.stderr
    assert "trying again" not in away.stdout + away.stderr
    assert "Traceback" not in away.stdout + away.stderr
