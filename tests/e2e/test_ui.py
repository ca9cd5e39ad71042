"""`adascale ui`, and commands about a run that has ended, with real runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from api.client import Client, wait_until
from e2e.local_run import TIMEOUT, adascale, adascale_in_process, running, write_light_job, write_paced_job


@contextmanager
def page(environ: dict[str, str], *options: object) -> Iterator[Client]:
    """Start `adascale ui` in a folder without runs, and yield a client with its token."""
    with subprocess.Popen(
        [sys.executable, "-m", "adascale_controller", "ui", "--port", "0", *map(str, options)],
        cwd=Path(environ["XDG_STATE_HOME"]).parent,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert "Ctrl-C ends it" in process.stdout.readline()
            line = process.stdout.readline()
            found = re.fullmatch(r"http://127.0.0.1:(\d+)/#/\?token=(\S+)\n", line)
            assert found is not None
            port = int(found[1])
            with Client(port, found[2]) as client:
                yield client
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            with suppress(ProcessLookupError):
                process.kill()


def call(environ: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder without runs, until it exits."""
    home = Path(environ["XDG_STATE_HOME"]).parent
    return adascale(*arguments, timeout=TIMEOUT, cwd=home, **environ)


@pytest.mark.slow
def test_a_run_is_shown_while_it_trains_and_after_its_end(tmp_path: Path) -> None:
    state = tmp_path / "state"
    job = write_paced_job(tmp_path / "job.yaml", pace=0.005)
    environ = {"XDG_STATE_HOME": str(tmp_path / "home")}
    with page(environ, "--state-dir", state) as client:
        assert client.summaries() == {}
        with running(job, state, "--until", 400) as run:
            run.wait_for_step(5)
            wait_until(client.summaries, "the summary of the run")
            (name,) = client.summaries()
            assert name.startswith("default.test~")
            client.summary(name, lambda summary: summary["state"] == "Running")
            assert client.get("/jobs/test")["latest"]["step"] >= 5
            assert run.wait_for_exit() == 0
        # Its service has ended with it.
        ended = client.summary(name, lambda summary: summary["run"]["ended_at"] is not None)
        assert ended["state"] == "Stopped"
        assert ended["run"]["folder"] == str(state)
        assert ended["run"]["ended_at"] >= ended["run"]["began_at"]
        assert "torch" in ended["run"]["versions"]
        assert client.get("/jobs/test/gain")["progress"] >= 400
        assert "text" in client.get("/jobs/test/logs/0")
    shown = call(environ, "gain", "test", "--state-dir", state)
    assert shown.returncode == 0, shown.stderr
    assert "progress" in shown.stdout
    explained = call(environ, "explain", "test", "--state-dir", state)
    assert explained.returncode == 0, explained.stderr


def test_commands_whose_port_is_taken_end_with_a_message(tmp_path: Path) -> None:
    job = write_light_job(tmp_path / "job.yaml", "sleep")
    environ = {"XDG_STATE_HOME": str(tmp_path / "home")}
    with page(environ) as client:
        for command in (("run", job, "--state-dir", tmp_path / "state"), ("ui",)):
            refused = adascale_in_process(
                *command, "--port", client.port, cwd=tmp_path, XDG_STATE_HOME=environ["XDG_STATE_HOME"]
            )
            assert refused.returncode == 2
            assert f"cannot listen on port {client.port}: address already in use" in refused.stderr
    listed = adascale_in_process("list", "--state-dir", tmp_path)
    assert listed.stdout == "", "the run has not begun"
