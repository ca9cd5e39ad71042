"""The replicas of a run: starts missing agents, stops agents that are not needed, handles their exits.

An agent restarts its trainer by itself; here only the exit of an agent matters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from adascale_controller.job.failures import End, Failures, find_end, restart_pause
from adascale_controller.job.placement_backoff import startable
from adascale_controller.job.reasons import Reason
from adascale_controller.local.display import Display
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.machine import ADDRESS, gpu_environment
from adascale_controller.local.processes import ChildProcess, TrainerMessages, tail
from adascale_controller.local.state_dir import StateDir
from adascale_controller.schedule.memory import JobMemory
from adascale_controller.schema import JobDefinition
from adascale_core import names
from adascale_core.failures import (
    ExitClass,
    FailureCount,
    ProgramFailure,
    classify_exit,
    describe_end,
    describe_exit,
)
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.views.jobs import JobView

STOP_TIMEOUT = 20.0
"""Seconds that agents have to save and exit before they are killed."""


RESTART_DELAY = 0.5
"""Seconds before an agent that was lost is restarted."""
PAUSES = 1.0, 30.0
"""Seconds before the program is restarted after the first failure, and at most."""
IN_GENERATION = frozenset({ReplicaState.RUNNING, ReplicaState.HOLDING})
"""The states of replicas that have joined a generation."""


@dataclass(frozen=True)
class AgentExit:
    """The exit of an agent."""

    rank: int  # the index of its replica
    code: int  # negative for a signal
    requested: bool


class Agents:
    """Starts and stops agents."""

    def __init__(
        self,
        command: LocalCommand,
        environ: Mapping[str, str],
        devices: Sequence[str],  # one GPU for each process of each replica; empty to train on the CPU
        folder: StateDir,
        lock: int,  # the descriptor of the folder's lock, which the agents inherit
    ) -> None:
        self._command = command
        self._environ = {**command.environ, **environ, names.ENV_ADDRESS: ADDRESS}
        self._devices = devices
        self._folder = folder
        self._lock = lock
        self._processes: dict[int, ChildProcess] = {}
        self.messages = TrainerMessages()
        """What the trainers report to their user."""
        self._stopping: set[int] = set()

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks whose agents run, or whose exits have not been collected."""
        return frozenset(self._processes)

    def start(self, rank: int) -> None:
        """Start the agent of `rank`."""
        environ = {**self._environ, names.ENV_REPLICA: str(rank)}
        if self._devices:
            count = int(self._environ.get(names.ENV_PROCESSES_PER_REPLICA, "1"))
            own = self._devices[rank * count : (rank + 1) * count]
            environ |= gpu_environment(environ, ",".join(own))
        # -P: a file in the user's folder must not shadow a library.
        command = [sys.executable, "-P", "-m", "adascale_worker.agent", "--", *self._command.command]
        log = self._folder.replica_log(rank).absolute()
        self.messages.follow(log)
        self._processes[rank] = ChildProcess(command, environ, log, [self._lock], self._command.cwd)

    def request_stop(self, rank: int) -> None:
        """Request the agent of `rank` to save and exit."""
        if rank in self._processes and rank not in self._stopping:
            self._stopping.add(rank)
            self._processes[rank].terminate()

    def collect_exits(self) -> list[AgentExit]:
        """Return the exits since the last call, by rank."""
        exits = []
        for rank, process in sorted(self._processes.items()):
            code = process.exit_code
            if code is not None:
                exits.append(AgentExit(rank, code, rank in self._stopping))
                del self._processes[rank]
                self._stopping.discard(rank)
        return exits

    def log_tail(self, rank: int, lines: int = 20) -> str:
        """Return the last lines of the replica's log."""
        return tail(self._folder.replica_log(rank), lines)

    def stop_all(self, kill_now: Callable[[], bool], while_waiting: Callable[[], None]) -> list[AgentExit]:
        """Request all agents to save and exit, and wait. Returns the exits of those that were killed."""
        for rank in self.ranks:
            self.request_stop(rank)
        deadline = time.monotonic() + STOP_TIMEOUT
        while True:
            self.collect_exits()
            if not self._processes:
                return []
            if kill_now() or time.monotonic() > deadline:
                return self._kill_all()
            while_waiting()
            time.sleep(0.05)

    def _kill_all(self) -> list[AgentExit]:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(STOP_TIMEOUT)
        return self.collect_exits()


@dataclass(frozen=True)
class RunResult:
    """Why a run ends."""

    message: str  # for the user; empty if the program has finished
    exit_code: int
    finished: bool = False
    end: End | None = None  # why the job has failed for good; None if it has not
    log: str = ""  # the last lines of the program's output, if it failed
    latest: GainReport | None = None  # the last report; None if there is none
    comparison: str = ""  # what it has taken beside one replica; empty if that can't be estimated
    stopped_at: float = 0.0  # when the replicas were requested to save and to stop, in seconds since 1970

    @property
    def reason(self) -> str:
        """Why the run has failed; empty if it has not. An exit code above 128 is that of a signal."""
        if self.end is not None:
            return f"{self.end.reason}: {self.message}"
        return self.message if 0 < self.exit_code <= 128 else ""


class Replicas:
    """The replicas of a run."""

    def __init__(self, agents: Agents, job: JobDefinition, display: Display) -> None:
        self.agents = agents
        self.memory = JobMemory()
        """What is remembered of the job for the decisions about it."""
        self._job = job
        self._display = display
        self._started_at = time.monotonic()
        self._counted = FailureCount()
        self._seen: list[ProgramFailure] = []
        self._exits: list[AgentExit] = []
        self.finished = False  # whether the program has finished: an agent exits with 0 only then
        self._restart_at: dict[int, float] = {}
        self._failed_checks: dict[int, tuple[int, str]] = {}
        """Replica -> how often it has failed its check in a row, and how."""
        self._restarts_before = 0

    def begin(self, view: JobView) -> None:
        """Begin to count restarts without progress. Restarts of an earlier run do not count."""
        self._restarts_before = view.restarts_without_progress

    def collect_exits(self) -> None:
        """Collect the exits that `handle_exits` handles.

        Call it before reading the view for `handle_exits`: the view then has the last registrations of these
        agents.
        """
        self._exits += self.agents.collect_exits()

    def handle_exits(self, view: JobView, now: float) -> RunResult | None:
        """Record finished replicas, schedule restarts, count failures. Returns the job's end, if any."""
        self.memory.failing_counts.update(view)
        for joined in (each.replica for each in view.replicas if each.state in IN_GENERATION):
            self._failed_checks.pop(joined, None)
        exits, self._exits = self._exits, []
        for agent_exit in exits:
            exit_class = classify_exit(agent_exit.code)
            if exit_class is ExitClass.FINISHED:
                self.finished = self.finished or view.complete or not agent_exit.requested
            elif agent_exit.requested:
                continue
            elif view.complete or self.finished:
                self._display.message(
                    f"Replica {agent_exit.rank} failed after the program had finished "
                    f"({describe_exit(agent_exit.code)})",
                    "yellow",
                )
            elif exit_class.is_failure:
                self._record_failure(agent_exit, view, now)
            else:
                self._schedule_restart(agent_exit, exit_class, now)
        if view.complete or self.finished:
            return None
        self._observe_placement(view, now)
        return self._count_failures(view, now)

    def start_and_stop(self, view: JobView, now: float) -> None:
        """Start missing agents, and stop agents that the allocation does not need."""
        if view.desired is None:
            return
        if view.complete or self.finished:
            self._stop_idle(view, from_rank=0)
            return
        for rank in view.desired.indices:
            if rank not in self.agents.ranks and now >= self._restart_at.get(rank, 0.0):
                self.agents.start(rank)
        if view.active is not None and view.active.generation == view.generation:
            self._stop_idle(view, from_rank=view.desired.indices.stop)

    def _stop_idle(self, view: JobView, from_rank: int) -> None:
        """Stop agents whose trainer is in no generation; no later generation has a place for them."""
        for rank in self.agents.ranks:
            replica = view.replica(rank)
            in_generation = replica is not None and replica.state in IN_GENERATION
            if rank >= from_rank and not in_generation:
                self.agents.request_stop(rank)

    def _schedule_restart(self, agent_exit: AgentExit, exit_class: ExitClass, now: float) -> None:
        rank, delay, said = agent_exit.rank, RESTART_DELAY, ""
        if exit_class in {ExitClass.REFUSED, ExitClass.CHECK_FAILED}:
            said = self.agents.log_tail(rank, 1)
        if exit_class is ExitClass.CHECK_FAILED:
            failures = self._failed_checks.get(rank, (0, ""))[0] + 1
            self._failed_checks[rank] = failures, said
            delay = restart_pause(failures, *PAUSES)
        reason = describe_end(agent_exit.code, said)
        when = f" in {delay:.0f} s" if delay >= 1 else ""
        self._display.message(f"The agent of replica {rank} {reason}; restarting it{when}", "yellow")
        self._restart_at[rank] = now + delay

    def _observe_placement(self, view: JobView, now: float) -> None:
        """Give a count up for a pause if a replica that it needs fails its check for long."""
        current = view.desired
        if current is None or not current.replicas:
            return
        failing = [rank for rank in current.indices if rank in self._failed_checks]
        problem = None
        if len(failing) > current.spares:
            problem = Reason.REPLICA_CHECK_FAILED, self._failed_checks[failing[-1]][1]
        placed = startable(set(current.indices).difference(failing), current.spares)
        self.memory.observe_placement(self._job.declaration, view, current, placed, problem, lambda: 0, now)

    def _record_failure(self, agent_exit: AgentExit, view: JobView, now: float) -> None:
        """Record that the program has failed on a replica, and when to restart it."""
        rank, replica = agent_exit.rank, view.replica(agent_exit.rank)
        failed = replica if replica is not None and replica.state is ReplicaState.FAILED else None
        log = (failed and failed.log) or self.agents.log_tail(rank)
        failure = ProgramFailure(rank, failed.generation if failed else 0, agent_exit.code, log)
        self._seen.append(failure)
        if failed is not None and classify_exit(failure.exit_code) is not ExitClass.INVALID_PROGRAM:
            self.memory.failing_counts.fail(failure, view)
        failures = sum(each.replica == rank for each in self._seen)
        self._restart_at[rank] = now + restart_pause(failures, *PAUSES)

    def _count_failures(self, view: JobView, now: float) -> RunResult | None:
        """Count the failures, show a new one, and return the end of the job, if any."""
        desired, before = view.desired, self._counted
        spares = desired.spares if desired is not None else 0  # fewer than in the job, where it has a limit
        failures = Failures(before, self._seen, view, desired, spares)
        self._counted = failures.count
        # The service's count begins again at 0 after a step.
        self._restarts_before = min(self._restarts_before, view.restarts_without_progress)
        end = find_end(self._job, failures, self._started_at, now, restarts_before=self._restarts_before)
        if end is None:
            if self._counted.count > before.count:
                self._display.message(failures.describe(self._job.spec.backoff_limit), "yellow")
            return None
        log = "\n".join(end.failure.splitlines()[1:])
        if end.reason is Reason.NO_PROGRESS:
            lost = (each.replica for each in view.replicas if each.exit_code is not None)
            log = self.agents.log_tail(next(lost, 0))
        return RunResult(end.summary, 1, end=end, log=log)


def output_text(log: str) -> Text:
    """Return the last lines of a program's output, as they are displayed after a failure."""
    return Text(f"\nThe last lines of its output:\n{log}\n", "dim")
