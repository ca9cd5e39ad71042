"""Generations of replicas: the rules one by one, then whole jobs in a world full of mishaps."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from adascale_core.messages import Allocation, AllocationView, JobSpec, Registration, ReplicaState
from adascale_core.rendezvous import (
    EXITED_STATES,
    IDLE_STATES,
    NO_PORT,
    Rendezvous,
    StaleAllocationError,
    allocate,
    expire,
    register,
)

WAITING, RUNNING, REENTERING, LOST = (
    ReplicaState.WAITING,
    ReplicaState.RUNNING,
    ReplicaState.REENTERING,
    ReplicaState.LOST,
)
FAILED, TERMINATED, FINISHED = ReplicaState.FAILED, ReplicaState.TERMINATED, ReplicaState.FINISHED


def told(
    rank: int, replica_state: ReplicaState, generation: int, *, port: int = 0, agent: str = ""
) -> Registration:
    """What the agent `agent` of `rank` tells; one agent per rank and one port per generation unless said."""
    agent = agent or f"agent-{rank}"
    return Registration(rank, agent, replica_state, generation, f"host-{rank}", port or 1000 + generation)


def after(state: Rendezvous, *events: Registration | Allocation) -> Rendezvous:
    """The state after registrations and allocations, in order."""
    for event in events:
        state = allocate(state, event) if isinstance(event, Allocation) else register(state, event)
    return state


def running(generation: int, replicas: int) -> Rendezvous:
    """A job whose trainers run in `generation`, the first there was."""
    ranks = range(replicas)
    return after(
        Rendezvous(),
        *(told(rank, WAITING, 0) for rank in ranks),
        Allocation(generation, replicas),
        *(told(rank, RUNNING, generation) for rank in ranks),
    )


def active(state: Rendezvous) -> tuple[int, int] | None:
    """Generation and replicas of what is active and not broken."""
    if state.active is None or state.broken:
        return None
    return state.active.generation, state.active.replicas


def desired(state: Rendezvous) -> tuple[int, int] | None:
    """Generation and replicas of what is desired."""
    return (state.desired.generation, state.desired.replicas) if state.desired else None


# -- becoming active ------------------------------------------------------------------------------------


def test_a_generation_has_the_spec_that_was_declared_when_it_became_active() -> None:
    first, second = JobSpec(8, 16, (4, 8), max_replicas=4), JobSpec(8, 64, (8, 16), max_replicas=4)

    def active_spec(state: Rendezvous) -> JobSpec | None:
        assert state.active is not None
        return state.active.spec

    state = register(allocate(Rendezvous(), Allocation(1, 1), first), told(0, WAITING, 0), first)
    assert active_spec(state) == first
    state = register(state, told(0, RUNNING, 1), second)
    assert active_spec(state) == first, "a changed spec is for the next generation"
    state = allocate(state, Allocation(2, 2), second)
    assert active_spec(state) == first, "generation 2 is not active yet"
    state = register(state, told(1, WAITING, 0), second)
    assert (active(state), active_spec(state)) == ((2, 2), second)


def test_a_generation_whose_count_the_new_spec_does_not_allow_keeps_the_spec_before() -> None:
    first, at_most_one = JobSpec(8, 64, max_replicas=4), JobSpec(8, 8, (8, 8))
    state = register(allocate(Rendezvous(), Allocation(1, 1), first), told(0, WAITING, 0), first)
    state = allocate(register(state, told(0, RUNNING, 1), first), Allocation(2, 2), at_most_one)
    state = register(state, told(1, WAITING, 0), at_most_one)
    assert state.active is not None
    assert (active(state), state.active.spec) == ((2, 2), first)


def test_a_generation_that_begins_after_a_loss_has_the_new_spec() -> None:
    first, second = JobSpec(8), JobSpec(8, 64)
    state = register(allocate(Rendezvous(), Allocation(1, 1), first), told(0, WAITING, 0), first)
    state = expire(register(state, told(0, RUNNING, 1), first), [0], second)
    state = register(state, told(0, WAITING, 0, agent="next"), second)
    assert state.active is not None
    assert (active(state), state.active.spec) == ((2, 1), second)


def test_a_generation_begins_only_when_running_replicas_have_prepared_the_next_trainer() -> None:
    def ready_for(rank: int, generation: int) -> Registration:
        return replace(told(rank, RUNNING, 1), prepared=generation)

    state = after(running(1, 3), ready_for(0, 1), ready_for(1, 1), ready_for(2, 1), Allocation(2, 2))
    assert active(state) == (1, 3)
    state = register(state, ready_for(0, 2))
    assert active(state) == (1, 3)
    state = register(state, ready_for(1, 2))
    assert active(state) == (2, 2), "the third is not needed, so it has nothing to make ready"


def test_a_lost_replica_needs_no_prepared_trainer() -> None:
    state = after(running(1, 2), replace(told(0, RUNNING, 1), prepared=1), told(1, LOST, 1), told(0, LOST, 1))
    assert active(state) == (2, 2)


def test_nothing_is_active_before_the_first_allocation() -> None:
    assert active(after(Rendezvous(), told(0, WAITING, 0))) is None


def test_an_allocation_becomes_active_with_the_last_of_its_replicas() -> None:
    state = after(Rendezvous(), Allocation(1, 2), told(1, WAITING, 0))
    assert active(state) is None
    state = register(state, told(0, WAITING, 0, port=4711))
    assert active(state) == (1, 2)
    assert state.active is not None
    assert (state.active.master_addr, state.active.master_port) == ("host-0", 4711)
    assert state.active.instances == ("agent-0", "agent-1")


@pytest.mark.parametrize("replica_state", [WAITING, REENTERING, LOST, RUNNING])
def test_a_replica_that_is_idle_or_runs_an_unbroken_generation_is_present(
    replica_state: ReplicaState,
) -> None:
    state = after(running(1, 1), told(1, replica_state, 0), Allocation(2, 2))
    assert active(state) == ((2, 2) if replica_state in IDLE_STATES else (1, 1))
    state = after(running(1, 2), Allocation(2, 1))
    assert active(state) == (2, 1)


@pytest.mark.parametrize("replica_state", sorted(EXITED_STATES))
def test_a_replica_that_has_exited_is_absent(replica_state: ReplicaState) -> None:
    state = after(running(1, 1), told(1, replica_state, 0), Allocation(2, 2))
    assert active(state) == (1, 1)
    assert active(after(state, told(1, WAITING, 0, agent="next"))) == (2, 2)


def test_missing_replicas_do_not_interrupt_training() -> None:
    state = after(running(1, 1), Allocation(2, 4), told(1, WAITING, 0), told(3, WAITING, 0))
    assert active(state) == (1, 1)
    assert not state.view(1).has_ended(1)
    assert active(after(state, told(2, WAITING, 0))) == (2, 4)


def test_surplus_replicas_leave_and_are_not_admitted_to_the_next_generation() -> None:
    view = after(running(1, 2), Allocation(2, 1)).view(1)
    following = view.next_allocation(1)
    assert view.has_ended(1)
    assert following is not None
    assert following.admits(0, "agent-0")
    assert not following.admits(1, "agent-1")


def test_an_allocation_of_zero_replicas_is_active_at_once() -> None:
    state = after(running(1, 2), Allocation(2, 0))
    assert active(state) == (2, 0)
    assert state.view(1).has_ended(1)
    state = after(state, told(0, REENTERING, 1), told(1, REENTERING, 1), Allocation(3, 2))
    assert active(state) == (3, 2)


def test_zero_replicas_are_active_without_registrations() -> None:
    assert active(after(Rendezvous(), Allocation(1, 0))) == (1, 0)


def test_the_next_generation_waits_until_replicas_on_their_way_have_arrived() -> None:
    state = after(running(1, 2), Allocation(2, 1), Allocation(3, 2))
    assert active(state) == (2, 1)
    state = after(state, told(0, REENTERING, 1, port=1001), told(1, REENTERING, 1))
    assert active(state) == (2, 1), "its port serves generation 2 already"
    assert active(register(state, told(0, RUNNING, 2))) == (3, 2)


# -- what is desired -------------------------------------------------------------------------------------


def test_the_same_allocation_may_be_written_again() -> None:
    state = running(1, 2)
    assert allocate(state, Allocation(1, 2)) == state


@pytest.mark.parametrize("stale", [Allocation(3, 1), Allocation(2, 4), Allocation(0, 2)])
def test_a_stale_allocation_is_rejected_with_advice(stale: Allocation) -> None:
    with pytest.raises(StaleAllocationError, match=r"generation 3 \(2 replicas\).*write generation 4"):
        allocate(running(3, 2), stale)


# -- breaking -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replica_state", [REENTERING, LOST, FAILED, TERMINATED])
def test_a_replica_that_leaves_breaks_its_generation_and_the_same_count_is_desired_again(
    replica_state: ReplicaState,
) -> None:
    state = register(running(3, 2), told(1, replica_state, 3))
    assert active(state) is None
    assert desired(state) == (4, 2)
    assert state.view(1).has_ended(3)


def test_a_generation_breaks_once() -> None:
    state = after(running(1, 3), told(1, LOST, 1), told(2, LOST, 1))
    assert desired(state) == (2, 3)
    assert (state.failures, state.disruptions) == (0, 1)


def test_after_a_break_all_enter_the_next_generation() -> None:
    state = after(running(1, 2), told(1, LOST, 1, port=7))
    assert active(state) is None, "rank 0 has not left yet"
    assert active(register(state, told(0, LOST, 1))) == (2, 2)


def test_after_a_break_the_smaller_count_is_desired() -> None:
    grows = after(running(1, 2), Allocation(2, 4), told(1, LOST, 1))
    shrinks = after(running(1, 3), told(0, TERMINATED, 1), Allocation(3, 2), told(1, LOST, 1))
    assert desired(grows) == (3, 2)
    assert desired(shrinks) == (3, 2)


@pytest.mark.parametrize("replica_state", [WAITING, RUNNING, LOST])
def test_an_agent_that_replaces_another_breaks_its_generation(replica_state: ReplicaState) -> None:
    state = register(running(1, 2), told(1, replica_state, 0, agent="next"))
    assert active(state) is None
    assert desired(state) == (2, 2)


@pytest.mark.parametrize("replica_state", [LOST, FAILED, REENTERING, TERMINATED])
def test_surplus_replicas_break_nothing_and_their_failures_do_not_count(replica_state: ReplicaState) -> None:
    state = after(running(1, 2), Allocation(2, 1), told(1, replica_state, 1))
    assert active(state) == (2, 1)
    assert (state.failures, state.disruptions) == (0, 0)


@pytest.mark.parametrize(("replica_state", "counted"), [(FAILED, (1, 0)), (TERMINATED, (0, 1))])
def test_a_replica_that_exits_while_it_moves_breaks_the_next_generation(
    replica_state: ReplicaState, counted: tuple[int, int]
) -> None:
    state = after(running(1, 2), told(2, WAITING, 0), Allocation(2, 3), told(1, replica_state, 1))
    assert active(state) is None
    assert desired(state) == (3, 3)
    assert (state.failures, state.disruptions) == counted


@pytest.mark.parametrize("replica_state", [REENTERING, LOST])
def test_replicas_that_move_break_nothing(replica_state: ReplicaState) -> None:
    state = after(
        running(1, 2),
        told(2, WAITING, 0),
        Allocation(2, 3),
        told(1, replica_state, 1),
        told(0, replica_state, 1),
    )
    assert active(state) == (2, 3)


# -- counting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "failures", "disruptions"),
    [
        ([FAILED], 1, 0),
        ([FAILED, FAILED], 1, 0),  # the same defect on all replicas
        ([FAILED, LOST], 1, 0),
        ([LOST, FAILED], 1, 0),  # the peer that the failure took along was heard first
        ([LOST, FAILED, FAILED], 1, 0),
        ([LOST, LOST], 0, 1),
        ([TERMINATED, REENTERING, REENTERING], 0, 1),
    ],
)
def test_a_generation_counts_once_and_as_a_failure_if_the_program_failed(
    ends: list[ReplicaState], failures: int, disruptions: int
) -> None:
    state = after(running(1, 3), *(told(rank, replica_state, 1) for rank, replica_state in enumerate(ends)))
    assert (state.failures, state.disruptions) == (failures, disruptions)


def test_failures_of_successive_generations_add_up() -> None:
    state = Rendezvous(desired=Allocation(1, 2))
    for generation in range(1, 5):
        agents = [f"{generation}-{rank}" for rank in range(2)]
        state = after(
            state,
            *(told(rank, WAITING, 0, agent=agents[rank]) for rank in range(2)),
            *(told(rank, RUNNING, generation, agent=agents[rank]) for rank in range(2)),
            told(0, LOST, generation, agent=agents[0]),
            told(1, FAILED, generation, agent=agents[1]),
        )
    assert (state.failures, state.disruptions) == (4, 0)


# -- silence --------------------------------------------------------------------------------------------


def test_an_expired_replica_breaks_its_generation() -> None:
    state = expire(running(1, 2), [1])
    assert desired(state) == (2, 2)
    assert state.disruptions == 1
    assert 1 not in state.replicas


def test_an_expired_replica_is_absent_until_it_registers_again() -> None:
    state = expire(after(running(1, 1), told(1, WAITING, 0)), [1])
    state = allocate(state, Allocation(2, 2))
    assert active(state) == (1, 1)
    assert active(register(state, told(1, WAITING, 0))) == (2, 2)


def test_the_expiry_of_surplus_or_unknown_replicas_breaks_nothing() -> None:
    state = after(running(1, 1), told(1, WAITING, 0))
    assert active(expire(state, [1, 5])) == (1, 1)
    assert expire(state, [5]) == state


def test_a_replica_expires_once() -> None:
    state = expire(running(1, 2), [1])
    assert expire(state, [1]) == state


def test_an_expired_replica_that_registers_again_enters_the_next_generation() -> None:
    state = expire(running(1, 2), [1])
    state = after(state, told(0, LOST, 1), told(1, RUNNING, 1))
    assert active(state) is None
    assert active(register(state, told(1, LOST, 1))) == (2, 2)


# -- messages that are late -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newer", "late"),
    [
        (told(1, RUNNING, 1), told(1, WAITING, 0)),
        (told(1, LOST, 1), told(1, RUNNING, 1)),
        (told(1, REENTERING, 1), told(1, RUNNING, 1)),
        (told(1, FAILED, 1), told(1, LOST, 1)),
        (told(1, TERMINATED, 1), told(1, REENTERING, 1)),
        (told(1, FINISHED, 1), told(1, RUNNING, 1)),
        (told(0, FINISHED, 1), told(0, RUNNING, 1)),
    ],
)
def test_a_delayed_registration_changes_nothing(newer: Registration, late: Registration) -> None:
    state = register(running(1, 2), newer)
    assert register(state, late) == state
    assert register(state, newer) == state


def test_registrations_of_a_replaced_agent_are_ignored() -> None:
    state = after(running(1, 2), told(1, WAITING, 0, agent="next"), told(0, LOST, 1))
    assert active(state) == (2, 2)
    for replica_state in ReplicaState:
        assert register(state, told(1, replica_state, 1)) == state


def test_registrations_of_a_replaced_agent_count_if_its_successor_has_expired() -> None:
    state = after(running(1, 1), told(0, WAITING, 0, agent="next"))
    state = expire(state, [0])
    state = register(state, told(0, LOST, 1, port=7))
    assert active(state) == (3, 1)
    assert state.replaced_agents == ("next",)
    assert register(state, told(0, WAITING, 0, agent="next")) == state


def test_only_agents_that_were_present_are_admitted() -> None:
    following = running(1, 2).view(1).next_allocation(0)
    assert following is not None
    assert following.admits(1, "agent-1")
    assert not following.admits(1, "next")
    assert replace(following, instances=()).admits(1, "next"), "agents may not be told"


# -- the port of rank 0 ---------------------------------------------------------------------------------


def test_a_port_is_assigned_to_one_generation_only() -> None:
    state = after(Rendezvous(), Allocation(1, 1), told(0, WAITING, 0, port=7), Allocation(2, 1))
    assert active(state) == (1, 1)
    state = after(state, told(0, WAITING, 0, port=7))
    assert active(state) == (1, 1)
    assert active(register(state, told(0, RUNNING, 1, port=8))) == (2, 1)


def test_a_port_assigned_to_a_missed_generation_is_reported_as_used() -> None:
    state = after(Rendezvous(), Allocation(1, 2), told(0, WAITING, 0, port=7), told(1, WAITING, 0))
    assert state.view(1).used_port == 7
    assert state.view(1).next_allocation(0), "where it is spent well"
    state = register(state, told(1, LOST, 1))
    assert active(state) is None, "rank 0 has not seen generation 1, and 7 is given already"
    assert state.view(1).used_port == 7
    assert not state.view(1).next_allocation(0)
    state = register(state, told(0, WAITING, 0, port=8))
    assert active(state) == (2, 2)
    state = after(state, told(1, TERMINATED, 2), told(1, WAITING, 0, agent="next"))
    assert active(register(state, told(0, WAITING, 0, port=7))) is None, "a late message brings 7 back"


def test_a_port_stays_assigned_if_its_agent_expires_for_a_while() -> None:
    state = after(Rendezvous(), Allocation(1, 1), told(0, WAITING, 0, port=7))
    state = register(expire(state, [0]), told(0, WAITING, 0, port=7))
    assert active(state) is None
    assert active(register(state, told(0, WAITING, 0, port=8))) == (2, 1)


def test_another_agent_may_have_a_port_of_the_same_number() -> None:
    state = after(Rendezvous(), Allocation(1, 1), told(0, WAITING, 0, port=7))
    assert active(register(state, told(0, WAITING, 0, port=7, agent="next"))) == (2, 1)


# -- the end --------------------------------------------------------------------------------------------


def test_a_job_is_complete_when_rank_0_has_finished_and_stays_so() -> None:
    done = register(running(1, 2), told(0, FINISHED, 1))
    assert done.complete
    for state in (
        register(done, told(0, WAITING, 0, agent="next")),
        register(done, told(0, FAILED, 1)),
        register(done, told(1, FAILED, 1)),
        register(done, told(1, LOST, 1)),
        register(done, told(1, WAITING, 0, agent="next")),
        expire(done, [0, 1]),
        allocate(done, Allocation(2, 2)),
    ):
        assert state.complete
        assert active(state) == (1, 2)
        assert (state.failures, state.disruptions) == (0, 0)


def test_another_rank_that_finishes_neither_completes_nor_breaks() -> None:
    state = register(running(1, 2), told(1, FINISHED, 1))
    assert not state.complete
    assert active(state) == (1, 2)


# -- a service that has lost its data -------------------------------------------------------------------


def test_after_a_loss_of_state_the_running_generation_becomes_active() -> None:
    state = after(Rendezvous(), Allocation(5, 2), told(0, RUNNING, 5), told(1, RUNNING, 5))
    assert active(state) == (5, 2)
    assert state.active is not None
    assert state.active.master_port == NO_PORT, "the port that rank 0 tells is for the next generation"
    assert not state.view(1).has_ended(5)
    assert active(allocate(state, Allocation(6, 1))) == (6, 1)


def test_after_a_loss_of_state_running_replicas_move_to_a_newer_allocation() -> None:
    state = after(Rendezvous(), Allocation(6, 2), told(0, RUNNING, 5), told(1, WAITING, 0))
    assert active(state) == (6, 2)
    assert state.view(1).has_ended(5)


def test_after_a_loss_of_state_a_newer_running_generation_becomes_active() -> None:
    state = after(Rendezvous(), Allocation(4, 2), told(0, RUNNING, 5), told(1, RUNNING, 5))
    assert active(state) == desired(state) == (5, 2)


@pytest.mark.parametrize("replica_state", [LOST, REENTERING])
def test_no_replica_enters_a_generation_that_it_has_left(replica_state: ReplicaState) -> None:
    state = after(Rendezvous(), Allocation(5, 2), told(0, replica_state, 5), told(1, WAITING, 0))
    assert active(state) == desired(state) == (6, 2)


def test_a_generation_with_more_trainers_than_allocated_breaks() -> None:
    state = after(Rendezvous(), Allocation(4, 1), told(0, RUNNING, 5))
    assert active(state) == (5, 1)
    state = register(state, told(1, RUNNING, 5))
    assert active(state) is None
    assert desired(state) == (6, 1)


def test_an_unknown_trainer_is_made_to_leave_by_a_newer_generation() -> None:
    state = after(Rendezvous(), told(0, WAITING, 0), told(0, WAITING, 0, agent="next"), Allocation(1, 1))
    state = register(state, told(0, RUNNING, 5))
    assert desired(state) == (6, 1)
    state = register(state, told(0, WAITING, 0, agent="next", port=7))
    assert active(state) == (6, 1)
    assert state.view(1).has_ended(5)


def test_a_replica_ahead_of_the_active_generation_brings_all_to_a_newer_one() -> None:
    state = after(Rendezvous(), Allocation(1, 1), told(0, WAITING, 0), told(0, RUNNING, 5))
    assert active(state) == desired(state) == (6, 1)


# -- at rest --------------------------------------------------------------------------------------------


def test_the_state_is_read_from_json_as_it_was_written() -> None:
    state = after(running(1, 3), told(2, WAITING, 0, agent="next"), told(0, FAILED, 1), told(1, LOST, 1))
    state = expire(state, [1])
    assert state.replaced_agents
    assert state.assigned_ports
    assert state.expired
    assert Rendezvous.from_json(json.loads(json.dumps(state.to_json()))) == state


# -- a world full of mishaps ----------------------------------------------------------------------------

T = TypeVar("T")
RANKS = 4
_unique = count(1)


@dataclass(eq=False)
class Agent:
    """The agent of one replica, as the worker has it: it sees views, runs trainers and tells."""

    rank: int
    instance: str = field(default_factory=lambda: f"agent-{next(_unique)}")
    state: ReplicaState = WAITING
    generation: int = 0
    port: int = field(default_factory=lambda: next(_unique))
    seen: AllocationView | None = None
    entered: tuple[int, str, int] | None = None
    """Of its trainer while that runs: generation, address and port."""
    prepared: int = 0

    @property
    def registration(self) -> Registration:
        prepared = self.prepared if self.entered is not None else None
        return Registration(
            *(self.rank, self.instance, self.state, self.generation, self.instance, self.port),
            prepared=prepared,
        )

    @property
    def is_over(self) -> bool:
        return self.entered is not None and self.seen is not None and self.seen.has_ended(self.generation)

    def see(self, view: AllocationView) -> bool:
        """Act on a view; whether there is something new to tell."""
        if self.seen is not None and view.version < self.seen.version:
            return False
        self.seen = view
        if self.entered is not None:
            desired = view.desired
            prepares = (
                desired is not None and self.rank < desired.replicas and desired.generation > self.prepared
            )
            if prepares and desired is not None:
                self.prepared = desired.generation
            return prepares
        following = view.next_allocation(self.generation)
        if following is None or not following.admits(self.rank, self.instance):
            missed = self.rank == 0 and view.used_port == self.port
            if missed:
                self.port = next(_unique)
            return missed
        self.generation = following.generation
        if self.rank == 0 and following.master_port != self.port:
            self.port = next(_unique)
            self.state = LOST
            return True
        self.entered = (following.generation, following.master_addr, following.master_port)
        self.state = RUNNING
        if self.rank == 0:
            self.port = next(_unique)
        return True

    def end(self, replica_state: ReplicaState) -> None:
        self.entered = None
        self.state = replica_state


class World(RuleBasedStateMachine):
    """Agents, a controller and a service, with messages lost, late, repeated and out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Rendezvous()
        self.version = 1
        self.agents: list[Agent] = []
        self.latest: dict[int, Agent] = {}
        self.on_their_way: list[Registration] = []
        self.published: Allocation | None = None
        self.given: set[tuple[str, int]] = set()
        self.failed: set[int] = set()
        self.adrift: set[Agent] = set()

    # -- the service

    def change(self, state: Rendezvous) -> None:
        before = self.state
        if before == state:
            return
        self.state = state
        self.version += 1
        if state.desired is None or before.desired is None:
            return
        assert state.desired.generation >= before.desired.generation
        assert not before.complete or state.complete
        if state.active is None or state.active == before.active:
            return
        assert before.active is None or state.active.generation > before.active.generation
        assert state.active.generation <= state.desired.generation
        if state.active.master_port != NO_PORT:
            given = (state.active.master_addr, state.active.master_port)
            assert given not in self.given, "a port was given twice"
            self.given.add(given)

    @property
    def view(self) -> AllocationView:
        return self.state.view(self.version)

    # -- what happens in a healthy world

    @initialize(replicas=st.integers(1, RANKS))
    def submit(self, replicas: int) -> None:
        for rank in range(replicas):
            self.tell(self.begin(rank))
        self.allocate(replicas)

    @rule(replicas=st.integers(0, RANKS))
    def allocate(self, replicas: int) -> None:
        known = self.state.desired or self.published
        self.published = Allocation(known.generation + 1 if known else 1, replicas)
        self.publish()

    @rule(rank=st.integers(0, RANKS - 1))
    def start(self, rank: int) -> None:
        """An agent starts, which may be the second of its rank."""
        self.tell(self.begin(rank))

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        self.tell(self.one_of(data, self.agents))

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        self.look(self.one_of(data, self.agents))

    @rule()
    def calm_moment(self) -> None:
        """Everybody tells and sees; trainers that are told to leave do."""
        self.turn()

    @precondition(lambda self: any(agent.is_over for agent in self.agents))
    @rule(data=st.data(), replica_state=st.sampled_from([REENTERING, LOST]))
    def leave(self, data: st.DataObject, replica_state: ReplicaState) -> None:
        agent = self.one_of(data, [agent for agent in self.agents if agent.is_over])
        agent.end(replica_state)
        self.tell(agent)

    @precondition(lambda self: self.on_their_way)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        registration = self.one_of(data, self.on_their_way)
        if not again:
            self.on_their_way.remove(registration)
        self.change(register(self.state, registration))

    # -- mishaps

    @precondition(lambda self: self.on_their_way)
    @rule(data=st.data())
    def lose_a_message(self, data: st.DataObject) -> None:
        self.on_their_way.remove(self.one_of(data, self.on_their_way))

    @precondition(lambda self: any(agent.entered for agent in self.agents))
    @rule(data=st.data(), replica_state=st.sampled_from([REENTERING, LOST, FAILED, TERMINATED, FINISHED]))
    def end_a_trainer(self, data: st.DataObject, replica_state: ReplicaState) -> None:
        agent = self.one_of(data, [agent for agent in self.agents if agent.entered])
        agent.end(replica_state)
        if replica_state is FAILED:
            self.failed.add(agent.generation)
        self.tell(agent)
        if replica_state in EXITED_STATES:
            self.agents.remove(agent)

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def kill_an_agent(self, data: st.DataObject) -> None:
        self.agents.remove(self.one_of(data, self.agents))

    @rule(rank=st.integers(0, RANKS - 1))
    def take_for_silent(self, rank: int) -> None:
        self.change(expire(self.state, [rank]))

    @rule(republish=st.booleans())
    def lose_the_data(self, republish: bool) -> None:
        self.version += 1
        self.state = Rendezvous()
        self.given = set()
        self.adrift = set(self.agents)
        if republish:
            self.publish()

    @rule()
    def publish(self) -> None:
        try:
            self.change(allocate(self.state, self.published or Allocation(1, 1)))
        except StaleAllocationError:
            self.published = self.state.desired

    # -- what always holds

    @invariant()
    def active_is_never_ahead_of_wanted(self) -> None:
        if self.state.active is not None:
            assert self.state.desired is not None
            assert self.state.active.generation <= self.state.desired.generation

    @invariant()
    def no_two_trainers_have_the_same_place(self) -> None:
        entered = [(agent.rank, agent.entered) for agent in self.agents if agent.entered]
        assert len(set(entered)) == len(entered)

    @invariant()
    def one_generation_at_most_runs_undisturbed(self) -> None:
        """Of those that the service has kept its data since."""
        undisturbed = {
            agent.entered
            for agent in self.agents
            if agent.entered and agent not in self.adrift and not self.view.has_ended(agent.generation)
        }
        assert len(undisturbed) <= 1

    @invariant()
    def only_generations_that_failed_count_as_failures(self) -> None:
        assert 0 <= self.state.failures <= len(self.failed)
        assert self.state.disruptions >= 0

    def teardown(self) -> None:
        """Once nothing is amiss any more, what is desired becomes active, and stays so."""
        for registration in self.on_their_way:
            self.change(register(self.state, registration))
        self.on_their_way.clear()
        for _ in range(12):
            self.turn()
        settled = self.state
        for _ in range(3):
            self.turn()
        assert self.state == settled, "it never comes to rest"
        if settled.complete:
            return
        assert settled.desired is not None
        assert active(settled) == desired(settled), "deadlock"
        assert settled.active is not None
        members = [agent for agent in self.agents if agent.entered and not agent.is_over]
        assert sorted(agent.rank for agent in members) == list(range(settled.active.replicas))
        assert {agent.generation for agent in members} <= {settled.active.generation}

    def turn(self) -> None:
        """One round in which all works: the runner replaces what is gone, heartbeats arrive, views too."""
        self.publish()
        assert self.state.desired is not None
        for rank in range(self.state.desired.replicas):
            if self.latest.get(rank) not in self.agents:
                self.begin(rank)
        instances = {agent.instance for agent in self.agents}
        self.change(
            expire(
                self.state,
                [
                    one.rank
                    for one in self.state.replicas.values()
                    if one.instance not in instances and one.state not in EXITED_STATES
                ],
            )
        )
        for agent in self.agents:
            self.change(register(self.state, agent.registration))
        for agent in self.agents:
            self.look(agent, arrives=True)
            if agent.is_over:
                agent.end(REENTERING)

    # -- helpers

    def one_of(self, data: st.DataObject, options: Iterable[T]) -> T:
        return data.draw(st.sampled_from(list(options)))

    def begin(self, rank: int) -> Agent:
        agent = self.latest[rank] = Agent(rank)
        self.agents.append(agent)
        return agent

    def tell(self, agent: Agent) -> None:
        self.on_their_way.append(agent.registration)

    def look(self, agent: Agent, *, arrives: bool = False) -> None:
        was = agent.entered
        if agent.see(self.view):
            if agent.entered != was:
                self.adrift.discard(agent)
            if arrives:
                self.change(register(self.state, agent.registration))
            else:
                self.tell(agent)


def test_the_invariants_hold_under_random_faults() -> None:
    run_state_machine_as_test(
        World, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
    )


def test_a_program_that_finishes_before_it_enters_a_generation_breaks_that() -> None:
    """Rank 1 is in generation 2 already, where rank 0 will never come."""
    state = allocate(running(1, 1), Allocation(2, 2))
    state = register(state, told(1, WAITING, 0))
    assert active(state) == (2, 2)
    state = register(register(state, told(1, RUNNING, 2)), told(0, FINISHED, 1))
    assert state.complete
    assert state.view(1).has_ended(2)
