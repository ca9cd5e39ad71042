"""The replicas of a run: started where they are missing, let go where they aren't needed.

An agent looks after its trainer by itself; here it matters only why an agent has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from adascale_controller.formatting import plural
from adascale_controller.local.agents import AgentExit, Agents
from adascale_controller.local.display import Display
from adascale_core.exit_codes import ExitClass, classify_exit, describe_exit
from adascale_core.failure_count import FailureCount
from adascale_core.messages import ReplicaState
from adascale_core.views import JobView

RESTART_PAUSE = 0.5
"""Seconds before an agent that was killed is started again."""
MAX_BACKOFF = 30.0
"""Seconds before the program is started again after a failure, at most."""


def restart_delay(failures: int) -> float:
    """Seconds before the program is started again after failure number `failures`."""
    return min(2.0 ** (failures - 1), MAX_BACKOFF)


@dataclass(frozen=True)
class JobFailure:
    """The program has failed more often than the job puts up with.

    Args:
        words: for the user.
        log: the last lines of the program.
    """

    words: str
    log: str


class Replicas:
    """The agents of a run, and what became of those that have ended.

    Args:
        agents: the processes.
        backoff_limit: how many failures of the program are put up with.
        display: what the user sees.
    """

    def __init__(self, agents: Agents, backoff_limit: int, display: Display) -> None:
        self.agents = agents
        self._backoff_limit = backoff_limit
        self._failures = FailureCount()
        self._display = display
        self._ended: list[AgentExit] = []
        self._finished: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._false_starts: dict[int, int] = {}

    @property
    def finished(self) -> bool:
        """Whether the program has come to its end on rank 0."""
        return 0 in self._finished

    @property
    def all_gone(self) -> bool:
        """Whether no agent is left."""
        return not self.agents.ranks

    def collect(self) -> None:
        """Note which agents have ended. To be called before the view is asked for that `mind` gets."""
        self._ended += self.agents.ended()

    def mind(self, view: JobView, now: float) -> JobFailure | None:
        """Take in what the agents that have ended mean; something only if the job has failed."""
        ended, self._ended = self._ended, []
        for one in ended:
            exit_class = classify_exit(one.code)
            if exit_class is ExitClass.FINISHED:
                told = view.replica(one.rank)
                self._finished[one.rank] = told.generation if told else view.generation
            elif one.dismissed:
                continue
            elif view.complete or self.finished:
                self._display.note(f"Replica {one.rank} ended late: {describe_exit(one.code)}", "yellow")
            elif exit_class.is_failure:
                failed = self._fail(one, view, now)
                if failed is not None:
                    return failed
            else:
                self._replace(one, exit_class, now)
        return None

    def staff(self, view: JobView, now: float) -> None:
        """Start the agents that are missing, and let go of those that aren't needed."""
        if view.desired is None:
            return
        if view.complete:
            self._let_go(view, from_rank=0)
            return
        for rank in range(view.desired.replicas):
            over = self._finished.get(rank, -1) >= view.generation
            if over or rank in self.agents.ranks or now < self._not_before.get(rank, 0.0):
                continue
            self._finished.pop(rank, None)
            self.agents.start(rank)
        if view.active is not None and view.active.generation == view.generation:
            self._let_go(view, from_rank=view.desired.replicas)

    def _let_go(self, view: JobView, from_rank: int) -> None:
        """Dismiss the agents whose trainers have left: they would wait for a generation that won't come."""
        for rank in self.agents.ranks:
            told = view.replica(rank)
            if rank >= from_rank and (told is None or told.state is not ReplicaState.RUNNING):
                self.agents.dismiss(rank)

    def _replace(self, ended: AgentExit, exit_class: ExitClass, now: float) -> None:
        match exit_class:
            case ExitClass.REENTRY:
                why = "has left"
            case ExitClass.SERVICE_UNAVAILABLE:
                why = "could not reach the metrics service"
            case _:
                why = f"is gone ({describe_exit(ended.code)})"
        self._display.note(f"The agent of replica {ended.rank} {why}; starting it again", "yellow")
        self._not_before[ended.rank] = now + RESTART_PAUSE

    def _fail(self, ended: AgentExit, view: JobView, now: float) -> JobFailure | None:
        """Count a failure of the program: once for a generation, whichever replicas tell of it."""
        told = view.replica(ended.rank)
        failed = told if told is not None and told.state is ReplicaState.FAILED else None
        before = self._failures
        if failed is not None and failed.generation > 0:
            self._failures = before.with_generations([failed.generation])
        else:
            self._false_starts[ended.rank] = self._false_starts.get(ended.rank, 0) + 1
            self._failures = before.with_false_starts(self._false_starts.values())
        pause = restart_delay(self._failures.count)
        self._not_before[ended.rank] = now + pause
        if self._failures.count == before.count:
            return None
        what = f"The program failed on replica {ended.rank} ({describe_exit(ended.code)})"
        limit = self._backoff_limit
        if self._failures.exceeds(limit):
            log = (failed and failed.log) or self.agents.last_lines(ended.rank)
            return JobFailure(
                f"{what}: {plural(self._failures.count, 'failure')}, backoffLimit is {limit}", log
            )
        self._display.note(
            f"{what}: failure {self._failures.count}, backoffLimit is {limit}; trying again in {pause:.0f} s",
            "yellow",
        )
        return None
