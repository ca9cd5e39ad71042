"""The replicas of a run: starts missing agents, stops agents that are not needed, handles their exits.

An agent restarts its trainer by itself; here only the exit of an agent matters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from adascale_controller.formatting import plural
from adascale_controller.job.failing_counts import FailingCounts
from adascale_controller.local.display import Display
from adascale_controller.local.failed_checks import IN_GENERATION, FailedChecks
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.machine import ADDRESS, gpu_environment
from adascale_controller.local.processes import ChildProcess, TrainerMessages, tail
from adascale_controller.local.state_dir import StateDir
from adascale_core import names
from adascale_core.failures import (
    ExitClass,
    FailureCount,
    ProgramFailure,
    classify_exit,
    describe_exit,
    failure_cause,
    is_permanent,
    repeats_early_failure,
)
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.views.jobs import JobView, ReplicaView

STOP_TIMEOUT = 20.0
"""Seconds that agents have to save and exit before they are killed."""


RESTART_DELAY = 0.5
"""Seconds before an agent that was lost is restarted."""
MAX_BACKOFF = 30.0
"""Seconds before the program is restarted after a failure, at most."""


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


def backoff(failures: int) -> float:
    """Return the seconds before the program is restarted after failure number `failures`: 1, 2, 4, ..."""
    # The exponent is bounded, because floats overflow.
    return min(2.0 ** min(failures - 1, 30), MAX_BACKOFF)


@dataclass(frozen=True)
class RunResult:
    """Why a run ends."""

    message: str  # for the user; empty if the program has finished
    exit_code: int
    finished: bool = False
    log: str = ""  # the last lines of the program's output, if it failed
    permanent: bool = False  # whether it would fail again, so that the program or the job must be changed
    latest: GainReport | None = None  # the last report; None if there is none
    stopped_at: float = 0.0  # when the replicas were requested to save and to stop, in seconds since 1970

    @property
    def reason(self) -> str:
        """Why the run has failed; empty if it has not. An exit code above 128 is that of a signal."""
        return (failure_cause(self.log) or self.message) if 0 < self.exit_code <= 128 else ""


class Replicas:
    """The replicas of a run."""

    def __init__(
        self, agents: Agents, backoff_limit: int, max_restarts_without_progress: int, display: Display
    ) -> None:
        self.agents = agents
        self.failing_counts = FailingCounts()
        """The replica counts on which the program fails at once."""
        self._backoff_limit = backoff_limit
        self._max_restarts_without_progress = max_restarts_without_progress
        self._failures = FailureCount()
        self._false_starts: dict[int, int] = {}
        self._false_starts_of_spares: dict[int, int] = {}
        self._program_failures: list[ProgramFailure] = []
        self._display = display
        self._exits: list[AgentExit] = []
        self._finished = False
        self._restart_at: dict[int, float] = {}
        self._failed_checks = FailedChecks()
        self._restarts_before = 0

    @property
    def finished(self) -> bool:
        """Whether the program has finished: an agent exits with 0 only then."""
        return self._finished

    @property
    def all_exited(self) -> bool:
        """Whether no agent runs."""
        return not self.agents.ranks

    def limit(self, now: float) -> tuple[int | None, str]:
        """Return the largest count that may be used, and why; None and an empty text if any may be."""
        given_up = [
            each for each in (self.failing_counts.given_up, self._failed_checks.given_up(now)) if each
        ]
        lowest = min(given_up, key=lambda each: each.limit, default=None)
        return (None, "") if lowest is None else (lowest.limit, str(lowest))

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
        """Record finished replicas, schedule restarts, count failures. Returns the job's failure, if any."""
        self.failing_counts.update(view)
        self._failed_checks.update(view)
        exits, self._exits = self._exits, []
        for agent_exit in exits:
            exit_class = classify_exit(agent_exit.code)
            if exit_class is ExitClass.FINISHED:
                self._finished = self._finished or view.complete or not agent_exit.requested
            elif agent_exit.requested:
                continue
            elif view.complete or self.finished:
                self._display.message(
                    f"Replica {agent_exit.rank} failed after the program had finished "
                    f"({describe_exit(agent_exit.code)})",
                    "yellow",
                )
            elif exit_class.is_failure and _is_untrained_spare(view, agent_exit.rank):
                self._restart_spare(agent_exit, now)
            elif exit_class.is_failure:
                failure = self._count_failure(agent_exit, view, now)
                if failure is not None:
                    return failure
            else:
                self._schedule_restart(agent_exit, exit_class, view, now)
        return self._lack_of_progress(view)

    def start_and_stop(self, view: JobView, now: float) -> None:
        """Start missing agents, and stop agents that the allocation does not need."""
        if view.desired is None:
            return
        if view.complete or self._finished:
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

    def _lack_of_progress(self, view: JobView) -> RunResult | None:
        """Return the failure of a job whose trainers are lost again and again before any step."""
        # The service's count begins again at 0 after a step.
        self._restarts_before = min(self._restarts_before, view.restarts_without_progress)
        restarts = view.restarts_without_progress - self._restarts_before
        limit = self._max_restarts_without_progress
        if restarts <= limit or view.complete or self._finished:
            return None
        lost = [replica for replica in view.replicas if replica.exit_code is not None]
        ends = sorted({describe_exit(replica.exit_code) for replica in lost if replica.exit_code is not None})
        how = f" ({', '.join(ends)})" if ends else ""
        return RunResult(
            f"The trainers were lost {plural(restarts, 'time')} without a step in between{how}: "
            f"maxRestartsWithoutProgress ({limit}) exceeded",
            1,
            log=self.agents.log_tail(lost[0].replica if lost else 0),
        )

    def _schedule_restart(
        self, agent_exit: AgentExit, exit_class: ExitClass, view: JobView, now: float
    ) -> None:
        rank, delay = agent_exit.rank, RESTART_DELAY
        match exit_class:
            case ExitClass.REENTRY:
                reason = "exited"
            case ExitClass.SERVICE_UNAVAILABLE:
                reason = "could not reach the metrics service"
            case ExitClass.REFUSED:
                reason = f"was refused ({self.agents.log_tail(rank, 1)})"
            case ExitClass.CHECK_FAILED:
                reason = f"has failed its check ({self.agents.log_tail(rank, 1)})"
                delay = backoff(self._failed_checks.fail(rank, view, now))
            case _:
                reason = f"was lost ({describe_exit(agent_exit.code)})"
        when = f" in {delay:.0f} s" if delay >= 1 else ""
        self._display.message(f"The agent of replica {rank} {reason}; restarting it{when}", "yellow")
        self._restart_at[rank] = now + delay

    def _restart_spare(self, agent_exit: AgentExit, now: float) -> None:
        """Restart a spare whose program has failed. The others train without it, so that is no failure."""
        rank = agent_exit.rank
        self._false_starts_of_spares[rank] = self._false_starts_of_spares.get(rank, 0) + 1
        delay = backoff(self._false_starts_of_spares[rank])
        self._restart_at[rank] = now + delay
        self._display.message(
            f"The program failed on the spare replica {rank} ({describe_exit(agent_exit.code)}); the others "
            f"train; restarting it in {delay:.0f} s",
            "yellow",
        )

    def _count_failure(self, agent_exit: AgentExit, view: JobView, now: float) -> RunResult | None:
        """Count a failure of the program, once per generation, however many of its replicas fail."""
        rank = agent_exit.rank
        failed = _failed_registration(view, rank)
        before = self._failures
        if failed is not None and failed.generation > 0:
            self._failures = before.with_generations([failed.generation])
        else:
            self._false_starts[rank] = self._false_starts.get(rank, 0) + 1
            self._failures = before.with_false_starts(self._false_starts.values())
        log = (failed and failed.log) or self.agents.log_tail(rank)
        generation = failed.generation if failed is not None else 0
        self._program_failures.append(ProgramFailure(rank, generation, agent_exit.code, log))
        count, limit, delay = self._failures.count, self._backoff_limit, backoff(self._failures.count)
        self._restart_at[rank] = now + delay
        if count == before.count:
            return None
        message = f"The program failed on replica {rank} ({describe_exit(agent_exit.code)})"
        exit_class = classify_exit(agent_exit.code)
        measured = {step_time.replicas for step_time in view.step_times}
        given_up = None
        if failed is not None and exit_class is not ExitClass.INVALID_PROGRAM:
            failure = f"replica {rank}: {describe_exit(agent_exit.code)}"
            single = exit_class is ExitClass.SINGLE_REPLICA_PROGRAM
            given_up = self.failing_counts.fail(failed.generation, view, failure, at_once=single)
        if is_permanent(exit_class, measured):
            return RunResult(
                f"{message}; it is not restarted, because it would fail again", 1, log=log, permanent=True
            )
        if self._failures.exceeds(limit):
            failures = f"{plural(count, 'failure')} exceed{'s' if count == 1 else ''}"
            return RunResult(f"{message}: {failures} backoffLimit ({limit})", 1, log=log)
        if given_up is not None:
            fewer = plural(given_up.limit, "replica")
            self._display.message(f"{message}. T{str(given_up)[1:]}; continuing on {fewer} at most", "yellow")
            if log:
                self._display.print(output_text(log))
            return None
        latest = view.latest.generation if view.latest is not None else 0
        replicas = view.desired.replicas if view.desired is not None else None
        if repeats_early_failure(self._program_failures, latest, replicas, measured):
            return RunResult(f"{message}, twice in the same way before its first step", 1, log=log)
        self._display.message(
            f"{message}: failure {count}, backoffLimit is {limit}; restarting in {delay:.0f} s", "yellow"
        )
        if count == 1 and log:
            self._display.print(output_text(log))
        return None


def _failed_registration(view: JobView, rank: int) -> ReplicaView | None:
    """Return the registration of a replica whose program has failed; None if none has arrived."""
    replica = view.replica(rank)
    return replica if replica is not None and replica.state is ReplicaState.FAILED else None


def _is_untrained_spare(view: JobView, rank: int) -> bool:
    """Whether a replica has failed as a spare, before it trained.

    A replica that trained also looks like a spare as soon as a spare has taken its place.
    """
    failed = _failed_registration(view, rank)
    return view.is_spare(rank) and (failed is None or failed.generation == 0)


def output_text(log: str) -> Text:
    """Return the last lines of a program's output, as they are displayed after a failure."""
    return Text(f"\nThe last lines of its output:\n{log}\n", "dim")
