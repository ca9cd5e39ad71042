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

from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.failed_checks import FIRST_PAUSE, MAX_PAUSE
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.replicas import AgentExit, Agents, Replicas, RunResult, backoff
from adascale_controller.local.state_dir import StateDir, StateLock
from adascale_core import names
from adascale_core.failures import EXIT_CHECK_FAILED, EXIT_REFUSED
from adascale_core.messages.allocation import ActiveAllocation, Allocation, Member
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.views.jobs import JobView, ReplicaView

VIEW = replace(JobView.empty("default.digits"), desired=Allocation(1, 1))
MAX_RESTARTS = 2


class Run:
    """The replicas of a run with backoffLimit 0 and MAX_RESTARTS, whose metrics service does not answer."""

    def __init__(self, path: Path) -> None:
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
        display = PlainDisplay(Console(file=self._output, width=200))
        self._replicas = Replicas(self._agents, 0, MAX_RESTARTS, display)

    def handle_exit(
        self, agent_exit: AgentExit, view: JobView = VIEW, now: float | None = None
    ) -> RunResult | None:
        """Handle the exit of an agent that was started elsewhere."""
        self._replicas.agents.collect_exits = lambda: [agent_exit]  # type: ignore[method-assign]
        self._replicas.collect_exits()
        return self.handle_exits(view, now)

    def limit(self, now: float) -> tuple[int | None, str]:
        return self._replicas.limit(now)

    def begin(self, view: JobView) -> None:
        self._replicas.begin(view)

    def handle_exits(self, view: JobView, now: float | None = None) -> RunResult | None:
        return self._replicas.handle_exits(view, time.monotonic() if now is None else now)

    def start_and_wait_for_exit(self) -> RunResult | None:
        """Start the replica, wait for its exit and return the failure of the job, if it failed."""
        self._replicas.start_and_stop(VIEW, time.monotonic())
        deadline = time.monotonic() + 30
        while not self._replicas.all_exited:
            assert time.monotonic() < deadline
            self._replicas.collect_exits()
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


def growing(count: int, trains: int = 1, spares: int = 0, *, without: int | None = None) -> JobView:
    """A job that trains on the first replicas except one, and of which more are desired."""
    ranks = [rank for rank in range(count) if rank != without][:trains]
    members = tuple(Member(rank, f"agent.{rank}", "127.0.0.1", 1) for rank in ranks)
    replicas = tuple(
        ReplicaView.of(Registration(rank, f"agent.{rank}", ReplicaState.RUNNING, 1, "127.0.0.1", 1), 0.0)
        for rank in ranks
    )
    return replace(
        VIEW,
        desired=Allocation(2, count, spares=spares),
        active=ActiveAllocation(1, trains, members),
        replicas=replicas,
    )


def fails_check(run: Run, rank: int, view: JobView, *times: float) -> None:
    for now in times:
        assert run.handle_exit(AgentExit(rank, EXIT_CHECK_FAILED, requested=False), view, now) is None


def test_a_count_is_given_up_for_longer_and_longer_pauses_if_a_replica_fails_its_check_twice(
    run: Run,
) -> None:
    view = growing(2)
    fails_check(run, 1, view, 0.0)
    assert run.limit(0.0) == (None, "")
    fails_check(run, 1, view, 5.0)
    reason = "replica 1 has failed its check 2 times in a row; it is tried again in 60 s at the earliest"
    assert run.limit(5.0) == run.limit(5.0 + FIRST_PAUSE - 1) == (1, reason)
    now = 5.0 + FIRST_PAUSE
    assert run.limit(now) == (None, "")
    for pause in (120, 240, 480, MAX_PAUSE, MAX_PAUSE):
        fails_check(run, 1, view, now)
        assert run.limit(now + pause - 1)[0] == 1
        now += pause
        assert run.limit(now) == (None, "")


def test_the_failed_checks_of_a_replica_that_has_joined_are_forgotten(run: Run) -> None:
    fails_check(run, 1, growing(2), 0.0, 1.0)
    run.handle_exits(growing(2, trains=2), 2.0)
    assert run.limit(2.0) == (None, "")
    fails_check(run, 1, growing(2), 3.0)
    assert run.limit(3.0) == (None, "")
    assert run.output.count("restarting it in 1 s") == 2
    fails_check(run, 1, growing(2), 4.0)
    assert run.limit(4.0 + FIRST_PAUSE - 1)[0] == 1
    assert run.limit(4.0 + FIRST_PAUSE) == (None, "")


@pytest.mark.parametrize(
    ("failing", "view", "limit"),
    [
        ([1], growing(4), 1),
        ([3], growing(4), 3),
        ([2, 3], growing(4), 2),
        ([3, 2], growing(4), 2),
        # The others train on more replicas than there are below the faulty one.
        ([1], growing(4, trains=2, without=1), 2),
        # A member was lost, and the others wait for it.
        ([1], replace(growing(3, trains=3), broken=True, replicas=()), 1),
        # No count can do without the first replica, and none needs a spare.
        ([0], replace(growing(2), active=None, replicas=()), None),
        ([2], growing(2, trains=2, spares=1), None),
    ],
)
def test_the_count_that_is_given_up_is_the_smallest_that_needs_the_faulty_replica(
    failing: list[int], view: JobView, limit: int | None, run: Run
) -> None:
    for now in (0.0, 1.0):
        for rank in failing:
            fails_check(run, rank, view, now)
    assert run.limit(1.0)[0] == limit


def test_the_run_fails_after_too_many_restarts_without_a_step(run: Run) -> None:
    run.log(0, "Loading the data set\n")
    lost = Registration(0, "agent.4", ReplicaState.LOST, 4, "127.0.0.1", 1, exit_code=-9)
    view = replace(VIEW, replicas=(ReplicaView.of(lost, 0.0),), restarts_without_progress=MAX_RESTARTS)
    assert run.handle_exits(view) is None
    view = replace(view, restarts_without_progress=MAX_RESTARTS + 1)
    assert run.handle_exits(replace(view, complete=True)) is None
    assert run.handle_exits(view) == RunResult(
        "The trainers were lost 3 times without a step in between (killed by SIGKILL): "
        "maxRestartsWithoutProgress (2) exceeded",
        1,
        log="Loading the data set",
    )


def test_restarts_without_a_step_in_an_earlier_run_do_not_count(run: Run) -> None:
    def fails(restarts: int) -> bool:
        return run.handle_exits(replace(VIEW, restarts_without_progress=restarts)) is not None

    before = MAX_RESTARTS + 1
    run.begin(replace(VIEW, restarts_without_progress=before))
    assert [fails(before + more) for more in range(MAX_RESTARTS + 2)] == [False] * (MAX_RESTARTS + 1) + [True]
    # After a step the service counts from 0 again.
    assert [fails(restarts) for restarts in range(MAX_RESTARTS + 2)] == [False] * (MAX_RESTARTS + 1) + [True]


@pytest.mark.parametrize("trained", [True, False])
def test_a_failure_counts_if_the_replica_trained_though_a_spare_has_its_place(
    run: Run, *, trained: bool
) -> None:
    registrations = [
        Registration(rank, f"agent{rank}.1", ReplicaState.RUNNING, 2, "127.0.0.1", 1) for rank in (0, 2)
    ]
    members = tuple(Member(each.replica, each.instance, each.address, each.port) for each in registrations)
    failed = Registration(1, "agent1.1", ReplicaState.FAILED, int(trained), "127.0.0.1", 1, exit_code=3)
    view = replace(
        VIEW,
        desired=Allocation(1, 2, spares=1),
        active=ActiveAllocation(2, 2, members),
        replicas=tuple(ReplicaView.of(each, 0.0) for each in (*registrations, failed)),
    )
    failure = run.handle_exit(AgentExit(1, 3, requested=False), view)
    assert (failure is not None) == trained
    assert ("failed on the spare replica 1" in run.output) != trained


def test_the_delay_before_a_restart_doubles_with_each_failure_up_to_30_seconds() -> None:
    assert [backoff(failures) for failures in (*range(1, 8), 5000)] == [1, 2, 4, 8, 16, 30, 30, 30]
