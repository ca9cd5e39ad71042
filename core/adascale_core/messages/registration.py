"""What an agent registers about its replica, and how frequently agents and trainers send requests.

The metrics service computes the intervals from the number of replicas, so that all requests together stay
within what it can answer, and returns them in its answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from adascale_core.messages import Message
from adascale_core.messages.replica_seconds import ReplicaSeconds
from adascale_core.names import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, REPORT_INTERVAL


class ReplicaState(StrEnum):
    """The state of a replica, as its agent registers it."""

    WAITING = "waiting"
    """Its trainer is ready for its first generation."""
    RUNNING = "running"
    """Its trainer runs in the registered generation."""
    HOLDING = "holding"
    """The registered generation has ended for its trainer, by the loss of a member. It waits for the next."""
    REENTERING = "reentering"
    """Its trainer was released from the generation and has exited. The agent starts another trainer."""
    LOST = "lost"
    """Its trainer was killed. The agent starts another trainer."""
    FAILED = "failed"
    """The user's program has failed. The agent exits."""
    TERMINATED = "terminated"
    """The agent was asked to exit, and its trainer has left the generation."""
    FINISHED = "finished"
    """The user's program has finished. The agent exits when rank 0 has finished too."""


def agent_of(instance: str) -> str:
    """Return the agent of a trainer."""
    return instance.rpartition(".")[0] or instance


_SINCE_0_1_0 = ("state_port", "pid")


@dataclass(frozen=True)
class Registration(Message):
    """The state and address of a replica.

    Args:
        replica: index of the replica, from 0.
        instance: distinguishes the trainer process from any other: `<agent>.<number>`, where <agent> is
            random text, and <number> counts the trainers of that agent.
        state: the state of the replica.
        generation: the last generation that its trainer was in, or has held for; 0 if none.
        address: host name or IP address at which the other replicas reach its trainer.
        port: port on which its trainer listens for the other members; 0 before it listens.
        exit_code: exit code of the trainer, -n for signal n; None if it has not ended.
        log: the last lines of the trainer's output; None if it has not failed.
        assigned: the newest generation that its trainer was assigned to, or whose checkpoint it has read if
            that is later; 0 if none.
        step: while it holds: the step of the state in its trainer's memory; None if it has no state.
        lost: while it holds: the indices of the replicas whose loss its trainer has noticed.
        stepped: the newest generation in which its trainer has finished a step; 0 if none.
        rank, replicas: its rank in the generation, and the size of the generation; None before the first.
        version: the version of the package.
        node: the node that it runs on; empty if unknown.
        key: a random secret. The first one that the service gets becomes the job's.
        stall: while no step of its trainer ends: where that is, or that it waits for the others, as in
            `is at train.py, line 41, in load`. Empty while steps end.
        accelerator: the type of accelerator that its trainer computes on: what the operator has chosen, else
            the kind of the device; empty if unknown.
        local_bsz_limit: the largest local batch size that its trainer can still try, because a larger one
            did not fit into memory; None if none has failed in its generation.
        state_port: where its trainer sends its state to replicas that wait; 0 if nowhere.
        pid: the process id of its trainer, in the namespace of its agent; 0 if no trainer runs.
    """

    replica: int
    instance: str
    state: ReplicaState
    generation: int
    address: str
    port: int
    exit_code: int | None = None
    log: str | None = None
    assigned: int = 0
    step: int | None = None
    lost: tuple[int, ...] = ()
    stepped: int = 0
    rank: int | None = None
    replicas: int | None = None
    version: str = ""
    node: str = ""
    key: str = ""
    stall: str = ""
    accelerator: str = ""
    local_bsz_limit: int | None = None
    state_port: int = 0
    pid: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, without what version 0.1.0 refuses if it is 0."""
        return {name: value for name, value in super().to_json().items() if value or name not in _SINCE_0_1_0}

    @property
    def registration(self) -> Registration:
        """The registration alone, of what has more."""
        return Registration(**{each.name: getattr(self, each.name) for each in fields(Registration)})

    @property
    def agent(self) -> str:
        """The agent of its trainer."""
        return agent_of(self.instance)

    @property
    def trainer(self) -> int:
        """The number of its trainer among those of its agent."""
        number = self.instance.rpartition(".")[2]
        return int(number) if number.isdecimal() and number.isascii() else 0

    @property
    def holds(self) -> bool:
        """Whether its trainer has the state of training."""
        return self.state is ReplicaState.RUNNING or (
            self.state is ReplicaState.HOLDING and self.step is not None
        )


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Registration):
    """A registration, which an agent repeats, with the time of its replica.

    Args:
        seconds: the seconds since the agent was started, by `Cause`.
    """

    seconds: ReplicaSeconds = field(default_factory=dict)


HEARTBEATS_PER_SECOND = 400.0
"""Registrations of all agents together that the intervals aim at."""
POSTS_PER_SECOND = 200.0
"""Requests with reports of all trainers together that the intervals aim at."""
MAX_INTERVAL = 60.0
"""Seconds; the intervals grow no further."""
REPORTS_PER_POST = 8
"""Reports that a trainer posts together, when it posts less frequently than it could report."""
MISSED_HEARTBEATS = 3
"""Heartbeats that an agent may miss until its replica is lost, where the interval is long."""
MAX_CHANGE_WAIT = 60.0
"""Seconds for which a request may wait for a change of the generations, at most."""


def heartbeat_interval(replicas: int) -> float:
    """Return the seconds between two heartbeats of an agent, for a number of replicas of all jobs."""
    return min(max(HEARTBEAT_INTERVAL, replicas / HEARTBEATS_PER_SECOND), MAX_INTERVAL)


def heartbeat_timeout(interval: float) -> float:
    """Return the seconds without a heartbeat after which a replica whose agent has this interval is lost."""
    return max(HEARTBEAT_TIMEOUT, (MISSED_HEARTBEATS + 0.5) * interval)


def post_interval(jobs: int) -> float:
    """Return the seconds between two requests with reports of a job, for a number of jobs with replicas."""
    return min(max(REPORT_INTERVAL, jobs / POSTS_PER_SECOND), MAX_INTERVAL)


def report_interval(post_interval: float) -> float:
    """Return the seconds between two reports, at least, of a trainer that posts them at this interval."""
    return post_interval / REPORTS_PER_POST


def change_wait(heartbeat_interval: float, shortest: float) -> float:
    """Return the seconds for which an agent's request waits for a change, `shortest` at least."""
    return min(max(shortest, MISSED_HEARTBEATS * heartbeat_interval), MAX_CHANGE_WAIT)
