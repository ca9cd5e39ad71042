"""When a generation of replicas becomes active, as a pure state machine.

The controller writes the allocation it wants; agents register what they are doing; whenever all replicas
of the wanted allocation are there, it becomes the active one and trainers move over to it. A replica that
is lost breaks the active generation: the same count is then wanted again under the next number, so that
its peers can re-enter without waiting for the controller.

Invariants, for any order of events:
- generations of `wanted` and of `active` only rise, and `active` is never ahead of `wanted`;
- an allocation becomes active only when each of its replicas is idle, or runs the generation before it
  undisturbed and so will follow;
- a port of rank 0 is given to one generation only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from adascale_core.errors import AdaScaleError
from adascale_core.messages import ActiveAllocation, Allocation, AllocationView, Phase, Registration

IDLE = frozenset({Phase.WAITING, Phase.REENTERING, Phase.LOST})
"""Phases of an agent that is ready for the next generation."""

LEFT = frozenset({Phase.REENTERING, Phase.LOST, Phase.FAILED, Phase.TERMINATED})
"""Phases that mean: the generation that the agent names goes on without this replica, so not at all."""

GONE = frozenset({Phase.FAILED, Phase.TERMINATED, Phase.FINISHED})
"""Phases after which an agent leaves, so that its silence means nothing."""

PORT_USED = 0
"""Stands for a port that has been given to a generation already."""


class StaleAllocationError(AdaScaleError):
    """An allocation whose generation is not newer than the one that is wanted."""


@dataclass(frozen=True)
class Rendezvous:
    """What is known of a job's generations and replicas.

    Args:
        wanted: the newest allocation.
        active: the allocation that trainers run in, or are moving to.
        broken: whether the active generation has lost a replica and is over.
        replicas: the last registration of each rank.
        failures: generations that the user's program has failed in.
        disruptions: generations that were lost for another reason.
    """

    wanted: Allocation | None = None
    active: ActiveAllocation | None = None
    broken: bool = False
    replicas: Mapping[int, Registration] = field(default_factory=lambda: MappingProxyType({}))
    failures: int = 0
    disruptions: int = 0

    @property
    def complete(self) -> bool:
        """Whether the user's program has come to its end."""
        first = self.replicas.get(0)
        return first is not None and first.phase is Phase.FINISHED

    def view(self, version: int) -> AllocationView:
        """What others are told of this state, known as `version`."""
        return AllocationView(version, self.wanted, self.active, self.broken, self.complete)


def allocate(state: Rendezvous, allocation: Allocation) -> Rendezvous:
    """The state after the controller wants `allocation`. The same allocation may be written again.

    Raises:
        StaleAllocationError: a newer one, or another one of this generation, is wanted already.
    """
    if state.wanted is not None and allocation.generation <= state.wanted.generation:
        if allocation == state.wanted:
            return state
        raise StaleAllocationError(
            f"allocation {allocation.generation} ({allocation.replicas} replicas) is out of date: generation "
            f"{state.wanted.generation} ({state.wanted.replicas} replicas) is wanted already; "
            f"read it, and write generation {state.wanted.generation + 1} to change it"
        )
    return _settle(replace(state, wanted=allocation))


def register(state: Rendezvous, registration: Registration) -> Rendezvous:
    """The state after an agent tells what it is doing. The same registration may be told again."""
    before = state.replicas.get(registration.rank)
    known = before is not None and before.instance == registration.instance
    if known and before is not None and _is_late(before, registration):
        return state
    if known and before is not None and before.port == PORT_USED and registration.port == _given_port(state):
        registration = replace(registration, port=PORT_USED)
    told = replace(state, replicas=_with(state.replicas, registration))
    if _breaks(state, before, registration):
        told = _break(told, failed=registration.phase is Phase.FAILED)
    return _settle(told)


def forget(state: Rendezvous, ranks: Iterable[int]) -> Rendezvous:
    """The state after the agents of `ranks` have not been heard of for too long."""
    gone = {rank for rank in ranks if rank in state.replicas and not state.complete}
    if not gone:
        return state
    rest = MappingProxyType({rank: told for rank, told in state.replicas.items() if rank not in gone})
    left = replace(state, replicas=rest)
    active = state.active
    if active is not None and not state.broken and any(rank < active.replicas for rank in gone):
        left = _break(left, failed=False)
    return _settle(left)


def _is_late(before: Registration, now: Registration) -> bool:
    """Whether `now` was overtaken on its way by `before`, from the same agent."""
    return now.generation < before.generation or (
        now.generation == before.generation and before.phase in LEFT and now.phase is Phase.RUNNING
    )


def _given_port(state: Rendezvous) -> int | None:
    return state.active.master_port if state.active else None


def _with(replicas: Mapping[int, Registration], registration: Registration) -> Mapping[int, Registration]:
    return MappingProxyType({**replicas, registration.rank: registration})


def _breaks(state: Rendezvous, before: Registration | None, now: Registration) -> bool:
    """Whether the active generation is over because of this registration."""
    active = state.active
    if active is None or state.broken or state.complete or now.rank >= active.replicas:
        return False
    replaced = before is None or before.instance != now.instance
    return replaced or (now.phase in LEFT and now.generation == active.generation)


def _break(state: Rendezvous, *, failed: bool) -> Rendezvous:
    """The active generation is over; its size, or less if less is wanted by now, is wanted anew."""
    assert state.active is not None
    assert state.wanted is not None
    replicas = min(state.active.replicas, state.wanted.replicas)
    return replace(
        state,
        broken=True,
        wanted=Allocation(state.wanted.generation + 1, replicas),
        failures=state.failures + failed,
        disruptions=state.disruptions + (not failed),
    )


def _settle(state: Rendezvous) -> Rendezvous:
    """Make the wanted allocation active if all its replicas are there."""
    wanted = state.wanted
    if wanted is None or state.complete or (state.active and state.active.generation >= wanted.generation):
        return state
    first = state.replicas.get(0)
    if first is None:
        return state
    if state.active is None and _all_run(state, wanted):
        # The state was lost while training went on: what runs is what is active.
        return replace(state, active=_activate(wanted, first))
    if first.port == PORT_USED or not all(_is_there(state, rank) for rank in range(wanted.replicas)):
        return state
    return replace(
        state,
        active=_activate(wanted, first),
        broken=False,
        replicas=_with(state.replicas, replace(first, port=PORT_USED)),
    )


def _all_run(state: Rendezvous, wanted: Allocation) -> bool:
    told = [state.replicas.get(rank) for rank in range(wanted.replicas)]
    return all(
        one is not None and one.phase is Phase.RUNNING and one.generation == wanted.generation for one in told
    )


def _activate(wanted: Allocation, first: Registration) -> ActiveAllocation:
    return ActiveAllocation(wanted.generation, wanted.replicas, first.address, first.port)


def _is_there(state: Rendezvous, rank: int) -> bool:
    told = state.replicas.get(rank)
    if told is None:
        return False
    if told.phase is Phase.RUNNING:
        active = state.active
        return active is not None and not state.broken and told.generation == active.generation
    return told.phase in IDLE
