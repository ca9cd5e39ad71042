"""`adascale run` with checkpoints in an object store: a real S3 server."""

import json
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
    write(int(saved["progress"]) + 200, 0.0)
    resumed = adascale("run", job, "--state-dir", state, "--port", 0, timeout=120)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    step = resumed.stdout.partition("Resuming at step ")[2].partition(", progress")[0]
    assert int(step.replace(",", "")) >= saved["step"], resumed.stdout
    assert "Finished at progress" in resumed.stdout
    status = adascale("status", "test", "--state-dir", state, "-o", "json")
    assert json.loads(status.stdout)["checkpointStep"] > saved["step"], status.stdout
    server.stop()
    away = adascale("run", job, "--state-dir", state, "--port", 0, timeout=120)
    assert away.returncode == 1
    assert f"{URL}/default.test cannot be read" in away.stdout + away.stderr
    assert "Traceback" not in away.stdout + away.stderr
