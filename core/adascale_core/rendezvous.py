"""When a generation of replicas becomes active, as a pure state machine.

The controller writes the allocation it wants; agents register what they are doing; whenever all replicas
of the desired allocation are there, it becomes the active one and trainers move over to it. A replica that
is lost breaks the active generation: the same count is then desired again under the next number, so that
its peers can re-enter without waiting for the controller.

Invariants, for any order of events, while the state is kept:
- generations of `desired` and of `active` only rise, and `active` is never ahead of `desired`;
- an allocation becomes active only when each of its replicas is idle, or runs a generation that is not
  over and so will follow, with its next trainer ready where it makes one ready, and under a number that
  none of them has been in;
- it is active for those agents only that were there then, so an agent that was replaced can't enter;
- the spec of an active allocation never changes: a changed spec is for the next generation;
- a port of rank 0 is given to one generation only.

What an agent does: it registers whenever it does something else, and again as a heartbeat. While its
trainer runs and `view.is_over(own generation)`, it makes the trainer leave. While it is idle it enters
`view.next_after(own generation)` if that `admits` it. Rank 0 keeps a listening socket for the next
generation; it opens another when a trainer has taken that over, and when it is idle, has nothing to enter
and sees its own port as `view.used_port`, which was then given to a generation that it has missed.
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

IDLE = frozenset({ReplicaState.WAITING, ReplicaState.REENTERING, ReplicaState.LOST})
"""Phases of an agent that is ready for the next generation."""

LEFT = frozenset({ReplicaState.REENTERING, ReplicaState.LOST, ReplicaState.FAILED, ReplicaState.TERMINATED})
"""Phases that mean: the generation that the agent names goes on without this replica, so not at all."""

GONE = frozenset({ReplicaState.FAILED, ReplicaState.TERMINATED, ReplicaState.FINISHED})
"""Phases after which an agent leaves, so that its silence means nothing."""

NO_PORT = 0
"""In place of the port of a generation that nobody can enter any more."""

_ORDER = {
    ReplicaState.WAITING: 0,
    ReplicaState.RUNNING: 1,
    ReplicaState.REENTERING: 2,
    ReplicaState.LOST: 2,
    ReplicaState.FAILED: 3,
    ReplicaState.TERMINATED: 3,
    ReplicaState.FINISHED: 3,
}
"""An agent goes through the states of one generation in this order."""

_MEMORY = 256
"""How many replaced agents and given ports are remembered, the latest: enough for messages on their way."""


class StaleAllocationError(AdaScaleError):
    """An allocation whose generation is not newer than the one that is desired."""


@dataclass(frozen=True)
class Rendezvous:
    """What is known of a job's generations and replicas.

    Args:
        desired: the newest allocation.
        active: the allocation that trainers run in, or are moving to.
        broken: whether the active generation has lost a replica and is over.
        replicas: the last registration of each rank that is heard of.
        silent: the last registration of each rank that was not heard of for too long.
        replaced: agents whose place another one of their rank has taken, the latest last. They are not
            listened to, unless that other one falls silent or leaves.
        given: ports that were given to a generation, each with the agent that keeps it, the latest last.
        failures: generations that the user's program has failed in.
        disruptions: generations that were lost for another reason.
        failed: the last generation counted in `failures`.
        disrupted: the last generation counted in `disruptions`.
    """

    desired: Allocation | None = None
    active: ActiveAllocation | None = None
    broken: bool = False
    replicas: Mapping[int, Registration] = field(default_factory=lambda: MappingProxyType({}))
    failures: int = 0
    disruptions: int = 0
    silent: Mapping[int, Registration] = field(default_factory=lambda: MappingProxyType({}))
    replaced: tuple[str, ...] = ()
    given: tuple[tuple[str, int], ...] = ()
    failed: int = 0
    disrupted: int = 0

    @property
    def complete(self) -> bool:
        """Whether the user's program has come to its end."""
        first = self.replicas.get(0)
        return first is not None and first.state is ReplicaState.FINISHED

    def view(self, version: int) -> AllocationView:
        """What others are told of this state, known as `version`."""
        first = self.replicas.get(0)
        spent = first.port if first and (first.instance, first.port) in self.given else NO_PORT
        return AllocationView(version, self.desired, self.active, self.broken, self.complete, spent)

    def to_json(self) -> dict[str, Any]:
        """The state as a JSON object's members."""
        return {
            "desired": self.desired.to_json() if self.desired else None,
            "active": self.active.to_json() if self.active else None,
            "broken": self.broken,
            "replicas": [told.to_json() for told in self.replicas.values()],
            "failures": self.failures,
            "disruptions": self.disruptions,
            "silent": [told.to_json() for told in self.silent.values()],
            "replaced": list(self.replaced),
            "given": [list(pair) for pair in self.given],
            "failed": self.failed,
            "disrupted": self.disrupted,
        }

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The state from what `to_json` made of it."""
        desired, active = members["desired"], members["active"]
        return cls(
            desired=Allocation.from_json(desired) if desired else None,
            active=ActiveAllocation.from_json(active) if active else None,
            broken=members["broken"],
            replicas=_by_rank(Registration.from_json(told) for told in members["replicas"]),
            failures=members["failures"],
            disruptions=members["disruptions"],
            silent=_by_rank(Registration.from_json(told) for told in members["silent"]),
            replaced=tuple(members["replaced"]),
            given=tuple((instance, port) for instance, port in members["given"]),
            failed=members["failed"],
            disrupted=members["disrupted"],
        )


def allocate(state: Rendezvous, allocation: Allocation, declared: JobSpec | None = None) -> Rendezvous:
    """Return the state after the controller writes `allocation`. The same allocation may be written again.

    Args:
        state: the state before.
        allocation: the desired allocation.
        declared: the job's current spec, which the next active allocation gets; None if it is not declared.

    Raises:
        StaleAllocationError: a newer one, or another one of this generation, is desired already.
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
    now, rank = registration, registration.rank
    if rank == 0 and state.complete:
        return state
    before = state.replicas.get(rank) or state.silent.get(rank)
    if before is not None and before.instance == now.instance and _is_late(before, now):
        return state
    told = state
    successor = state.replicas.get(rank)
    if now.instance not in state.replaced or successor is None or successor.state in GONE:
        told = replace(
            state,
            replicas=_by_rank([*state.replicas.values(), now]),
            silent=_by_rank(one for one in state.silent.values() if one.rank != rank),
            replaced=_replaced(state, before, now),
        )
        if now.state is ReplicaState.FAILED:
            told = _count_failure(told, now)
        if (
            told.complete
            and rank == 0
            and told.active is not None
            and now.generation < told.active.generation
        ):
            # The program came to its end on the way to a generation that now will never be.
            return replace(told, broken=True)
    if _breaks(told, now):
        told = _break(told, disrupted=now.state is not ReplicaState.FAILED, newest=now.generation)
    return _activate_if_ready(told, declared)


def expire(state: Rendezvous, ranks: Iterable[int], declared: JobSpec | None = None) -> Rendezvous:
    """Return the state after the heartbeats of the agents of `ranks` have expired.

    Args:
        state: the state before.
        ranks: the ranks of these agents.
        declared: as for `allocate`.
    """
    gone = {rank for rank in ranks if rank in state.replicas}
    if not gone or state.complete:
        return state
    told = list(state.replicas.values())
    left = replace(
        state,
        replicas=_by_rank(one for one in told if one.rank not in gone),
        silent=_by_rank([*state.silent.values(), *(one for one in told if one.rank in gone)]),
    )
    active = state.active
    if active is not None and not state.broken and any(rank < active.replicas for rank in gone):
        left = _break(left, disrupted=True)
    return _activate_if_ready(left, declared)


def _by_rank(told: Iterable[Registration]) -> Mapping[int, Registration]:
    return MappingProxyType({one.rank: one for one in told})


def _replaced(state: Rendezvous, before: Registration | None, now: Registration) -> tuple[str, ...]:
    if before is None or before.instance == now.instance:
        return state.replaced
    return (*(one for one in state.replaced if one != now.instance), before.instance)[-_MEMORY:]


def _is_late(before: Registration, now: Registration) -> bool:
    """Whether `now` was overtaken on its way by `before`, from the same agent."""
    return (now.generation, _ORDER[now.state]) < (before.generation, _ORDER[before.state])


def _count_failure(state: Rendezvous, now: Registration) -> Rendezvous:
    """Count the failure of a generation once, also where a peer that it took along was heard first."""
    surplus = state.active is not None and now.rank >= state.active.replicas
    before = FailureCount(state.failures, state.failed)
    after = before.with_generations([now.generation])
    if surplus or state.complete or after == before:
        return state
    return replace(
        state,
        failures=after.count,
        failed=after.generation,
        disruptions=state.disruptions - (state.disrupted == now.generation),
    )


def _breaks(state: Rendezvous, now: Registration) -> bool:
    """Whether the active generation is over because of this registration."""
    active = state.active
    if active is None or state.broken or state.complete:
        return False
    ahead = now.generation > active.generation
    if not active.admits(now.rank, now.instance):
        joins = now.rank < active.replicas and state.replicas[now.rank] == now
        # One that runs all the same, in a generation it takes for current, was overlooked: the state was
        # lost, and what was found again is not all there is.
        overlooked = now.state is ReplicaState.RUNNING and now.generation >= active.generation
        return joins or overlooked
    # One that leaves for good will not come, from whichever generation it was on its way.
    leaves = now.state in {ReplicaState.FAILED, ReplicaState.TERMINATED}
    return leaves or ahead or (now.state in LEFT and now.generation == active.generation)


def _break(state: Rendezvous, *, disrupted: bool, newest: int = 0) -> Rendezvous:
    """The active generation is over; its size, or less if less is desired by now, is desired anew."""
    assert state.active is not None
    assert state.desired is not None
    replicas = min(state.active.replicas, state.desired.replicas)
    return replace(
        state,
        broken=True,
        desired=Allocation(max(state.desired.generation, newest) + 1, replicas),
        disruptions=state.disruptions + disrupted,
        disrupted=state.active.generation if disrupted else state.disrupted,
    )


def _activate_if_ready(state: Rendezvous, declared: JobSpec | None) -> Rendezvous:
    """Make the desired allocation active if all its replicas are there."""
    desired = state.desired
    if desired is None or state.complete or (state.active and state.active.generation >= desired.generation):
        return state
    if desired.replicas == 0:
        return _activate(state, desired, [], NO_PORT, declared)
    told = [state.replicas.get(rank) for rank in range(desired.replicas)]
    members = [one for one in told if one is not None and _is_there(state, one)]
    if len(members) < desired.replicas:
        return state
    newest = max(one.generation for one in members)
    if state.active is None and newest >= desired.generation and _all_run(members, newest):
        # The state was lost while training went on: what runs is what is active.
        return _activate(state, replace(desired, generation=newest), members, NO_PORT, declared)
    first = members[0]
    if (first.instance, first.port) in state.given:
        return state
    # Nobody enters a generation again; numbers can be behind only where the state was lost.
    desired = replace(desired, generation=max(desired.generation, newest + 1))
    given = (*state.given, (first.instance, first.port))[-_MEMORY:]
    return _activate(replace(state, given=given), desired, members, first.port, declared)


def _is_there(state: Rendezvous, told: Registration) -> bool:
    """Whether the replica is idle, or in a generation that is not over and so follows when it is."""
    if told.state is not ReplicaState.RUNNING:
        return told.state in IDLE
    if state.view(0).is_over(told.generation):
        return False
    if state.desired is None or state.active is None or told.prepared is None:
        # Where nothing is active the state was lost, and so was what this one should make ready for.
        return True
    return told.prepared >= state.desired.generation


def _all_run(members: Sequence[Registration], generation: int) -> bool:
    return all(told.state is ReplicaState.RUNNING and told.generation == generation for told in members)


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
        tuple(told.instance for told in members),
    )
    before = state.active.spec if state.active is not None else None
    return replace(state, desired=desired, active=active.with_spec(declared, before), broken=False)
