"""The generations of a job: the desired allocation, the active one, and its members."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from adascale_core.batch.plans import is_valid_replicas
from adascale_core.messages import Message
from adascale_core.messages.job_spec import JobSpec
from adascale_core.names import HEARTBEAT_INTERVAL, MAX_REPLICAS


@dataclass(frozen=True)
class Allocation(Message):
    """The desired replica count of a job in one generation.

    Args:
        generation: the number of the generation, from 1.
        replicas: the number of replicas that train.
        spares: the number of replicas beyond them that are started and wait, to take the places of lost and
            of slow ones.
        failed: whether the job has failed, and so gets no replicas.
    """

    generation: int
    replicas: int
    spares: int = field(default=0, kw_only=True)
    failed: bool = field(default=False, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, without `spares` if there are none: version 0.1.0 refuses that member."""
        members = super().to_json()
        if not self.spares:
            del members["spares"]
        return members

    @property
    def indices(self) -> range:
        """The indices of the replicas that are started. Without replicas there are no spares."""
        return range(min(self.replicas + self.spares, MAX_REPLICAS) if self.replicas else 0)


@dataclass(frozen=True)
class Member(Message):
    """A replica that takes part in a generation.

    Args:
        replica: index of the replica, from 0.
        instance: distinguishes its trainer process from any other, as in its registration.
        address, port: where its trainer listens for the other members.
        holds: whether its trainer has the state of training when the generation becomes active.
        node: the node that it runs on; empty if unknown.
        state_port: where its trainer sends its state to replicas that wait; 0 if nowhere.
    """

    replica: int
    instance: str
    address: str
    port: int
    holds: bool = False
    node: str = ""
    state_port: int = 0


@dataclass(frozen=True)
class SlowReplacement(Message):
    """A spare that has taken the place of a slow member, in a planned change.

    Args:
        replica: the index of the member that was slow.
        instance: its trainer process.
        node: the node that it runs on; empty if unknown.
        factor: the time in which it computed a step, over that of the others.
        spare: the index of the spare, which is a member now.
    """

    replica: int
    instance: str
    node: str
    factor: float
    spare: int

    def __str__(self) -> str:
        node = f" on node {self.node}" if self.node else ""
        return (
            f"replica {self.replica}{node} was slow, it computed {self.factor:.2f} times as long as the "
            f"others: replica {self.spare}, a spare, trains in its place"
        )


@dataclass(frozen=True)
class ActiveAllocation(Message):
    """An allocation that trainers run in or move to.

    Args:
        generation: the number of the generation, from 1.
        replicas: the number of replicas.
        members: the replicas that take part, in the order of their ranks. Members that hold state come first.
        spec: the bounds with which all its trainers work; None for those in the environment of their agents.
        slow_replacement: the spare that takes the place of a slow member of the generation before; None if
            this generation began for another reason.
    """

    generation: int
    replicas: int
    members: tuple[Member, ...] = ()
    spec: JobSpec | None = None
    slow_replacement: SlowReplacement | None = None

    def with_spec(self, declared: JobSpec | None, before: JobSpec | None) -> ActiveAllocation:
        """Return this allocation with the spec for its trainers, chosen once, when it becomes active.

        Args:
            declared: the job's current spec.
            before: the spec of the last active allocation. It stays if the current spec does not allow this
                replica count: an allowed count follows with a later allocation, and until then no program
                fails.
        """
        fits = declared is not None and is_valid_replicas(declared.bounds, self.replicas)
        return replace(self, spec=declared if fits else before)

    @property
    def indices(self) -> frozenset[int]:
        """The indices of the replicas that take part."""
        return frozenset(member.replica for member in self.members)

    @property
    def has_state(self) -> bool:
        """Whether a member held the state of training when this became active."""
        return any(member.holds for member in self.members)

    def rank_of(self, replica: int, instance: str) -> int | None:
        """Return the rank of a replica's trainer; None if it does not take part."""
        for rank, member in enumerate(self.members):
            if member.replica == replica:
                return rank if member.instance == instance else None
        return None

    def admits(self, replica: int, instance: str) -> bool:
        """Whether the trainer `instance` of `replica` takes part."""
        return self.rank_of(replica, instance) is not None


@dataclass(frozen=True)
class AllocationView(Message):
    """The generations of a job, as agents, trainers and the controller get them.

    Args:
        version: changes whenever another field does. A client waits for a version other than its own.
        desired: the newest allocation; None before the first.
        active: the allocation that trainers run in or move to; None before the first.
        broken: whether the active generation has lost a member, and so has ended.
        complete: whether the program has finished.
    """

    version: int
    desired: Allocation | None
    active: ActiveAllocation | None
    broken: bool
    complete: bool

    def has_ended(self, generation: int) -> bool:
        """Whether `generation` has ended: it is broken, or a newer generation is active."""
        if self.active is None or self.active.generation < generation:
            return False
        return self.broken or self.active.generation > generation


@dataclass(frozen=True)
class MemberView(AllocationView):
    """The answer to a registration.

    Args:
        key: the secret by which the members of the job authenticate each other.
        left_out: whether the trainer was a member and is not any more: it can take part in no generation.
        heartbeat_interval: seconds until the agent's next registration, unless its state changes before.
    """

    key: str = ""
    left_out: bool = False
    heartbeat_interval: float = HEARTBEAT_INTERVAL
