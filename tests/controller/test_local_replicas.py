"""What it means for a local run that an agent has ended."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from adascale_controller.local.agents import Agents
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.replicas import JobFailure, Replicas, restart_delay
from adascale_controller.local.state_dir import Lock, StateDir
from adascale_core import names
from adascale_core.messages import Allocation
from adascale_core.views import JobView

VIEW = replace(JobView.empty("default.digits"), desired=Allocation(1, 1))


class Run:
    """The replicas of a run with `backoff_limit` 0, whose service is not there."""

    def __init__(self, path: Path) -> None:
        folder = StateDir(path)
        folder.create()
        environ = {
            **os.environ,
            names.ENV_API_URL: "http://127.0.0.1:9",
            names.ENV_JOB_ID: "default.digits",
            names.ENV_SERVICE_TIMEOUT: "0.1",
        }
        self._lock = Lock(folder, lambda _: None)
        self._agents = Agents(
            LocalCommand((sys.executable, "-c", "pass"), {}, path), environ, [], folder, self._lock.descriptor
        )
        self._output = io.StringIO()
        self._replicas = Replicas(self._agents, 0, PlainDisplay(Console(file=self._output, width=200)))

    def until_the_agent_has_ended(self) -> JobFailure | None:
        """Start the replica and return what its end means."""
        self._replicas.staff(VIEW, time.monotonic())
        give_up = time.monotonic() + 30
        while not self._replicas.all_gone:
            assert time.monotonic() < give_up
            self._replicas.collect()
            time.sleep(0.02)
        return self._replicas.mind(VIEW, time.monotonic())

    @property
    def output(self) -> str:
        return self._output.getvalue()

    def close(self) -> None:
        self._agents.kill()
        self._lock.release()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "state")
    yield run
    run.close()


def test_an_agent_that_never_reached_the_service_is_no_failure_of_the_program(run: Run) -> None:
    for _ in range(2):
        assert run.until_the_agent_has_ended() is None
    assert "replica 0 could not reach the metrics service" in run.output
    assert "failure" not in run.output


def test_the_delay_before_a_restart_doubles_with_each_failure_up_to_30_seconds() -> None:
    assert [restart_delay(failures) for failures in range(1, 9)] == [1, 2, 4, 8, 16, 30, 30, 30]
