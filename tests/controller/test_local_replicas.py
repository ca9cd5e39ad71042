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

from adascale_controller.job.failures import restart_pause
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.replicas import PAUSES, AgentExit, Agents, Replicas, RunResult
from adascale_controller.local.state_dir import StateDir, StateLock
from adascale_controller.schema import JobDefinition
from adascale_core import names
from adascale_core.failures import EXIT_CHECK_FAILED, EXIT_REFUSED
from adascale_core.messages.allocation import Allocation
from adascale_core.views.jobs import JobView
from support.definitions import define
from support.observed_jobs import SPEC

VIEW = replace(JobView.empty("default.digits"), desired=Allocation(1, 1))
MAX_RESTARTS = 2
JOB = define("default.digits", SPEC, backoff_limit=0, max_restarts_without_progress=MAX_RESTARTS)


class Run:
    """The replicas of a run whose metrics service does not answer."""

    def __init__(self, path: Path, job: JobDefinition = JOB) -> None:
        self._folder = folder = StateDir(path)
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
        self.display = PlainDisplay(Console(file=self._output, width=200))
        self.replicas = Replicas(self._agents, job, self.display)

    def collect(self, agent_exit: AgentExit) -> None:
        """Have this exit be collected next, of an agent that was started elsewhere."""
        self._agents.collect_exits = lambda: [agent_exit]  # type: ignore[method-assign]

    def handle_exit(
        self, agent_exit: AgentExit, view: JobView = VIEW, now: float | None = None
    ) -> RunResult | None:
        """Handle the exit of an agent that was started elsewhere."""
        self.collect(agent_exit)
        self.replicas.collect_exits()
        return self.handle_exits(view, now)

    def begin(self, view: JobView) -> None:
        self.replicas.begin(view)

    def handle_exits(self, view: JobView, now: float | None = None) -> RunResult | None:
        return self.replicas.handle_exits(view, time.monotonic() if now is None else now)

    def start_and_wait_for_exit(self) -> RunResult | None:
        """Start the replica, wait for its exit and return the failure of the job, if it failed."""
        self.replicas.start_and_stop(VIEW, time.monotonic())
        deadline = time.monotonic() + 30
        while self.replicas.agents.ranks:
            assert time.monotonic() < deadline
            self.replicas.collect_exits()
            time.sleep(0.02)
        return self.handle_exits(VIEW)

    def log(self, rank: int, text: str) -> None:
        """Write the output of a replica."""
        self._folder.replica_log(rank).write_text(text)

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


def test_an_agent_of_another_version_is_no_failure_of_the_program(run: Run) -> None:
    """The package was replaced while the run trains."""
    run.log(0, "adascale-agent: replica 0 has adascale 9.9, but replica 1, which trains, has 0.1.0\n")
    assert run.handle_exit(AgentExit(0, EXIT_REFUSED, requested=False)) is None
    assert "was refused (adascale-agent: replica 0 has adascale 9.9, but replica 1" in run.output
    assert "failure" not in run.output


def test_a_replica_that_fails_its_check_is_tried_again_after_longer_and_longer_pauses(run: Run) -> None:
    run.log(0, "adascale-agent: replica 0 on node n does not join: device cpu has failed its check: nan\n")
    for _ in range(3):
        assert run.handle_exit(AgentExit(0, EXIT_CHECK_FAILED, requested=False)) is None
    assert "has failed its check (adascale-agent: replica 0 on node n does not join: device" in run.output
    assert [f"restarting it in {pause} s" in run.output for pause in (1, 2, 4, 8)] == [True] * 3 + [False]
    assert "failure" not in run.output


def test_restarts_without_a_step_in_an_earlier_run_do_not_count(run: Run) -> None:
    def fails(restarts: int) -> bool:
        return run.handle_exits(replace(VIEW, restarts_without_progress=restarts)) is not None

    before = MAX_RESTARTS + 1
    run.begin(replace(VIEW, restarts_without_progress=before))
    assert [fails(before + more) for more in range(MAX_RESTARTS + 2)] == [False] * (MAX_RESTARTS + 1) + [True]
    # After a step the service counts from 0 again.
    assert [fails(restarts) for restarts in range(MAX_RESTARTS + 2)] == [False] * (MAX_RESTARTS + 1) + [True]


def test_the_delay_before_a_restart_doubles_with_each_failure_up_to_30_seconds() -> None:
    pauses = [restart_pause(failures, *PAUSES) for failures in (*range(1, 8), 5000)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
