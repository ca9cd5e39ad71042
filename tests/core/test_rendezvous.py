"""Rendezvous: a table of cases for each rule, then invariants of a simulated job under random faults."""

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


def registration(
    rank: int, replica_state: ReplicaState, generation: int, *, port: int = 0, agent: str = ""
) -> Registration:
    """The registration of an agent; by default, each rank has one agent and each generation one port."""
    agent = agent or f"agent-{rank}"
    return Registration(rank, agent, replica_state, generation, f"host-{rank}", port or 1000 + generation)


def after(state: Rendezvous, *events: Registration | Allocation) -> Rendezvous:
    """Return the state after registrations and allocations, in order."""
    for event in events:
        state = allocate(state, event) if isinstance(event, Allocation) else register(state, event)
    return state


def running(generation: int, replicas: int) -> Rendezvous:
    """Return the state of a job whose trainers run in `generation`, its first."""
    ranks = range(replicas)
    return after(
        Rendezvous(),
        *(registration(rank, WAITING, 0) for rank in ranks),
        Allocation(generation, replicas),
        *(registration(rank, RUNNING, generation) for rank in ranks),
    )


def active(state: Rendezvous) -> tuple[int, int] | None:
    """Generation and replicas of the active allocation; None if it is broken."""
    if state.active is None or state.broken:
        return None
    return state.active.generation, state.active.replicas


def desired(state: Rendezvous) -> tuple[int, int] | None:
    """Generation and replicas of the desired allocation."""
    return (state.desired.generation, state.desired.replicas) if state.desired else None


# -- activation -----------------------------------------------------------------------------------------


def test_a_generation_has_the_spec_that_was_declared_when_it_became_active() -> None:
    first, second = JobSpec(8, 16, (4, 8), max_replicas=4), JobSpec(8, 64, (8, 16), max_replicas=4)

    def active_spec(state: Rendezvous) -> JobSpec | None:
        assert state.active is not None
        return state.active.spec

    state = register(allocate(Rendezvous(), Allocation(1, 1), first), registration(0, WAITING, 0), first)
    assert active_spec(state) == first
    state = register(state, registration(0, RUNNING, 1), second)
    assert active_spec(state) == first, "a changed spec is for the next generation"
    state = allocate(state, Allocation(2, 2), second)
    assert active_spec(state) == first, "generation 2 is not active yet"
    state = register(state, registration(1, WAITING, 0), second)
    assert (active(state), active_spec(state)) == ((2, 2), second)


def test_a_generation_whose_count_the_new_spec_does_not_allow_keeps_the_previous_spec() -> None:
    first, at_most_one = JobSpec(8, 64, max_replicas=4), JobSpec(8, 8, (8, 8))
    state = register(allocate(Rendezvous(), Allocation(1, 1), first), registration(0, WAITING, 0), first)
    state = allocate(register(state, registration(0, RUNNING, 1), first), Allocation(2, 2), at_most_one)
    state = register(state, registration(1, WAITING, 0), at_most_one)
    assert state.active is not None
    assert (active(state), state.active.spec) == ((2, 2), first)


def test_a_generation_that_begins_after_a_loss_has_the_new_spec() -> None:
    first, second = JobSpec(8), JobSpec(8, 64)
    state = register(allocate(Rendezvous(), Allocation(1, 1), first), registration(0, WAITING, 0), first)
    state = expire(register(state, registration(0, RUNNING, 1), first), [0], second)
    state = register(state, registration(0, WAITING, 0, agent="next"), second)
    assert state.active is not None
    assert (active(state), state.active.spec) == ((2, 1), second)


def test_a_generation_begins_only_when_running_replicas_have_prepared_the_next_trainer() -> None:
    def ready_for(rank: int, generation: int) -> Registration:
        return replace(registration(rank, RUNNING, 1), prepared=generation)

    state = after(running(1, 3), ready_for(0, 1), ready_for(1, 1), ready_for(2, 1), Allocation(2, 2))
    assert active(state) == (1, 3)
    state = register(state, ready_for(0, 2))
    assert active(state) == (1, 3)
    state = register(state, ready_for(1, 2))
    assert active(state) == (2, 2), "the surplus replica 2 prepares no trainer"


def test_a_lost_replica_needs_no_prepared_trainer() -> None:
    state = after(
        running(1, 2),
        replace(registration(0, RUNNING, 1), prepared=1),
        registration(1, LOST, 1),
        registration(0, LOST, 1),
    )
    assert active(state) == (2, 2)


def test_nothing_is_active_before_the_first_allocation() -> None:
    assert active(after(Rendezvous(), registration(0, WAITING, 0))) is None


def test_an_allocation_becomes_active_with_the_last_of_its_replicas() -> None:
    state = after(Rendezvous(), Allocation(1, 2), registration(1, WAITING, 0))
    assert active(state) is None
    state = register(state, registration(0, WAITING, 0, port=4711))
    assert active(state) == (1, 2)
    assert state.active is not None
    assert (state.active.master_addr, state.active.master_port) == ("host-0", 4711)
    assert state.active.instances == ("agent-0", "agent-1")


@pytest.mark.parametrize("replica_state", [WAITING, REENTERING, LOST, RUNNING])
def test_a_replica_that_is_idle_or_runs_an_unbroken_generation_is_present(
    replica_state: ReplicaState,
) -> None:
    state = after(running(1, 1), registration(1, replica_state, 0), Allocation(2, 2))
    assert active(state) == ((2, 2) if replica_state in IDLE_STATES else (1, 1))
    state = after(running(1, 2), Allocation(2, 1))
    assert active(state) == (2, 1)


@pytest.mark.parametrize("replica_state", sorted(EXITED_STATES))
def test_a_replica_that_has_exited_is_absent(replica_state: ReplicaState) -> None:
    state = after(running(1, 1), registration(1, replica_state, 0), Allocation(2, 2))
    assert active(state) == (1, 1)
    assert active(after(state, registration(1, WAITING, 0, agent="next"))) == (2, 2)


def test_missing_replicas_do_not_interrupt_training() -> None:
    state = after(running(1, 1), Allocation(2, 4), registration(1, WAITING, 0), registration(3, WAITING, 0))
    assert active(state) == (1, 1)
    assert not state.view(1).has_ended(1)
    assert active(after(state, registration(2, WAITING, 0))) == (2, 4)


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
    state = after(state, registration(0, REENTERING, 1), registration(1, REENTERING, 1), Allocation(3, 2))
    assert active(state) == (3, 2)


def test_zero_replicas_are_active_without_registrations() -> None:
    assert active(after(Rendezvous(), Allocation(1, 0))) == (1, 0)


def test_the_next_generation_waits_until_all_replicas_have_entered_the_previous_generation() -> None:
    state = after(running(1, 2), Allocation(2, 1), Allocation(3, 2))
    assert active(state) == (2, 1)
    state = after(state, registration(0, REENTERING, 1, port=1001), registration(1, REENTERING, 1))
    assert active(state) == (2, 1), "the port is assigned to generation 2"
    assert active(register(state, registration(0, RUNNING, 2))) == (3, 2)


# -- the desired allocation -----------------------------------------------------------------------------


def test_the_same_allocation_may_be_written_again() -> None:
    state = running(1, 2)
    assert allocate(state, Allocation(1, 2)) == state


@pytest.mark.parametrize("stale", [Allocation(3, 1), Allocation(2, 4), Allocation(0, 2)])
def test_a_stale_allocation_is_rejected_with_advice(stale: Allocation) -> None:
    with pytest.raises(StaleAllocationError, match=r"generation 3 \(2 replicas\).*write generation 4"):
        allocate(running(3, 2), stale)


# -- broken generations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("replica_state", [REENTERING, LOST, FAILED, TERMINATED])
def test_a_replica_that_leaves_breaks_its_generation_and_the_same_count_is_desired_again(
    replica_state: ReplicaState,
) -> None:
    state = register(running(3, 2), registration(1, replica_state, 3))
    assert active(state) is None
    assert desired(state) == (4, 2)
    assert state.view(1).has_ended(3)


def test_a_generation_breaks_once() -> None:
    state = after(running(1, 3), registration(1, LOST, 1), registration(2, LOST, 1))
    assert desired(state) == (2, 3)
    assert (state.failures, state.disruptions) == (0, 1)


def test_after_a_break_all_replicas_enter_the_next_generation() -> None:
    state = after(running(1, 2), registration(1, LOST, 1, port=7))
    assert active(state) is None, "rank 0 has not left yet"
    assert active(register(state, registration(0, LOST, 1))) == (2, 2)


def test_after_a_break_the_smaller_count_is_desired() -> None:
    grows = after(running(1, 2), Allocation(2, 4), registration(1, LOST, 1))
    shrinks = after(running(1, 3), registration(0, TERMINATED, 1), Allocation(3, 2), registration(1, LOST, 1))
    assert desired(grows) == (3, 2)
    assert desired(shrinks) == (3, 2)


@pytest.mark.parametrize("replica_state", [WAITING, RUNNING, LOST])
def test_an_agent_that_replaces_another_breaks_its_generation(replica_state: ReplicaState) -> None:
    state = register(running(1, 2), registration(1, replica_state, 0, agent="next"))
    assert active(state) is None
    assert desired(state) == (2, 2)


@pytest.mark.parametrize("replica_state", [LOST, FAILED, REENTERING, TERMINATED])
def test_surplus_replicas_break_nothing_and_their_failures_do_not_count(replica_state: ReplicaState) -> None:
    state = after(running(1, 2), Allocation(2, 1), registration(1, replica_state, 1))
    assert active(state) == (2, 1)
    assert (state.failures, state.disruptions) == (0, 0)


@pytest.mark.parametrize(("replica_state", "counted"), [(FAILED, (1, 0)), (TERMINATED, (0, 1))])
def test_a_replica_that_exits_while_it_moves_breaks_the_next_generation(
    replica_state: ReplicaState, counted: tuple[int, int]
) -> None:
    state = after(
        running(1, 2), registration(2, WAITING, 0), Allocation(2, 3), registration(1, replica_state, 1)
    )
    assert active(state) is None
    assert desired(state) == (3, 3)
    assert (state.failures, state.disruptions) == counted


@pytest.mark.parametrize("replica_state", [REENTERING, LOST])
def test_replicas_that_move_break_nothing(replica_state: ReplicaState) -> None:
    state = after(
        running(1, 2),
        registration(2, WAITING, 0),
        Allocation(2, 3),
        registration(1, replica_state, 1),
        registration(0, replica_state, 1),
    )
    assert active(state) == (2, 3)


# -- counting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "failures", "disruptions"),
    [
        ([FAILED], 1, 0),
        ([FAILED, FAILED], 1, 0),  # the same defect on all replicas
        ([FAILED, LOST], 1, 0),
        ([LOST, FAILED], 1, 0),  # the peer of the failed replica registers first
        ([LOST, FAILED, FAILED], 1, 0),
        ([LOST, LOST], 0, 1),
        ([TERMINATED, REENTERING, REENTERING], 0, 1),
    ],
)
def test_a_generation_counts_once_and_as_a_failure_if_the_program_failed(
    ends: list[ReplicaState], failures: int, disruptions: int
) -> None:
    state = after(
        running(1, 3), *(registration(rank, replica_state, 1) for rank, replica_state in enumerate(ends))
    )
    assert (state.failures, state.disruptions) == (failures, disruptions)


def test_failures_of_successive_generations_add_up() -> None:
    state = Rendezvous(desired=Allocation(1, 2))
    for generation in range(1, 5):
        agents = [f"{generation}-{rank}" for rank in range(2)]
        state = after(
            state,
            *(registration(rank, WAITING, 0, agent=agents[rank]) for rank in range(2)),
            *(registration(rank, RUNNING, generation, agent=agents[rank]) for rank in range(2)),
            registration(0, LOST, generation, agent=agents[0]),
            registration(1, FAILED, generation, agent=agents[1]),
        )
    assert (state.failures, state.disruptions) == (4, 0)


# -- expiry ---------------------------------------------------------------------------------------------


def test_an_expired_replica_breaks_its_generation() -> None:
    state = expire(running(1, 2), [1])
    assert desired(state) == (2, 2)
    assert state.disruptions == 1
    assert 1 not in state.replicas


def test_an_expired_replica_is_absent_until_it_registers_again() -> None:
    state = expire(after(running(1, 1), registration(1, WAITING, 0)), [1])
    state = allocate(state, Allocation(2, 2))
    assert active(state) == (1, 1)
    assert active(register(state, registration(1, WAITING, 0))) == (2, 2)


def test_the_expiry_of_surplus_or_unknown_replicas_breaks_nothing() -> None:
    state = after(running(1, 1), registration(1, WAITING, 0))
    assert active(expire(state, [1, 5])) == (1, 1)
    assert expire(state, [5]) == state


def test_a_replica_expires_once() -> None:
    state = expire(running(1, 2), [1])
    assert expire(state, [1]) == state


def test_an_expired_replica_that_registers_again_enters_the_next_generation() -> None:
    state = expire(running(1, 2), [1])
    state = after(state, registration(0, LOST, 1), registration(1, RUNNING, 1))
    assert active(state) is None
    assert active(register(state, registration(1, LOST, 1))) == (2, 2)


# -- late registrations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newer", "late"),
    [
        (registration(1, RUNNING, 1), registration(1, WAITING, 0)),
        (registration(1, LOST, 1), registration(1, RUNNING, 1)),
        (registration(1, REENTERING, 1), registration(1, RUNNING, 1)),
        (registration(1, FAILED, 1), registration(1, LOST, 1)),
        (registration(1, TERMINATED, 1), registration(1, REENTERING, 1)),
        (registration(1, FINISHED, 1), registration(1, RUNNING, 1)),
        (registration(0, FINISHED, 1), registration(0, RUNNING, 1)),
    ],
)
def test_a_delayed_registration_changes_nothing(newer: Registration, late: Registration) -> None:
    state = register(running(1, 2), newer)
    assert register(state, late) == state
    assert register(state, newer) == state


def test_registrations_of_a_replaced_agent_are_ignored() -> None:
    state = after(running(1, 2), registration(1, WAITING, 0, agent="next"), registration(0, LOST, 1))
    assert active(state) == (2, 2)
    for replica_state in ReplicaState:
        assert register(state, registration(1, replica_state, 1)) == state


def test_registrations_of_a_replaced_agent_count_if_its_successor_has_expired() -> None:
    state = after(running(1, 1), registration(0, WAITING, 0, agent="next"))
    state = expire(state, [0])
    state = register(state, registration(0, LOST, 1, port=7))
    assert active(state) == (3, 1)
    assert state.replaced_agents == ("next",)
    assert register(state, registration(0, WAITING, 0, agent="next")) == state


def test_only_agents_that_were_present_are_admitted() -> None:
    following = running(1, 2).view(1).next_allocation(0)
    assert following is not None
    assert following.admits(1, "agent-1")
    assert not following.admits(1, "next")
    assert replace(following, instances=()).admits(1, "next"), (
        "an allocation without a list of instances admits any agent"
    )


# -- the port of rank 0 ---------------------------------------------------------------------------------


def test_a_port_is_assigned_to_one_generation_only() -> None:
    state = after(Rendezvous(), Allocation(1, 1), registration(0, WAITING, 0, port=7), Allocation(2, 1))
    assert active(state) == (1, 1)
    state = after(state, registration(0, WAITING, 0, port=7))
    assert active(state) == (1, 1)
    assert active(register(state, registration(0, RUNNING, 1, port=8))) == (2, 1)


def test_a_port_assigned_to_a_missed_generation_is_reported_as_used() -> None:
    state = after(
        Rendezvous(), Allocation(1, 2), registration(0, WAITING, 0, port=7), registration(1, WAITING, 0)
    )
    assert state.view(1).used_port == 7
    assert state.view(1).next_allocation(0), "generation 1 uses the port"
    state = register(state, registration(1, LOST, 1))
    assert active(state) is None, "rank 0 has missed generation 1, and port 7 is assigned to it"
    assert state.view(1).used_port == 7
    assert not state.view(1).next_allocation(0)
    state = register(state, registration(0, WAITING, 0, port=8))
    assert active(state) == (2, 2)
    state = after(state, registration(1, TERMINATED, 2), registration(1, WAITING, 0, agent="next"))
    assert active(register(state, registration(0, WAITING, 0, port=7))) is None, "port 7 is used"


def test_a_port_stays_assigned_if_its_agent_expires_for_a_while() -> None:
    state = after(Rendezvous(), Allocation(1, 1), registration(0, WAITING, 0, port=7))
    state = register(expire(state, [0]), registration(0, WAITING, 0, port=7))
    assert active(state) is None
    assert active(register(state, registration(0, WAITING, 0, port=8))) == (2, 1)


def test_another_agent_may_have_a_port_of_the_same_number() -> None:
    state = after(Rendezvous(), Allocation(1, 1), registration(0, WAITING, 0, port=7))
    assert active(register(state, registration(0, WAITING, 0, port=7, agent="next"))) == (2, 1)


# -- completion -----------------------------------------------------------------------------------------


def test_a_job_is_complete_when_rank_0_has_finished_and_remains_complete() -> None:
    done = register(running(1, 2), registration(0, FINISHED, 1))
    assert done.complete
    for state in (
        register(done, registration(0, WAITING, 0, agent="next")),
        register(done, registration(0, FAILED, 1)),
        register(done, registration(1, FAILED, 1)),
        register(done, registration(1, LOST, 1)),
        register(done, registration(1, WAITING, 0, agent="next")),
        expire(done, [0, 1]),
        allocate(done, Allocation(2, 2)),
    ):
        assert state.complete
        assert active(state) == (1, 2)
        assert (state.failures, state.disruptions) == (0, 0)


def test_a_rank_other_than_0_that_finishes_neither_completes_the_job_nor_breaks_the_generation() -> None:
    state = register(running(1, 2), registration(1, FINISHED, 1))
    assert not state.complete
    assert active(state) == (1, 2)


# -- after a loss of the state --------------------------------------------------------------------------


def test_after_a_loss_of_state_the_running_generation_becomes_active() -> None:
    state = after(Rendezvous(), Allocation(5, 2), registration(0, RUNNING, 5), registration(1, RUNNING, 5))
    assert active(state) == (5, 2)
    assert state.active is not None
    assert state.active.master_port == NO_PORT, "the registered port of rank 0 is for the next generation"
    assert not state.view(1).has_ended(5)
    assert active(allocate(state, Allocation(6, 1))) == (6, 1)


def test_after_a_loss_of_state_running_replicas_move_to_a_newer_allocation() -> None:
    state = after(Rendezvous(), Allocation(6, 2), registration(0, RUNNING, 5), registration(1, WAITING, 0))
    assert active(state) == (6, 2)
    assert state.view(1).has_ended(5)


def test_after_a_loss_of_state_a_newer_running_generation_becomes_active() -> None:
    state = after(Rendezvous(), Allocation(4, 2), registration(0, RUNNING, 5), registration(1, RUNNING, 5))
    assert active(state) == desired(state) == (5, 2)


@pytest.mark.parametrize("replica_state", [LOST, REENTERING])
def test_no_replica_enters_a_generation_that_it_has_left(replica_state: ReplicaState) -> None:
    state = after(
        Rendezvous(), Allocation(5, 2), registration(0, replica_state, 5), registration(1, WAITING, 0)
    )
    assert active(state) == desired(state) == (6, 2)


def test_a_generation_with_more_trainers_than_allocated_breaks() -> None:
    state = after(Rendezvous(), Allocation(4, 1), registration(0, RUNNING, 5))
    assert active(state) == (5, 1)
    state = register(state, registration(1, RUNNING, 5))
    assert active(state) is None
    assert desired(state) == (6, 1)


def test_a_trainer_of_an_unknown_generation_exits_for_a_newer_generation() -> None:
    state = after(
        Rendezvous(), registration(0, WAITING, 0), registration(0, WAITING, 0, agent="next"), Allocation(1, 1)
    )
    state = register(state, registration(0, RUNNING, 5))
    assert desired(state) == (6, 1)
    state = register(state, registration(0, WAITING, 0, agent="next", port=7))
    assert active(state) == (6, 1)
    assert state.view(1).has_ended(5)


def test_a_replica_ahead_of_the_active_generation_starts_a_newer_generation() -> None:
    state = after(Rendezvous(), Allocation(1, 1), registration(0, WAITING, 0), registration(0, RUNNING, 5))
    assert active(state) == desired(state) == (6, 1)


# -- JSON -----------------------------------------------------------------------------------------------


def test_the_state_is_equal_after_a_round_trip_through_json() -> None:
    state = after(
        running(1, 3),
        registration(2, WAITING, 0, agent="next"),
        registration(0, FAILED, 1),
        registration(1, LOST, 1),
    )
    state = expire(state, [1])
    assert state.replaced_agents
    assert state.assigned_ports
    assert state.expired
    assert Rendezvous.from_json(json.loads(json.dumps(state.to_json()))) == state


# -- a job under random faults --------------------------------------------------------------------------

T = TypeVar("T")
RANKS = 4
_unique = count(1)


@dataclass(eq=False)
class Agent:
    """A simulated agent: it receives views, runs trainers and sends registrations."""

    rank: int
    instance: str = field(default_factory=lambda: f"agent-{next(_unique)}")
    state: ReplicaState = WAITING
    generation: int = 0
    port: int = field(default_factory=lambda: next(_unique))
    view: AllocationView | None = None
    entered: tuple[int, str, int] | None = None
    """Generation, address and port of its running trainer."""
    prepared: int = 0

    @property
    def registration(self) -> Registration:
        prepared = self.prepared if self.entered is not None else None
        return Registration(
            *(self.rank, self.instance, self.state, self.generation, self.instance, self.port),
            prepared=prepared,
        )

    @property
    def generation_has_ended(self) -> bool:
        return self.entered is not None and self.view is not None and self.view.has_ended(self.generation)

    def receive(self, view: AllocationView) -> bool:
        """Act on a view, and return whether the registration has changed."""
        if self.view is not None and view.version < self.view.version:
            return False
        self.view = view
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

    def end_trainer(self, replica_state: ReplicaState) -> None:
        self.entered = None
        self.state = replica_state


class SimulatedJob(RuleBasedStateMachine):
    """Agents, a controller and a service whose messages are lost, delayed, repeated and reordered."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Rendezvous()
        self.version = 1
        self.agents: list[Agent] = []
        self.latest: dict[int, Agent] = {}
        self.in_flight: list[Registration] = []
        self.published: Allocation | None = None
        self.assigned_ports: set[tuple[str, int]] = set()
        self.failed_generations: set[int] = set()
        self.unknown_to_service: set[Agent] = set()
        """Agents whose trainers the service does not know, because it has lost its data."""

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
            assigned = (state.active.master_addr, state.active.master_port)
            assert assigned not in self.assigned_ports, "a port is assigned twice"
            self.assigned_ports.add(assigned)

    @property
    def view(self) -> AllocationView:
        return self.state.view(self.version)

    # -- without faults

    @initialize(replicas=st.integers(1, RANKS))
    def submit(self, replicas: int) -> None:
        for rank in range(replicas):
            self.send(self.start_agent(rank))
        self.allocate(replicas)

    @rule(replicas=st.integers(0, RANKS))
    def allocate(self, replicas: int) -> None:
        newest = self.state.desired or self.published
        self.published = Allocation(newest.generation + 1 if newest else 1, replicas)
        self.publish()

    @rule(rank=st.integers(0, RANKS - 1))
    def start(self, rank: int) -> None:
        """Start an agent, which may be the second of its rank."""
        self.send(self.start_agent(rank))

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        self.send(self.choose(data, self.agents))

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        self.poll_view(self.choose(data, self.agents))

    @rule()
    def synchronize_all(self) -> None:
        """Deliver all registrations and views; trainers of ended generations exit."""
        self.synchronize()

    @precondition(lambda self: any(agent.generation_has_ended for agent in self.agents))
    @rule(data=st.data(), replica_state=st.sampled_from([REENTERING, LOST]))
    def leave(self, data: st.DataObject, replica_state: ReplicaState) -> None:
        agent = self.choose(data, [agent for agent in self.agents if agent.generation_has_ended])
        agent.end_trainer(replica_state)
        self.send(agent)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        registration = self.choose(data, self.in_flight)
        if not again:
            self.in_flight.remove(registration)
        self.change(register(self.state, registration))

    # -- faults

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def lose_a_message(self, data: st.DataObject) -> None:
        self.in_flight.remove(self.choose(data, self.in_flight))

    @precondition(lambda self: any(agent.entered for agent in self.agents))
    @rule(data=st.data(), replica_state=st.sampled_from([REENTERING, LOST, FAILED, TERMINATED, FINISHED]))
    def end_a_trainer(self, data: st.DataObject, replica_state: ReplicaState) -> None:
        agent = self.choose(data, [agent for agent in self.agents if agent.entered])
        agent.end_trainer(replica_state)
        if replica_state is FAILED:
            self.failed_generations.add(agent.generation)
        self.send(agent)
        if replica_state in EXITED_STATES:
            self.agents.remove(agent)

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def kill_an_agent(self, data: st.DataObject) -> None:
        self.agents.remove(self.choose(data, self.agents))

    @rule(rank=st.integers(0, RANKS - 1))
    def expire_replica(self, rank: int) -> None:
        self.change(expire(self.state, [rank]))

    @rule(republish=st.booleans())
    def lose_the_data(self, republish: bool) -> None:
        self.version += 1
        self.state = Rendezvous()
        self.assigned_ports = set()
        self.unknown_to_service = set(self.agents)
        if republish:
            self.publish()

    @rule()
    def publish(self) -> None:
        try:
            self.change(allocate(self.state, self.published or Allocation(1, 1)))
        except StaleAllocationError:
            self.published = self.state.desired

    # -- invariants

    @invariant()
    def the_active_generation_is_at_most_the_desired_generation(self) -> None:
        if self.state.active is not None:
            assert self.state.desired is not None
            assert self.state.active.generation <= self.state.desired.generation

    @invariant()
    def no_two_trainers_have_the_same_rank_in_a_generation(self) -> None:
        entered = [(agent.rank, agent.entered) for agent in self.agents if agent.entered]
        assert len(set(entered)) == len(entered)

    @invariant()
    def at_most_one_generation_continues(self) -> None:
        """Of the generations whose data the service has not lost."""
        continuing = {
            agent.entered
            for agent in self.agents
            if agent.entered
            and agent not in self.unknown_to_service
            and not self.view.has_ended(agent.generation)
        }
        assert len(continuing) <= 1

    @invariant()
    def only_failed_generations_count_as_failures(self) -> None:
        assert 0 <= self.state.failures <= len(self.failed_generations)
        assert self.state.disruptions >= 0

    def teardown(self) -> None:
        """Without further faults, the desired allocation becomes active and remains active."""
        for registration in self.in_flight:
            self.change(register(self.state, registration))
        self.in_flight.clear()
        for _ in range(12):
            self.synchronize()
        stable = self.state
        for _ in range(3):
            self.synchronize()
        assert self.state == stable, "the state does not become stable"
        if stable.complete:
            return
        assert stable.desired is not None
        assert active(stable) == desired(stable), "deadlock"
        assert stable.active is not None
        members = [agent for agent in self.agents if agent.entered and not agent.generation_has_ended]
        assert sorted(agent.rank for agent in members) == list(range(stable.active.replicas))
        assert {agent.generation for agent in members} <= {stable.active.generation}

    def synchronize(self) -> None:
        """Replace agents that have exited, then deliver the registration and the view of every agent."""
        self.publish()
        assert self.state.desired is not None
        for rank in range(self.state.desired.replicas):
            if self.latest.get(rank) not in self.agents:
                self.start_agent(rank)
        instances = {agent.instance for agent in self.agents}
        self.change(
            expire(
                self.state,
                [
                    replica.rank
                    for replica in self.state.replicas.values()
                    if replica.instance not in instances and replica.state not in EXITED_STATES
                ],
            )
        )
        for agent in self.agents:
            self.change(register(self.state, agent.registration))
        for agent in self.agents:
            self.poll_view(agent, delivered=True)
            if agent.generation_has_ended:
                agent.end_trainer(REENTERING)

    # -- helpers

    def choose(self, data: st.DataObject, options: Iterable[T]) -> T:
        return data.draw(st.sampled_from(list(options)))

    def start_agent(self, rank: int) -> Agent:
        agent = self.latest[rank] = Agent(rank)
        self.agents.append(agent)
        return agent

    def send(self, agent: Agent) -> None:
        self.in_flight.append(agent.registration)

    def poll_view(self, agent: Agent, *, delivered: bool = False) -> None:
        before = agent.entered
        if agent.receive(self.view):
            if agent.entered != before:
                self.unknown_to_service.discard(agent)
            if delivered:
                self.change(register(self.state, agent.registration))
            else:
                self.send(agent)


def test_the_invariants_hold_under_random_faults() -> None:
    run_state_machine_as_test(
        SimulatedJob, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
    )


def test_a_program_that_finishes_before_it_enters_a_generation_breaks_that_generation() -> None:
    """Rank 1 is in generation 2, which rank 0 does not enter any more."""
    state = allocate(running(1, 1), Allocation(2, 2))
    state = register(state, registration(1, WAITING, 0))
    assert active(state) == (2, 2)
    state = register(register(state, registration(1, RUNNING, 2)), registration(0, FINISHED, 1))
    assert state.complete
    assert state.view(1).has_ended(2)
