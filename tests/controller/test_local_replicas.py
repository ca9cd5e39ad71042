"""The effect of an agent's exit on a local run."""

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
from adascale_controller.local.replicas import JobFailure, Replicas, backoff
from adascale_controller.local.state_dir import StateDir
from adascale_controller.local.state_lock import StateLock
from adascale_core import names
from adascale_core.messages import Allocation
from adascale_core.views import JobView

VIEW = replace(JobView.empty("default.digits"), desired=Allocation(1, 1))


class Run:
    """The replicas of a run with backoffLimit 0, whose metrics service does not answer."""

    def __init__(self, path: Path) -> None:
        folder = StateDir(path)
        folder.create()
        environ = {
            **os.environ,
            names.ENV_API_URL: "http://127.0.0.1:9",
            names.ENV_JOB_ID: "default.digits",
            names.ENV_SERVICE_TIMEOUT: "0.1",
        }
        self._lock = StateLock(folder, lambda _: None)
        self._agents = Agents(
            LocalCommand((sys.executable, "-c", "pass"), {}, path), environ, [], folder, self._lock.descriptor
        )
        self._output = io.StringIO()
        self._replicas = Replicas(self._agents, 0, 10, PlainDisplay(Console(file=self._output, width=200)))

    def start_and_wait_for_exit(self) -> JobFailure | None:
        """Start the replica, wait for its exit and return the failure of the job, if it failed."""
        self._replicas.start_and_stop(VIEW, time.monotonic())
        deadline = time.monotonic() + 30
        while not self._replicas.all_exited:
            assert time.monotonic() < deadline
            self._replicas.collect_exits()
            time.sleep(0.02)
        return self._replicas.handle_exits(VIEW, time.monotonic())

    @property
    def output(self) -> str:
        return self._output.getvalue()

    def close(self) -> None:
        self._agents.stop_all(lambda: True, lambda: None)
        self._lock.release()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "state")
    yield run
    run.close()


def test_an_agent_that_cannot_reach_the_service_is_no_failure_of_the_program(run: Run) -> None:
    for _ in range(2):
        assert run.start_and_wait_for_exit() is None
    assert "replica 0 could not reach the metrics service" in run.output
    assert "failure" not in run.output


def test_the_delay_before_a_restart_doubles_with_each_failure_up_to_30_seconds() -> None:
    assert [backoff(failures) for failures in range(1, 9)] == [1, 2, 4, 8, 16, 30, 30, 30]
