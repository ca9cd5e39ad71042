"""When a generation of replicas becomes active, as a pure state machine.

The controller writes the desired allocation. Agents register what they are doing. When all replicas of the
desired allocation are present, it becomes active, and trainers move to it. A lost replica breaks the active
generation: the same count is then desired again in the next generation, so that its peers can enter that
without waiting for the controller.

Invariants, for any order of events, while the state is not lost:
- The generations of `desired` and `active` never decrease, and `active` is never newer than `desired`.
- An allocation becomes active only when each of its replicas is idle, or runs a generation that has not
  ended and has its next trainer ready if it prepares one. Its generation is newer than any that its
  replicas have been in.
- Only the agents that were present when it became active may enter it, so a replaced agent cannot.
- Each port of rank 0 is assigned to one generation only.

Protocol of an agent: it registers whenever its state changes, and again as a heartbeat. While its trainer
runs and `view.has_ended(own generation)`, it stops the trainer. While it is idle, it enters
`view.next_allocation(own generation)` if that `admits` it. The agent of rank 0 keeps a listening socket for
the next generation. It opens another socket when a trainer has taken this socket over, and when it is idle,
has no generation to enter, and `view.used_port` is its own port: then the port was assigned to a generation
that it has missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from adascale_core.errors import AdaScaleError
from adascale_core.failure_count import FailureCount
from adascale_core.messages import (
    ActiveAllocation,
    Allocation,
    AllocationView,
    JobSpec,
    Registration,
    ReplicaState,
)

IDLE_STATES = frozenset({ReplicaState.WAITING, ReplicaState.REENTERING, ReplicaState.LOST})
"""States of an agent that is ready for the next generation."""

DEPARTED_STATES = frozenset(
    {ReplicaState.REENTERING, ReplicaState.LOST, ReplicaState.FAILED, ReplicaState.TERMINATED}
)
"""States in which the replica has left the generation that its agent names, which is broken by that."""

EXITED_STATES = frozenset({ReplicaState.FAILED, ReplicaState.TERMINATED, ReplicaState.FINISHED})
"""States after which an agent exits and sends no more heartbeats."""

NO_PORT = 0
"""The port of a generation that no replica can enter any more."""

_STATE_ORDER = {
    ReplicaState.WAITING: 0,
    ReplicaState.RUNNING: 1,
    ReplicaState.REENTERING: 2,
    ReplicaState.LOST: 2,
    ReplicaState.FAILED: 3,
    ReplicaState.TERMINATED: 3,
    ReplicaState.FINISHED: 3,
}
"""The order in which an agent goes through the states within one generation."""

_HISTORY_LENGTH = 256
"""How many replaced agents and assigned ports are kept, the latest: enough for delayed messages."""


class StaleAllocationError(AdaScaleError):
    """An allocation whose generation is not newer than the desired generation."""


@dataclass(frozen=True)
class Rendezvous:
    """The generations and replicas of a job.

    Args:
        desired: the newest allocation; None before the first.
        active: the allocation that trainers run in or move to; None before the first.
        broken: whether the active generation has lost a replica.
        replicas: rank -> the last registration, of the replicas whose heartbeats arrive.
        failures: the number of generations in which the user's program failed.
        disruptions: the number of generations that were lost for another reason.
        expired: rank -> the last registration, of the replicas whose heartbeats have expired.
        replaced_agents: instances of agents that another agent of their rank has replaced, the latest last.
            Their registrations are ignored, unless the other agent has expired or exited.
        assigned_ports: (instance, port) pairs that were assigned to a generation, the latest last.
        last_failed: the newest generation that is counted in `failures`; 0 if none is.
        last_disrupted: the newest generation that is counted in `disruptions`; 0 if none is.
    """

    desired: Allocation | None = None
    active: ActiveAllocation | None = None
    broken: bool = False
    replicas: Mapping[int, Registration] = field(default_factory=lambda: MappingProxyType({}))
    failures: int = 0
    disruptions: int = 0
    expired: Mapping[int, Registration] = field(default_factory=lambda: MappingProxyType({}))
    replaced_agents: tuple[str, ...] = ()
    assigned_ports: tuple[tuple[str, int], ...] = ()
    last_failed: int = 0
    last_disrupted: int = 0

    @property
    def complete(self) -> bool:
        """Whether the user's program has finished on rank 0."""
        first = self.replicas.get(0)
        return first is not None and first.state is ReplicaState.FINISHED

    def view(self, version: int) -> AllocationView:
        """Return the view of this state that clients get, as `version`."""
        first = self.replicas.get(0)
        is_used = first is not None and (first.instance, first.port) in self.assigned_ports
        used_port = first.port if first is not None and is_used else NO_PORT
        return AllocationView(version, self.desired, self.active, self.broken, self.complete, used_port)

    def to_json(self) -> dict[str, Any]:
        """Return the members of the state's JSON object."""
        return {
            "desired": self.desired.to_json() if self.desired else None,
            "active": self.active.to_json() if self.active else None,
            "broken": self.broken,
            "replicas": [registration.to_json() for registration in self.replicas.values()],
            "failures": self.failures,
            "disruptions": self.disruptions,
            "expired": [registration.to_json() for registration in self.expired.values()],
            "replaced_agents": list(self.replaced_agents),
            "assigned_ports": [list(pair) for pair in self.assigned_ports],
            "last_failed": self.last_failed,
            "last_disrupted": self.last_disrupted,
        }

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the state of the JSON object that `to_json` has made."""
        desired, active = members["desired"], members["active"]
        return cls(
            desired=Allocation.from_json(desired) if desired else None,
            active=ActiveAllocation.from_json(active) if active else None,
            broken=members["broken"],
            replicas=_by_rank(map(Registration.from_json, members["replicas"])),
            failures=members["failures"],
            disruptions=members["disruptions"],
            expired=_by_rank(map(Registration.from_json, members["expired"])),
            replaced_agents=tuple(members["replaced_agents"]),
            assigned_ports=tuple((instance, port) for instance, port in members["assigned_ports"]),
            last_failed=members["last_failed"],
            last_disrupted=members["last_disrupted"],
        )


def allocate(state: Rendezvous, allocation: Allocation, declared: JobSpec | None = None) -> Rendezvous:
    """Return the state after the controller writes `allocation`. The same allocation may be written again.

    Args:
        state: the state before.
        allocation: the desired allocation.
        declared: the job's current spec, which the next active allocation gets; None if it is not declared.

    Raises:
        StaleAllocationError: a newer allocation, or a different one of this generation, is desired already.
    """
    if state.desired is not None and allocation.generation <= state.desired.generation:
        if allocation == state.desired:
            return state
        raise StaleAllocationError(
            f"allocation {allocation.generation} ({allocation.replicas} replicas) is out of date: generation "
            f"{state.desired.generation} ({state.desired.replicas} replicas) is desired already; "
            f"read it, and write generation {state.desired.generation + 1} to change it"
        )
    return _activate_if_ready(replace(state, desired=allocation), declared)


def register(state: Rendezvous, registration: Registration, declared: JobSpec | None = None) -> Rendezvous:
    """Return the state after an agent registers. The same registration may be sent again.

    Args:
        state: the state before.
        registration: what the agent is doing.
        declared: as for `allocate`.
    """
    if registration.rank == 0 and state.complete:
        return state
    before = state.replicas.get(registration.rank) or state.expired.get(registration.rank)
    if before is not None and _is_outdated(registration, before):
        return state
    after = state
    if not _is_replaced(state, registration):
        after = _with_registration(state, registration, before)
        if registration.state is ReplicaState.FAILED:
            after = _count_failure(after, registration)
        is_first = registration.rank == 0 and after.complete
        if is_first and after.active is not None and registration.generation < after.active.generation:
            # The program has finished before it entered the active generation, which can never begin now.
            return replace(after, broken=True)
    if _breaks_generation(after, registration):
        disrupted = registration.state is not ReplicaState.FAILED
        after = _break_generation(after, disrupted=disrupted, newest=registration.generation)
    return _activate_if_ready(after, declared)


def expire(state: Rendezvous, ranks: Iterable[int], declared: JobSpec | None = None) -> Rendezvous:
    """Return the state after the heartbeats of the agents of `ranks` have expired.

    Args:
        state: the state before.
        ranks: the ranks of these agents.
        declared: as for `allocate`.
    """
    overdue = {rank for rank in ranks if rank in state.replicas}
    if not overdue or state.complete:
        return state
    after = replace(
        state,
        replicas=_by_rank(state.replicas[rank] for rank in state.replicas if rank not in overdue),
        expired=_by_rank(
            [*state.expired.values(), *(state.replicas[rank] for rank in state.replicas if rank in overdue)]
        ),
    )
    active = state.active
    if active is not None and not state.broken and any(rank < active.replicas for rank in overdue):
        after = _break_generation(after, disrupted=True)
    return _activate_if_ready(after, declared)


# -- registrations --------------------------------------------------------------------------------------


def _by_rank(registrations: Iterable[Registration]) -> Mapping[int, Registration]:
    return MappingProxyType({registration.rank: registration for registration in registrations})


def _is_outdated(registration: Registration, before: Registration) -> bool:
    """Whether `before`, of the same agent, was sent after `registration` and arrived first."""
    if registration.instance != before.instance:
        return False
    order = (registration.generation, _STATE_ORDER[registration.state])
    return order < (before.generation, _STATE_ORDER[before.state])


def _is_replaced(state: Rendezvous, registration: Registration) -> bool:
    """Whether another agent of its rank has replaced the agent, and still runs."""
    successor = state.replicas.get(registration.rank)
    if registration.instance not in state.replaced_agents or successor is None:
        return False
    return successor.state not in EXITED_STATES


def _with_registration(
    state: Rendezvous, registration: Registration, before: Registration | None
) -> Rendezvous:
    replaced = state.replaced_agents
    if before is not None and before.instance != registration.instance:
        others = (instance for instance in replaced if instance != registration.instance)
        replaced = (*others, before.instance)[-_HISTORY_LENGTH:]
    return replace(
        state,
        replicas=_by_rank([*state.replicas.values(), registration]),
        expired=_by_rank(other for other in state.expired.values() if other.rank != registration.rank),
        replaced_agents=replaced,
    )


def _count_failure(state: Rendezvous, registration: Registration) -> Rendezvous:
    """Count the failure of a generation once.

    A peer that was lost as a consequence may have registered first: then its disruption becomes this failure.
    """
    is_surplus = state.active is not None and registration.rank >= state.active.replicas
    before = FailureCount(state.failures, state.last_failed)
    after = before.with_generations([registration.generation])
    if is_surplus or state.complete or after == before:
        return state
    return replace(
        state,
        failures=after.count,
        last_failed=after.generation,
        disruptions=state.disruptions - (state.last_disrupted == registration.generation),
    )


# -- breaking a generation ------------------------------------------------------------------------------


def _breaks_generation(state: Rendezvous, registration: Registration) -> bool:
    """Whether the active generation is broken because of this registration."""
    active = state.active
    if active is None or state.broken or state.complete:
        return False
    if not active.admits(registration.rank, registration.instance):
        replaces = registration.rank < active.replicas and state.replicas[registration.rank] == registration
        # A trainer that is not admitted runs in a generation that is not older: the state was lost, and the
        # adopted generation does not include all trainers.
        is_unknown = (
            registration.state is ReplicaState.RUNNING and registration.generation >= active.generation
        )
        return replaces or is_unknown
    # An agent that exits will not enter the active generation, whichever generation it was in before.
    exits = registration.state in {ReplicaState.FAILED, ReplicaState.TERMINATED}
    is_newer = registration.generation > active.generation
    departs = registration.state in DEPARTED_STATES and registration.generation == active.generation
    return exits or is_newer or departs


def _break_generation(state: Rendezvous, *, disrupted: bool, newest: int = 0) -> Rendezvous:
    """Mark the active generation as broken, and desire its count, or fewer if fewer are desired, again.

    Args:
        state: the state before.
        disrupted: whether the generation counts as a disruption.
        newest: the newest generation that a replica names; the next generation is newer.
    """
    active, desired = state.active, state.desired
    if active is None or desired is None:
        return state
    return replace(
        state,
        broken=True,
        desired=Allocation(max(desired.generation, newest) + 1, min(active.replicas, desired.replicas)),
        disruptions=state.disruptions + disrupted,
        last_disrupted=active.generation if disrupted else state.last_disrupted,
    )


# -- activating a generation ----------------------------------------------------------------------------


def _activate_if_ready(state: Rendezvous, declared: JobSpec | None) -> Rendezvous:
    """Make the desired allocation active if all its replicas are present."""
    desired = state.desired
    if desired is None or state.complete or (state.active and state.active.generation >= desired.generation):
        return state
    if desired.replicas == 0:
        return _activate(state, desired, [], NO_PORT, declared)
    registrations = [state.replicas.get(rank) for rank in range(desired.replicas)]
    members = [member for member in registrations if member is not None and _is_present(state, member)]
    if len(members) < desired.replicas:
        return state
    newest = max(member.generation for member in members)
    if state.active is None and newest >= desired.generation and _all_run(members, newest):
        # The state was lost while training continued: the running generation is adopted.
        return _activate(state, replace(desired, generation=newest), members, NO_PORT, declared)
    first = members[0]
    if (first.instance, first.port) in state.assigned_ports:
        return state
    # No replica may enter a generation twice; `desired` can be older than `newest` only if the state was
    # lost.
    desired = replace(desired, generation=max(desired.generation, newest + 1))
    ports = (*state.assigned_ports, (first.instance, first.port))[-_HISTORY_LENGTH:]
    return _activate(replace(state, assigned_ports=ports), desired, members, first.port, declared)


def _is_present(state: Rendezvous, member: Registration) -> bool:
    """Whether the replica is idle, or will be when its present generation ends."""
    if member.state is not ReplicaState.RUNNING:
        return member.state in IDLE_STATES
    if state.view(0).has_ended(member.generation):
        return False
    if state.desired is None or state.active is None or member.prepared is None:
        # If no generation is active, the state was lost, and with it the generation to prepare for.
        return True
    return member.prepared >= state.desired.generation


def _all_run(members: Sequence[Registration], generation: int) -> bool:
    return all(member.state is ReplicaState.RUNNING and member.generation == generation for member in members)


def _activate(
    state: Rendezvous,
    desired: Allocation,
    members: Sequence[Registration],
    port: int,
    declared: JobSpec | None,
) -> Rendezvous:
    active = ActiveAllocation(
        desired.generation,
        desired.replicas,
        members[0].address if members else "",
        port,
        tuple(member.instance for member in members),
    )
    before = state.active.spec if state.active is not None else None
    return replace(state, desired=desired, active=active.with_spec(declared, before), broken=False)
