"""Rendezvous: a table of cases for each rule, then invariants of a simulated job under random faults."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from adascale_core.batch.plans import is_valid_replicas
from adascale_core.messages.allocation import ActiveAllocation, Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.rendezvous.instruction import Instruction, instruction, is_taken_for_lost
from adascale_core.rendezvous.rendezvous import (
    DEPARTED_STATES,
    EXITED_STATES,
    Rendezvous,
    StaleAllocationError,
    VersionMismatchError,
    allocate,
    declare,
    expire,
    register,
    report,
)
from adascale_core.rendezvous.slow_places import MAX_PAUSE, MEMORY, MIN_PAUSE, SlowPlaces
from support.examples import examples

WAITING, RUNNING, HOLDING, REENTERING, LOST = (
    ReplicaState.WAITING,
    ReplicaState.RUNNING,
    ReplicaState.HOLDING,
    ReplicaState.REENTERING,
    ReplicaState.LOST,
)
FAILED, TERMINATED, FINISHED = ReplicaState.FAILED, ReplicaState.TERMINATED, ReplicaState.FINISHED
ELASTIC = JobSpec(8, 64, (1, 8), max_replicas=8)
"""All replica counts up to 8 are valid."""


def registration(
    replica: int,
    replica_state: ReplicaState,
    generation: int = 0,
    *,
    trainer: str = "",
    lost: tuple[int, ...] = (),
    rank: int | None = None,
    replicas: int | None = None,
    stepped: int = 0,
) -> Registration:
    """The registration of an agent; by default, each replica has one trainer."""
    trainer = trainer or f"trainer-{replica}"
    return Registration(
        *(replica, trainer, replica_state, generation, f"host-{replica}", 1000 + replica),
        step=7 if replica_state is HOLDING else None,
        lost=lost,
        rank=replica if rank is None and generation else rank,
        replicas=replicas,
        stepped=stepped,
    )


def holding(replica: int, generation: int, *lost: int) -> Registration:
    """The registration of a replica that has lost peers and holds its state."""
    return registration(replica, HOLDING, generation, lost=lost)


def after(
    state: Rendezvous, *events: Registration | Allocation, spec: JobSpec | None = ELASTIC
) -> Rendezvous:
    """Return the state after registrations and allocations, in order."""
    for event in events:
        rule = allocate if isinstance(event, Allocation) else register
        state = rule(state, event, spec)  # type: ignore[arg-type]
    return state


def running(generation: int, replicas: int, *, spec: JobSpec | None = ELASTIC) -> Rendezvous:
    """Return the state of a job whose trainers run in `generation`, its first."""
    indices = range(replicas)
    return after(
        Rendezvous(),
        *(registration(index, WAITING) for index in indices),
        Allocation(generation, replicas),
        *(registration(index, RUNNING, generation) for index in indices),
        spec=spec,
    )


def active(state: Rendezvous) -> tuple[int, list[int]] | None:
    """Generation and members of the active allocation, by rank; None if it is broken."""
    if state.active is None or state.broken:
        return None
    return state.active.generation, [member.replica for member in state.active.members]


def desired(state: Rendezvous) -> tuple[int, int] | None:
    """Generation and replicas of the desired allocation."""
    return (state.desired.generation, state.desired.replicas) if state.desired else None


# -- activation -----------------------------------------------------------------------------------------


def test_a_generation_has_the_spec_that_was_declared_when_it_became_active() -> None:
    first, second = JobSpec(8, 16, (4, 8), max_replicas=4), JobSpec(8, 64, (8, 16), max_replicas=4)

    def active_spec(state: Rendezvous) -> JobSpec | None:
        assert state.active is not None
        return state.active.spec

    state = register(allocate(Rendezvous(), Allocation(1, 1), first), registration(0, WAITING), first)
    assert active_spec(state) == first
    state = register(state, registration(0, RUNNING, 1), second)
    assert active_spec(state) == first, "a changed spec is for the next generation"
    state = allocate(state, Allocation(2, 2), second)
    assert active_spec(state) == first, "generation 2 is not active yet"
    state = register(state, registration(1, WAITING), second)
    assert (active(state), active_spec(state)) == ((2, [0, 1]), second)


def test_a_generation_whose_count_the_new_spec_does_not_allow_keeps_the_previous_spec() -> None:
    first, at_most_one = JobSpec(8, 64, max_replicas=4), JobSpec(8, 8, (8, 8))
    state = register(allocate(Rendezvous(), Allocation(1, 1), first), registration(0, WAITING), first)
    state = allocate(register(state, registration(0, RUNNING, 1), first), Allocation(2, 2), at_most_one)
    state = register(state, registration(1, WAITING), at_most_one)
    assert state.active is not None
    assert (active(state), state.active.spec) == ((2, [0, 1]), first)


def test_nothing_is_active_before_the_first_allocation() -> None:
    assert active(after(Rendezvous(), registration(0, WAITING))) is None


def test_the_first_generation_begins_with_the_last_of_its_replicas() -> None:
    state = after(Rendezvous(), Allocation(1, 2), registration(1, WAITING))
    assert active(state) is None
    state = after(state, registration(0, WAITING))
    assert active(state) == (1, [0, 1])
    assert state.active is not None
    assert not state.active.has_state
    member = state.active.members[1]
    assert (member.instance, member.address, member.port) == ("trainer-1", "host-1", 1001)


def test_training_continues_until_all_joiners_are_ready() -> None:
    state = after(running(1, 1), Allocation(2, 4), registration(1, WAITING), registration(3, WAITING))
    assert active(state) == (1, [0])
    assert not state.view(1).has_ended(1)
    assert active(after(state, registration(2, WAITING))) == (2, [0, 1, 2, 3])


def test_members_that_stay_hold_the_state_and_come_first() -> None:
    state = after(running(1, 2), Allocation(2, 3), registration(2, WAITING))
    assert state.active is not None
    assert [member.holds for member in state.active.members] == [True, True, False]
    assert state.active.rank_of(2, "trainer-2") == 2
    assert state.active.rank_of(2, "other") is None
    assert state.active.rank_of(5, "trainer-5") is None


def test_the_next_generation_waits_until_all_members_run_in_the_present_one() -> None:
    state = after(running(1, 2), Allocation(2, 3), registration(2, WAITING), Allocation(3, 1))
    state = after(state, registration(0, RUNNING, 2), registration(1, RUNNING, 2))
    assert active(state) == (2, [0, 1, 2])
    assert active(after(state, registration(2, RUNNING, 2))) == (3, [0])


def test_surplus_replicas_are_not_admitted_to_the_next_generation() -> None:
    view = after(running(1, 2), Allocation(2, 1)).view(1)
    assert view.has_ended(1)
    assert view.active is not None
    assert view.active.admits(0, "trainer-0")
    assert not view.active.admits(1, "trainer-1")
    assert not view.active.admits(0, "next")


def test_an_allocation_of_the_same_count_begins_a_generation_with_the_same_members() -> None:
    assert active(after(running(1, 2), Allocation(2, 2))) == (2, [0, 1])


def test_a_failed_job_stays_failed_until_it_gets_another_allocation() -> None:
    failed = Allocation(2, 0, failed=True)
    state = after(running(1, 2), failed, failed)
    assert (active(state), state.desired) == ((2, []), failed)
    assert Rendezvous.from_json(json.loads(json.dumps(state.to_json()))) == state
    with pytest.raises(StaleAllocationError):
        allocate(state, Allocation(2, 0))
    assert allocate(state, Allocation(3, 1)).desired == Allocation(3, 1)


@pytest.mark.parametrize("ended", [REENTERING, TERMINATED])
def test_a_pause_is_no_disruption(ended: ReplicaState) -> None:
    state = after(running(1, 2), Allocation(2, 0), registration(0, ended, 1), registration(1, ended, 1))
    state = after(state, registration(0, WAITING, trainer="a"), registration(1, WAITING, trainer="b"))
    state = after(state, Allocation(3, 2), registration(0, RUNNING, 3, trainer="a"))
    assert active(state) == (3, [0, 1])
    assert (state.failures, state.disruptions, state.restarts_without_progress) == (0, 0, 0)


def test_an_allocation_of_zero_replicas_is_active_at_once() -> None:
    state = after(running(1, 2), Allocation(2, 0))
    assert active(state) == (2, [])
    assert state.view(1).has_ended(1)
    state = after(state, registration(0, REENTERING, 1), registration(1, REENTERING, 1), Allocation(3, 2))
    assert active(state) == (2, [])
    state = after(state, registration(0, WAITING, trainer="a"), registration(1, WAITING, trainer="b"))
    assert active(state) == (3, [0, 1])
    assert active(after(Rendezvous(), Allocation(1, 0))) == (1, [])


@pytest.mark.parametrize("replica_state", sorted(EXITED_STATES | DEPARTED_STATES))
def test_a_replica_whose_trainer_has_ended_is_absent(replica_state: ReplicaState) -> None:
    state = after(running(1, 1), registration(1, replica_state), Allocation(2, 2))
    assert active(state) == (1, [0])
    assert active(after(state, registration(1, WAITING, trainer="next"))) == (2, [0, 1])


def test_state_moves_to_a_joiner_before_the_last_replica_with_state_goes() -> None:
    """Replica 0 was lost, so that only replicas 1 and 2 have state; then one replica is desired."""
    state = after(
        running(1, 3),
        holding(1, 1, 0),
        holding(2, 1, 0),
        registration(1, RUNNING, 2),
        registration(2, RUNNING, 2),
    )
    assert active(state) == (2, [1, 2])
    state = after(state, Allocation(4, 1))
    assert active(state) == (2, [1, 2]), "replica 0 is not there"
    state = after(state, registration(0, WAITING, trainer="next"))
    assert active(state) == (4, [1, 0])
    state = after(state, registration(1, RUNNING, 4), registration(0, RUNNING, 4, trainer="next"))
    assert active(state) == (5, [0])
    assert desired(state) == (5, 1)


# -- the desired allocation -----------------------------------------------------------------------------


def test_the_same_allocation_may_be_written_again() -> None:
    state = running(1, 2)
    assert allocate(state, Allocation(1, 2)) == state


@pytest.mark.parametrize("stale", [Allocation(3, 1), Allocation(2, 4), Allocation(0, 2)])
def test_a_stale_allocation_is_rejected_with_advice(stale: Allocation) -> None:
    with pytest.raises(StaleAllocationError, match=r"generation 3 \(2 replicas\).*write generation 4"):
        allocate(running(3, 2), stale)


# -- losses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replica_state", sorted(DEPARTED_STATES))
def test_the_others_continue_without_a_replica_that_leaves(replica_state: ReplicaState) -> None:
    state = after(running(3, 3), registration(1, replica_state, 3))
    assert active(state) is None
    assert desired(state) == (4, 3), "the count stays desired"
    assert state.view(1).has_ended(3)
    state = after(state, holding(2, 3))
    assert active(state) is None, "replica 0 is not accounted for"
    state = after(state, holding(0, 3))
    assert active(state) == (4, [0, 2])
    assert desired(state) == (5, 3)
    assert state.active is not None
    assert state.active.has_state


def test_a_replacement_joins_after_a_loss_by_a_planned_change() -> None:
    state = after(running(1, 3), registration(0, LOST, 1), holding(1, 1), holding(2, 1))
    state = after(state, registration(0, WAITING, trainer="next"))
    assert active(state) == (2, [1, 2])
    state = after(state, registration(1, RUNNING, 2), registration(2, RUNNING, 2))
    assert active(state) == (3, [1, 2, 0])
    assert desired(state) == (3, 3)


def test_a_member_that_another_reports_as_lost_is_left_out_at_once_and_for_ever() -> None:
    state = after(running(1, 3), holding(0, 1, 2), holding(1, 1))
    assert active(state) == (2, [0, 1])
    state = after(state, registration(0, RUNNING, 2), registration(1, RUNNING, 2), holding(2, 1, 0, 1))
    assert active(state) == (2, [0, 1]), "it was only frozen; its generation has ended"
    assert state.view(1).has_ended(1)
    state = after(state, registration(2, REENTERING, 1), registration(2, WAITING, trainer="next"))
    assert active(state) == (3, [0, 1, 2])


def test_members_that_report_each_other_as_lost_both_stay() -> None:
    state = after(running(1, 2), registration(0, RUNNING, 1), holding(0, 1))
    state = after(state, holding(1, 1, 0))
    assert active(state) == (2, [0, 1])


def test_a_joiner_that_another_reports_as_lost_takes_part_in_no_later_generation() -> None:
    state = after(running(1, 1), Allocation(2, 2), registration(1, WAITING), holding(0, 2, 1))
    assert active(state) == (3, [0])
    state = after(state, registration(0, RUNNING, 3), registration(1, WAITING))
    assert active(state) == (3, [0])
    assert state.member_view(1, "trainer-1").left_out
    assert not state.member_view(1, "trainer-0").left_out
    assert active(after(state, registration(1, WAITING, trainer="next"))) == (4, [0, 1])


def test_a_member_that_holds_while_it_moves_is_accounted_for() -> None:
    state = after(running(1, 2), Allocation(2, 3), registration(2, WAITING))
    assert active(state) == (2, [0, 1, 2])
    state = after(state, holding(0, 1, 1))
    assert active(state) == (2, [0, 1, 2]), "it has not noticed generation 2"
    state = after(state, registration(1, LOST, 1), holding(0, 2, 1))
    assert active(state) is None, "replica 2 may have got the state"
    state = after(state, replace(holding(2, 2), step=None))
    assert active(state) == (3, [0, 2])
    assert state.active is not None
    assert [member.holds for member in state.active.members] == [True, False]


def test_a_fixed_size_waits_for_the_replacement_with_its_state() -> None:
    fixed = JobSpec(8, min_replicas=2, max_replicas=2)
    state = after(running(1, 2, spec=fixed), holding(1, 1, 0), spec=fixed)
    assert active(state) is None
    state = after(state, registration(0, LOST, 1), registration(0, WAITING, trainer="next"), spec=fixed)
    assert active(state) == (2, [1, 0])
    assert desired(state) == (2, 2)


def test_a_fixed_size_tries_a_joiner_again_that_was_late_but_answers() -> None:
    fixed = JobSpec(8, min_replicas=2, max_replicas=2)
    lost = registration(0, LOST, 1)
    state = after(running(1, 2, spec=fixed), holding(1, 1, 0), lost, spec=fixed)
    state = after(state, registration(0, WAITING, trainer="next"), spec=fixed)
    assert active(state) == (2, [1, 0])
    state = after(state, holding(1, 2, 0), spec=fixed)
    assert active(state) is None, "replica 0 has not answered"
    late = replace(registration(0, HOLDING, 2, trainer="next"), step=None)
    assert active(after(state, late, spec=fixed)) == (3, [1, 0])


@pytest.mark.parametrize(
    ("spec", "replicas", "there", "size"),
    [
        (JobSpec(8, max_replicas=8), 8, 7, 4),  # the divisors of 8
        (JobSpec(8, 64, (8, 8), max_replicas=8), 4, 3, 3),
        (JobSpec(8, 64, (1, 8), min_replicas=3, max_replicas=8), 4, 3, 3),
        (JobSpec(8, 64, (1, 8), min_replicas=3, max_replicas=8), 3, 2, 0),
        (None, 3, 2, 0),  # nothing is known about valid counts
    ],
)
def test_the_count_after_a_loss_is_the_largest_valid_one(
    spec: JobSpec | None, replicas: int, there: int, size: int
) -> None:
    lost = range(there, replicas)
    state = after(running(1, replicas, spec=spec), *(holding(i, 1, *lost) for i in range(there)), spec=spec)
    assert active(state) == ((2, list(range(size))) if size else None)


def test_waiting_replicas_fill_the_places_of_the_lost() -> None:
    state = after(running(1, 2), Allocation(2, 4), registration(3, WAITING), holding(0, 1, 1))
    assert active(state) == (2, [0, 3])
    assert desired(state) == (3, 4)


def with_spares(replicas: int, spares: int, *, spec: JobSpec = ELASTIC) -> Rendezvous:
    """Return the state of a job that trains in generation 1 on the first replicas; the others wait."""
    return after(
        Rendezvous(),
        *(registration(index, WAITING) for index in range(replicas + spares)),
        Allocation(1, replicas, spares=spares),
        *(registration(index, RUNNING, 1) for index in range(replicas)),
        spec=spec,
    )


def test_a_spare_takes_the_place_of_a_lost_member_and_the_replacement_is_the_next_spare() -> None:
    state = with_spares(3, 1)
    assert active(state) == (1, [0, 1, 2])
    state = after(state, holding(0, 1, 1), holding(2, 1, 1))
    assert (active(state), desired(state)) == ((2, [0, 2, 3]), (2, 3)), "no planned change follows"
    assert state.active is not None
    assert [member.holds for member in state.active.members] == [True, True, False]
    state = after(state, *(registration(index, RUNNING, 2) for index in (0, 2, 3)))
    state = after(state, registration(1, LOST, 1), registration(1, WAITING, trainer="next"))
    assert (active(state), state.disruptions) == ((2, [0, 2, 3]), 1), "it waits"
    state = after(state, holding(2, 2, 0), registration(0, LOST, 2), holding(3, 2, 0))
    assert active(state) == (3, [2, 3, 1])


def test_a_fixed_size_continues_at_once_with_a_spare() -> None:
    spec = JobSpec(8, max_replicas=8, min_replicas=4)
    state = after(with_spares(4, 1, spec=spec), *(holding(index, 1, 3) for index in range(3)), spec=spec)
    assert active(state) == (2, [0, 1, 2, 4])


def test_the_first_generation_begins_without_the_last_of_the_replicas_and_spares() -> None:
    state = after(Rendezvous(), Allocation(1, 2, spares=1), registration(2, WAITING))
    assert active(state) is None
    assert active(after(state, registration(0, WAITING))) == (1, [0, 2])


def test_growth_uses_spares_and_those_that_are_too_many_after_a_shrink_wait() -> None:
    state = after(with_spares(2, 1), Allocation(2, 3, spares=1))
    assert (active(state), desired(state)) == ((2, [0, 1, 2]), (2, 3))
    state = after(state, *(registration(index, RUNNING, 2) for index in range(3)))
    state = after(state, Allocation(3, 2, spares=1))
    assert active(state) == (3, [0, 1])
    next_spare = registration(2, WAITING, trainer="next")
    assert active(after(state, registration(2, REENTERING, 2), next_spare)) == (3, [0, 1])


def test_a_member_beyond_the_spares_leaves_when_the_count_falls() -> None:
    state = after(with_spares(3, 1), holding(0, 1, 2), holding(1, 1, 2))
    assert active(state) == (2, [0, 1, 3])
    state = after(state, *(registration(index, RUNNING, 2) for index in (0, 1, 3)))
    assert active(after(state, Allocation(3, 2, spares=1))) == (3, [0, 1])


@pytest.mark.parametrize("replica_state", [LOST, FAILED, TERMINATED])
def test_a_spare_that_ends_interrupts_nothing_and_counts_as_nothing(replica_state: ReplicaState) -> None:
    state = after(with_spares(2, 1), registration(0, RUNNING, 1, stepped=1))
    for number in range(20):
        state = after(
            state,
            registration(2, replica_state, trainer=f"a.{number}"),
            registration(2, WAITING, trainer="a"),
        )
    assert active(state) == (1, [0, 1])
    assert (state.failures, state.disruptions) == (0, 0)
    following = after(state, Allocation(2, 2, spares=1))
    assert (active(following), following.restarts_without_progress) == ((2, [0, 1]), 0)


# -- slow replicas --------------------------------------------------------------------------------------

NOW = 1_800_000_000.0
DAY = 86_400.0


def reported(generation: int, slow: int | None, replicas: int = 3) -> GainReport:
    """A report of rank 0 that names a slow replica, or none."""
    factor = 1.3 if slow is not None else None
    numbers = (generation, 10, 500.0, 0, replicas, 8, 1, 2.0, 2.0, 1.0, 2.0, 0.1, 1.0)
    return GainReport(*numbers, slow_replica=slow, slow_factor=factor)


def after_report(state: Rendezvous, slow: int | None, now: float = NOW) -> Rendezvous:
    """Return the state after a report in the active generation."""
    assert state.active is not None
    return report(state, reported(state.active.generation, slow), ELASTIC, now=now)


def settled(state: Rendezvous) -> Rendezvous:
    """Return the state after the members run in the active generation, and all others wait again."""
    assert state.active is not None
    assert state.desired is not None
    members, generation = state.active.indices, state.active.generation
    for index in state.desired.indices:
        before = state.replicas.get(index)
        if index in members:
            assert before is not None
            following = replace(before, state=RUNNING, generation=generation, stepped=generation)
        elif before is not None and before.state is WAITING:
            continue
        else:
            following = registration(index, WAITING, trainer=f"trainer-{index}-after-{generation}")
            if before is not None:
                state = after(state, replace(before, state=REENTERING))
                following = replace(following, node=before.node, accelerator=before.accelerator)
        state = after(state, following)
    return state


def places(state: Rendezvous) -> list[int]:
    """The replicas that are known to be slow."""
    return [each.replica for each in state.slow_places.places]


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_spare_that_waits_takes_the_place_of_a_slow_member_in_a_planned_change(slow: int) -> None:
    before = with_spares(3, 1)
    state = after_report(before, slow)
    others = [index for index in range(3) if index != slow]
    assert (active(state), desired(state)) == ((2, [*others, 3]), (2, 3))
    assert (state.disruptions, state.failures, places(state)) == (0, 0, [slow])
    assert state.active is not None
    assert [member.holds for member in state.active.members] == [True, True, False]
    replacement = state.active.slow_replacement
    assert replacement is not None
    assert (replacement.replica, replacement.instance, replacement.spare) == (slow, f"trainer-{slow}", 3)
    view = state.view(1)
    done = instruction(view, slow, f"trainer-{slow}", 1, holds=False)
    assert done is Instruction.RELEASE
    state = settled(state)
    assert active(state) == (2, [*others, 3]), "the slow replica waits as a spare"
    assert Rendezvous.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert AllocationView.from_json(json.loads(json.dumps(view.to_json()))) == view


@pytest.mark.parametrize(
    ("state", "is_lost"),
    [
        pytest.param(after_report(with_spares(3, 1), 2), False, id="a spare has the place of a slow member"),
        pytest.param(after_report(with_spares(3, 1), 1), True, id="that was another member"),
        pytest.param(after(with_spares(3, 1), holding(0, 1, 2), holding(1, 1, 2)), True, id="lost"),
        pytest.param(after(with_spares(3, 1), Allocation(2, 2, spares=2)), False, id="it becomes a spare"),
        pytest.param(after(with_spares(3, 1), Allocation(2, 2)), False, id="it is not desired"),
        pytest.param(after(with_spares(3, 1), Allocation(2, 0)), False, id="suspended"),
    ],
)
def test_a_trainer_that_is_released_was_lost_unless_the_change_is_planned(
    state: Rendezvous, is_lost: bool
) -> None:
    before = with_spares(3, 1).active
    assert is_taken_for_lost(state.view(1), 2, "trainer-2", before) is is_lost


@pytest.mark.parametrize(
    ("state", "slow", "generation"),
    [
        pytest.param(with_spares(3, 1), None, 1, id="no replica is slow"),
        pytest.param(running(1, 3), 1, 1, id="no spares"),
        pytest.param(after(with_spares(3, 1), registration(3, LOST)), 1, 1, id="no spare waits"),
        pytest.param(with_spares(3, 1), 3, 1, id="it is no member"),
        pytest.param(settled(after(with_spares(3, 1), Allocation(2, 3, spares=1))), 1, 1, id="a late report"),
        pytest.param(after(with_spares(3, 1), Allocation(2, 5)), 1, 1, id="a change is in progress"),
        pytest.param(
            after(after_report(with_spares(3, 2), 0), *(registration(index, RUNNING, 2) for index in (1, 2))),
            1,
            2,
            id="a member does not run yet",
        ),
        pytest.param(
            after(with_spares(3, 1, spec=JobSpec(8, max_replicas=8, min_replicas=3)), holding(0, 1, 1)),
            2,
            1,
            id="a member is lost",
        ),
        pytest.param(replace(with_spares(3, 1), complete=True), 1, 1, id="the program has finished"),
    ],
)
def test_a_report_changes_nothing_if(state: Rendezvous, slow: int | None, generation: int) -> None:
    assert report(state, reported(generation, slow), ELASTIC, now=NOW + MIN_PAUSE) == state


def test_a_replica_that_was_slow_takes_the_place_of_no_slow_member_while_it_is_known() -> None:
    state = settled(after_report(with_spares(3, 1), 1))
    assert active(state) == (2, [0, 2, 3])
    for seconds in (1.0, MIN_PAUSE, MEMORY - 1.0):
        assert after_report(state, 2, NOW + seconds) == state
    state = after_report(state, 2, NOW + MEMORY)
    assert (active(state), places(state)) == ((3, [0, 3, 1]), [2])


def test_another_spare_takes_the_next_place_after_a_pause() -> None:
    state = settled(after_report(with_spares(3, 2), 0))
    assert after_report(state, 1, NOW + MIN_PAUSE - 1.0) == state
    state = settled(after_report(state, 1, NOW + MIN_PAUSE))
    assert (active(state), places(state)) == ((3, [2, 3, 4]), [0, 1])
    assert after_report(state, 2, NOW + 100.0) == state, "all spares were slow"


@pytest.mark.parametrize(
    ("events", "members"),
    [
        pytest.param([holding(0, 2, 3), holding(2, 2, 3)], [0, 2, 4], id="another spare is there"),
        pytest.param(
            [registration(4, LOST), holding(0, 2, 3), holding(2, 2, 3)], [0, 2, 1], id="nobody else is there"
        ),
        pytest.param([Allocation(3, 4, spares=1)], [0, 2, 3, 4], id="growth"),
        pytest.param([Allocation(3, 5)], [0, 2, 3, 4, 1], id="growth that needs it"),
    ],
)
def test_a_replica_that_was_slow_joins_after_the_others(
    events: Sequence[Registration | Allocation], members: list[int]
) -> None:
    state = settled(after_report(with_spares(3, 2), 1))
    assert active(after(state, *events)) == (3, members)


def test_of_members_that_are_too_many_those_that_were_slow_leave_first() -> None:
    state = settled(after_report(with_spares(2, 1), 0))
    state = settled(after(state, registration(1, LOST, 2), holding(2, 2, 1)))
    assert active(state) == (3, [2, 0]), "nobody else was there"
    state = settled(after(state, Allocation(4, 3, spares=1)))
    assert active(state) == (4, [2, 0, 1])
    assert active(after(state, Allocation(5, 2, spares=1))) == (5, [2, 1])


def test_a_slow_replica_is_slow_on_its_node_and_other_nodes_are_preferred() -> None:
    on = {index: registration(index, WAITING) for index in range(6)}
    for index, node in enumerate(["a", "b", "c", "a", "b", "c"]):
        on[index] = replace(on[index], node=node)
    members = (replace(on[index], state=RUNNING, generation=1) for index in range(3))
    state = after(Rendezvous(), *on.values(), Allocation(1, 3, spares=3), *members)
    state = settled(after_report(state, 0))
    assert active(state) == (2, [1, 2, 4]), "replica 3 is on the node of the slow one"
    state = settled(after_report(state, 2, NOW + MIN_PAUSE))
    assert active(state) == (3, [1, 4, 3]), "replica 5 is on such a node too"
    moved = replace(state.replicas[0], instance="elsewhere", node="d")
    state = settled(after_report(after(state, moved), 4, NOW + 300.0))
    assert active(state) == (4, [1, 3, 0])


@pytest.mark.parametrize(
    ("types", "members"),
    [
        pytest.param(["A", "A", "A", "A"], [0, 1, 3], id="one type"),
        pytest.param(["", "", "", ""], [0, 1, 3], id="unknown"),
        pytest.param(["A", "A", "B", "B"], None, id="the spare has its type"),
        pytest.param(["A", "A", "B", "A"], [0, 1, 3], id="the spare has the type of the others"),
        pytest.param(["A", "B", "A", "A"], None, id="of two types, the spare has its type"),
        pytest.param(["A", "B", "A", "B"], [0, 1, 3], id="of two types, the spare has the other one"),
        pytest.param(["A", "A", "A", "B"], None, id="nobody has the type of the spare"),
        pytest.param(["A", "A", "B", "C"], None, id="nobody has the type of the spare, of three"),
    ],
)
def test_on_several_types_of_accelerators_only_a_spare_of_another_type_may_help(
    types: list[str], members: list[int] | None
) -> None:
    each = [replace(registration(index, WAITING), accelerator=name) for index, name in enumerate(types)]
    state = after(Rendezvous(), *each, Allocation(1, 3, spares=1))
    state = after_report(settled(state), 2)
    assert active(state) == ((1, [0, 1, 2]) if members is None else (2, members))


def test_a_spare_takes_no_place_while_no_batch_of_this_count_fits_into_memory() -> None:
    state = with_spares(3, 1, spec=JobSpec(9, 9, (3, 3), max_replicas=3))
    state = replace(state, local_bsz_limits={"": 2})
    assert report(state, reported(1, 1), JobSpec(9, 9, (3, 3), max_replicas=3), now=NOW) == state


@given(
    st.integers(2, 4),
    st.integers(0, 3),
    st.lists(st.tuples(st.floats(1.0, 2 * MEMORY), st.integers(0, 6)), max_size=40),
)
def test_spares_take_places_of_slow_members_only_and_not_more_frequently_than_they_may(
    replicas: int, spares: int, reports: list[tuple[float, int]]
) -> None:
    state, now, changes = with_spares(replicas, spares), NOW, list[float]()
    for seconds, slow in reports:
        now += seconds
        before, state = state, after_report(state, slow, now)
        assert before.active is not None
        assert state.active is not None
        assert state.active.replicas == replicas
        if state.active == before.active:
            continue
        (joined,) = state.active.indices - before.active.indices
        assert before.active.indices - state.active.indices == {slow}
        assert joined not in places(state)
        assert not changes or now - changes[-1] >= MIN_PAUSE
        changes.append(now)
        assert len([each for each in changes if each > now - MEMORY]) <= spares
        state = settled(state)


def test_a_program_that_does_more_on_one_rank_changes_its_members_less_and_less() -> None:
    state, changes = with_spares(3, 3), list[float]()
    for seconds in range(0, 30 * int(DAY), 300):
        assert state.active is not None
        following = after_report(state, state.active.members[0].replica, NOW + seconds)
        if following.active != state.active:
            changes.append(seconds)
            following = settled(following)
        state = following
    assert len([each for each in changes if each <= DAY]) <= 12
    assert len([each for each in changes if each > 2 * DAY]) <= 28, "one in a day"


def test_the_pause_is_short_again_after_a_change_that_helped() -> None:
    slow, known = registration(1, RUNNING, 1), SlowPlaces()
    pauses, now = [], NOW
    for wait in (0.0, 100.0, 200.0, 300.0, 2 * MEMORY + 1.0, MIN_PAUSE):
        now += wait
        known = known.with_replaced(slow, now)
        pauses.append(known.pause)
    assert pauses == [60.0, 120.0, 240.0, 480.0, 60.0, 120.0]
    for _ in range(20):
        now += known.pause
        known = known.with_replaced(slow, now)
    assert known.pause == MAX_PAUSE
    assert len(known.places) == 1


def test_a_clock_that_is_set_back_keeps_no_replica_slow_for_longer() -> None:
    known = SlowPlaces().with_replaced(registration(1, RUNNING, 1), NOW)
    assert known.at(NOW - 1.0) == known, "another service's clock"
    assert not known.may_replace(NOW - 1.0)
    assert known.at(NOW - DAY).places == ()
    assert known.may_replace(NOW - DAY)


def test_after_the_loss_of_all_state_as_many_replicas_begin_from_the_checkpoint() -> None:
    state = after(running(1, 2), Allocation(2, 4), registration(0, LOST, 1), registration(1, LOST, 1))
    state = after(state, registration(1, WAITING, trainer="a"))
    assert active(state) is None
    state = after(state, registration(0, WAITING, trainer="b"))
    assert active(state) == (2, [0, 1])
    assert state.active is not None
    assert not state.active.has_state
    assert desired(state) == (3, 4)


@pytest.mark.parametrize(("replacement", "member"), [("another-agent.1", 1), ("agent.2", 0)])
def test_after_the_loss_of_all_state_a_replica_begins_whose_agent_may_have_a_copy(
    replacement: str, member: int
) -> None:
    """A spare before another agent of the lost replica, and the lost replica itself if its agent remains."""
    state = after(
        Rendezvous(),
        Allocation(1, 1, spares=1),
        replace(registration(0, WAITING, trainer="agent.1"), snapshot_port=40123),
        replace(registration(1, WAITING), snapshot_port=40124),
    )
    assert active(state) == (1, [0])
    # Neither trainer was lost before the other one was there.
    next_trainer = replace(registration(0, WAITING, trainer=replacement), snapshot_port=40123)
    state = after(state, registration(0, RUNNING, 1, trainer="agent.1"), next_trainer)
    assert active(state) == (2, [member])
    assert state.active is not None
    assert state.active.members[0].snapshot_port == 40123 + member


def test_after_the_loss_of_all_state_no_fewer_begin_than_the_job_requires_now() -> None:
    lost = (Allocation(2, 4), registration(0, LOST, 1), registration(0, WAITING, trainer="a"))
    more = replace(ELASTIC, min_replicas=2)
    assert active(after(running(1, 1), *lost)) == (2, [0])
    state = after(running(1, 1), *lost, spec=more)
    assert active(state) is None
    assert active(after(state, registration(1, WAITING), spec=more)) == (2, [1, 0])


@pytest.mark.parametrize("replica_state", [WAITING, RUNNING, LOST])
def test_a_trainer_that_replaces_another_breaks_its_generation(replica_state: ReplicaState) -> None:
    state = after(running(1, 2), registration(1, replica_state, trainer="next"))
    assert active(state) is None
    assert desired(state) == (2, 2)


@pytest.mark.parametrize("replica_state", sorted(DEPARTED_STATES))
def test_surplus_replicas_break_nothing_and_their_failures_do_not_count(replica_state: ReplicaState) -> None:
    state = after(running(1, 2), Allocation(2, 1), registration(1, replica_state, 1))
    assert active(state) == (2, [0])
    assert (state.failures, state.disruptions) == (0, 0)


# -- counting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "failures", "disruptions"),
    [
        ([FAILED], 1, 0),
        ([FAILED, FAILED], 1, 0),  # the same defect on all replicas
        ([FAILED, HOLDING], 1, 0),
        ([HOLDING, FAILED], 1, 0),  # the peer of the failed replica registers first
        ([HOLDING, FAILED, FAILED], 1, 0),
        ([LOST, LOST], 0, 1),
        ([TERMINATED, HOLDING, HOLDING], 0, 1),
    ],
)
def test_a_generation_counts_once_and_as_a_failure_if_the_program_failed(
    ends: list[ReplicaState], failures: int, disruptions: int
) -> None:
    state = after(
        running(1, 3), *(registration(index, replica_state, 1) for index, replica_state in enumerate(ends))
    )
    assert (state.failures, state.disruptions) == (failures, disruptions)


def test_a_failure_counts_also_if_the_others_have_left_the_replica_out_before() -> None:
    state = after(running(1, 2), holding(0, 1, 1))
    assert (active(state), state.disruptions) == ((2, [0]), 1)
    state = after(state, registration(1, FAILED, 1))
    assert (active(state), state.failures, state.disruptions) == ((2, [0]), 1, 0)


def too_large(state: Registration, limit: int, accelerator: str = "a") -> Registration:
    """The registration of a replica whose batch did not fit into memory."""
    return replace(state, local_bsz_limit=limit, accelerator=accelerator)


def on_type(state: Rendezvous, *accelerators: str) -> Rendezvous:
    """Return the state with replicas on these types of accelerators, on the type `a` by default."""
    return replace(
        state,
        replicas={
            index: replace(each, accelerator=accelerators[index] if accelerators else "a")
            for index, each in state.replicas.items()
        },
    )


def limit_of(state: Rendezvous) -> int | None:
    """The limit with which the active generation trains."""
    assert state.active is not None
    assert state.active.spec is not None
    return state.active.spec.local_bsz_limit


@pytest.mark.parametrize("first", [0, 1])
def test_members_continue_with_a_lower_limit_after_a_batch_of_one_did_not_fit(first: int) -> None:
    state = after(
        on_type(running(1, 2)),
        *(
            registration(index, HOLDING, 1) if index == first else too_large(holding(index, 1), 6)
            for index in (0, 1)
        ),
    )
    assert active(state) == (2, [0, 1])
    assert limit_of(state) == 6
    assert (state.failures, state.disruptions, state.restarts_without_progress) == (0, 0, 0)


def test_a_trainer_that_ended_because_a_batch_did_not_fit_is_neither_a_failure_nor_a_disruption() -> None:
    state = after(on_type(running(1, 2)), too_large(registration(1, REENTERING, 1), 3), holding(0, 1, 1))
    assert active(state) == (2, [0])
    assert limit_of(state) == 3
    assert (state.failures, state.disruptions, state.restarts_without_progress) == (0, 0, 0)


def test_limits_only_fall_and_hold_for_their_type_of_accelerator() -> None:
    state = on_type(running(1, 1))
    for limit, expected in ((6, 6), (7, 6), (4, 4)):
        state = register(state, too_large(registration(0, RUNNING, 1), limit), ELASTIC)
        assert state.local_bsz_limit == expected
    assert Rendezvous.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert on_type(state, "other").local_bsz_limit is None
    # A job that has no replicas at present may get any type.
    assert replace(state, replicas={}).local_bsz_limit == 4


@pytest.mark.parametrize(
    ("present", "reported", "expected"),
    [
        # the limit of the type of the reports, also if its replicas are on another type by now, or gone
        (["a"], "a", 6),
        (["b"], "a", 6),
        (["a"], "b", 4),
        (["a"], "c", None),
        ([], "a", 6),
        # of all types that its replicas have
        (["a", "b"], "a", 4),
        (["a", "c"], "c", 6),
        # the type of the reports is not known
        (["a"], "", 6),
        ([], "", 4),
    ],
)
def test_predictions_have_the_limit_of_the_type_that_was_measured(
    present: Sequence[str], reported: str, expected: int | None
) -> None:
    state = running(1, len(present)) if present else Rendezvous()
    state = replace(on_type(state, *present), local_bsz_limits={"a": 6, "b": 4})
    assert state.local_bsz_limit_of_report(reported) == expected


def test_limits_are_learned_again_with_other_batch_sizes() -> None:
    state = register(on_type(running(1, 1)), too_large(registration(0, RUNNING, 1), 4), ELASTIC)
    assert declare(state, ELASTIC, replace(ELASTIC, max_replicas=4)).local_bsz_limit == 4
    assert declare(state, ELASTIC, replace(ELASTIC, local_bsz_bounds=(1, 16))).local_bsz_limit is None


def test_a_count_whose_batches_do_not_fit_waits_for_another_decision() -> None:
    spec = JobSpec(8, 64, (5, 8), max_replicas=8)
    state = after(on_type(running(1, 1, spec=spec)), too_large(holding(0, 1), 7), spec=spec)
    assert active(state) is None, "one replica needs 8 = 1 x 8 samples"
    joiner = replace(registration(1, WAITING), accelerator="a")
    state = after(state, Allocation(3, 2), joiner, spec=spec)
    assert active(state) == (3, [0, 1])
    assert limit_of(state) == 7


def test_restarts_without_progress_are_counted_until_the_next_step() -> None:
    state = running(1, 1)
    for generation in range(2, 5):
        name = f"{generation}"
        state = after(
            state,
            registration(
                0, LOST, generation - 1, trainer="trainer-0" if generation == 2 else f"{generation - 1}"
            ),
            registration(0, WAITING, trainer=name),
            registration(0, RUNNING, generation, trainer=name),
        )
        assert state.restarts_without_progress == generation - 1
    state = after(state, registration(0, RUNNING, 4, trainer="4", stepped=4))
    assert state.restarts_without_progress == 0
    state = after(state, registration(0, LOST, 4, trainer="4", stepped=4))
    assert state.restarts_without_progress == 0, "generation 4 has made a step"


def test_trainers_that_are_killed_before_any_generation_are_counted() -> None:
    state = after(Rendezvous(), Allocation(1, 2), *(registration(0, LOST, trainer=f"{i}") for i in range(3)))
    assert state.restarts_without_progress == 3
    state = after(state, registration(0, LOST, trainer="2"))
    assert state.restarts_without_progress == 3, "the same trainer"


def test_a_replica_that_cannot_join_does_not_count_while_the_others_make_steps() -> None:
    state = after(running(1, 1), registration(0, RUNNING, 1, stepped=1), Allocation(2, 2))
    state = after(state, *(registration(1, LOST, trainer=f"{i}") for i in range(9)))
    assert state.restarts_without_progress == 0
    assert after(state, registration(0, LOST, 1, stepped=1)).restarts_without_progress == 0


# -- versions and the secret ----------------------------------------------------------------------------


def test_another_version_is_refused_while_members_train_and_both_are_named() -> None:
    state = after(running(1, 1), replace(registration(0, RUNNING, 1), version="1.0"), Allocation(2, 2))
    with pytest.raises(VersionMismatchError, match=r"replica 1 has adascale 2.0.*replica 0.*has 1.0"):
        after(state, replace(registration(1, WAITING), version="2.0"))
    assert active(after(state, replace(registration(1, WAITING), version="1.0"))) == (2, [0, 1])
    gone = after(state, replace(registration(0, LOST, 1), version="1.0"))
    after(gone, replace(registration(1, WAITING), version="2.0"))


def test_the_first_secret_becomes_the_jobs_and_only_agents_get_it() -> None:
    state = after(Rendezvous(), replace(registration(0, WAITING), key="first"))
    state = after(state, replace(registration(1, WAITING), key="second"))
    assert state.member_view(1, "").key == "first"
    assert "first" not in json.dumps(state.view(1).to_json())
    assert all(not replica.key for replica in state.replicas.values())


# -- expiry ---------------------------------------------------------------------------------------------


def test_the_expiry_of_an_agent_does_not_interrupt_training() -> None:
    state = expire(running(1, 2), [1], ELASTIC)
    assert active(state) == (1, [0, 1])
    assert 1 not in state.replicas
    assert expire(state, [1]) == state
    assert after(state, registration(1, RUNNING, 1)) == running(1, 2)


def test_the_expiry_of_all_members_breaks_the_generation() -> None:
    state = expire(expire(running(1, 2), [1], ELASTIC), [0], ELASTIC)
    assert active(state) is None
    assert state.disruptions == 1
    assert active(after(state, holding(0, 1))) == (2, [0]), "it was only slow"


def test_an_expired_member_is_accounted_for_after_a_loss() -> None:
    state = after(running(1, 3), registration(1, LOST, 1), holding(0, 1))
    assert active(state) is None
    assert active(expire(state, [2], ELASTIC)) == (2, [0])


def test_an_expired_replica_is_absent_until_it_registers_again() -> None:
    state = expire(after(running(1, 1), registration(1, WAITING)), [1])
    state = after(state, Allocation(2, 2))
    assert active(state) == (1, [0])
    assert active(after(state, registration(1, WAITING))) == (2, [0, 1])


# -- late registrations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newer", "late"),
    [
        (registration(1, RUNNING, 1), registration(1, WAITING)),
        (registration(1, HOLDING, 1), registration(1, RUNNING, 1)),
        (registration(1, LOST, 1), registration(1, RUNNING, 1)),
        (registration(1, LOST, 1), registration(1, HOLDING, 1)),
        (registration(1, REENTERING, 1), registration(1, RUNNING, 1)),
        (registration(1, FAILED, 1), registration(1, LOST, 1)),
        (registration(1, TERMINATED, 1), registration(1, REENTERING, 1)),
        (registration(1, FINISHED, 1), registration(1, RUNNING, 1)),
        (registration(0, FINISHED, 1), registration(0, RUNNING, 1)),
        (registration(1, HOLDING, 1, lost=(0, 2)), registration(1, HOLDING, 1, lost=(0,))),
        (registration(1, RUNNING, 1, stepped=1), registration(1, RUNNING, 1)),
    ],
)
def test_a_delayed_registration_changes_nothing(newer: Registration, late: Registration) -> None:
    state = after(running(1, 3), newer)
    assert after(state, late) == state
    assert after(state, newer) == state


def test_registrations_of_a_replaced_trainer_are_ignored() -> None:
    state = after(running(1, 2), registration(1, WAITING, trainer="next"), holding(0, 1))
    assert active(state) == (2, [0, 1])
    for replica_state in ReplicaState:
        assert after(state, registration(1, replica_state, 1)) == state


# -- completion -----------------------------------------------------------------------------------------


def test_a_job_is_complete_when_rank_0_has_finished_and_remains_complete() -> None:
    done = after(running(1, 2), registration(0, FINISHED, 1))
    assert done.complete
    for state in (
        after(done, registration(0, WAITING, trainer="next")),
        after(done, registration(0, FAILED, 1)),
        after(done, registration(1, FAILED, 1)),
        after(done, registration(1, LOST, 1)),
        after(done, registration(1, WAITING, trainer="next")),
        expire(done, [0, 1]),
        after(done, Allocation(2, 2)),
    ):
        assert state.complete
        assert active(state) == (1, [0, 1])
        assert (state.failures, state.disruptions) == (0, 0)


def test_rank_0_need_not_be_the_replica_with_index_0() -> None:
    state = after(running(1, 3), registration(0, LOST, 1), holding(1, 1), holding(2, 1))
    assert active(state) == (2, [1, 2])
    assert not after(state, registration(2, FINISHED, 2, rank=1)).complete
    assert after(state, registration(1, FINISHED, 2, rank=0)).complete


def test_a_rank_other_than_0_that_finishes_neither_completes_the_job_nor_breaks_the_generation() -> None:
    state = after(running(1, 2), registration(1, FINISHED, 1))
    assert not state.complete
    assert active(state) == (1, [0, 1])


def test_a_program_that_finishes_before_it_enters_a_generation_breaks_that_generation() -> None:
    state = after(running(1, 1), Allocation(2, 2), registration(1, WAITING))
    assert active(state) == (2, [0, 1])
    state = after(state, registration(0, FINISHED, 1))
    assert state.complete
    assert state.view(1).has_ended(2)


def test_a_trainer_that_was_left_out_cannot_complete_the_job() -> None:
    state = after(running(1, 2), holding(1, 1, 0))
    assert active(state) == (2, [1])
    assert not after(state, registration(0, FINISHED, 1)).complete


# -- after a loss of the service's data -----------------------------------------------------------------


def in_generation(replica: int, generation: int, replicas: int, rank: int | None = None) -> Registration:
    return registration(replica, RUNNING, generation, replicas=replicas, rank=rank)


def test_after_a_loss_of_data_the_running_generation_becomes_active() -> None:
    state = after(Rendezvous(), Allocation(5, 2), in_generation(1, 5, 2, rank=0))
    assert active(state) is None
    state = after(state, in_generation(0, 5, 2, rank=1))
    assert active(state) == (5, [1, 0])
    assert not state.view(1).has_ended(5)
    assert active(after(state, Allocation(6, 1))) == (6, [0])


def test_after_a_loss_of_data_running_replicas_move_to_a_newer_allocation() -> None:
    state = after(Rendezvous(), Allocation(6, 2), in_generation(0, 5, 1), registration(1, WAITING))
    assert active(state) == (6, [0, 1])
    assert state.active is not None
    assert state.active.has_state


def test_after_a_loss_of_data_members_that_hold_continue() -> None:
    held = replace(holding(1, 5, 0), replicas=2, rank=1)
    state = after(Rendezvous(), Allocation(1, 2), held)
    assert active(state) == (6, [1])
    assert desired(state) == (7, 2)


def test_trainers_with_newer_state_take_the_place_of_a_generation_begun_without_them() -> None:
    state = after(Rendezvous(), registration(0, WAITING), Allocation(1, 1))
    assert active(state) == (1, [0])
    state = after(state, in_generation(1, 5, 1, rank=0))
    assert active(state) == (6, [1, 0]), "replica 1 gives its state to replica 0, which stays"
    assert state.view(1).has_ended(1)


# -- JSON -----------------------------------------------------------------------------------------------


def test_the_state_is_equal_after_a_round_trip_through_json() -> None:
    state = after(
        running(1, 3),
        registration(2, WAITING, trainer="next"),
        registration(0, FAILED, 1),
        replace(holding(1, 1, 0), key="secret"),
        registration(4, LOST),
    )
    state = expire(state, [1])
    assert state.replaced
    assert state.left_out
    assert state.expired
    assert state.deaths
    assert Rendezvous.from_json(json.loads(json.dumps(state.to_json()))) == state


# -- a job under random faults --------------------------------------------------------------------------

T = TypeVar("T")
REPLICAS, SPARES = 4, 2
SPECS = (None, ELASTIC, JobSpec(4, max_replicas=4), JobSpec(8, 64, (1, 8), min_replicas=2, max_replicas=8))
_unique = count(1)


@dataclass(eq=False)
class Trainer:
    """A simulated trainer process."""

    replica: int
    agent: str
    instance: str = ""
    state: ReplicaState = WAITING
    generation: int = 0
    """As it reports."""
    assignment: ActiveAllocation | None = None
    step: int | None = None
    """Of its state; None if it has none."""
    lost: frozenset[int] = frozenset()
    stepped: int = 0
    frozen: bool = False

    def __post_init__(self) -> None:
        self.instance = f"{self.agent}.{next(_unique)}"

    @property
    def assigned(self) -> int:
        """The newest generation that it knows."""
        return max(self.assignment.generation if self.assignment else 0, self.generation)

    @property
    def runs(self) -> bool:
        """Whether it trains in its newest generation."""
        return self.state is RUNNING and self.generation == self.assigned

    def hold(self, generation: int, lost: frozenset[int] = frozenset()) -> None:
        """Hold, unless it does already, and report the loss of peers."""
        if not self.frozen:
            before = self.lost if (self.state, self.generation) == (HOLDING, generation) else frozenset()
            self.state, self.generation, self.lost = HOLDING, generation, before | lost


@dataclass(eq=False)
class Agent:
    """A simulated agent: it receives views, starts trainers and sends registrations."""

    replica: int
    trainer: Trainer
    view: AllocationView | None = None
    alive: bool = True

    @property
    def registration(self) -> Registration:
        trainer = self.trainer
        return Registration(
            *(self.replica, trainer.instance, trainer.state, trainer.generation, "host", 1),
            assigned=trainer.assigned,
            step=trainer.step if trainer.state is HOLDING else None,
            lost=tuple(sorted(trainer.lost)) if trainer.state is HOLDING else (),
            stepped=trainer.stepped,
            rank=trainer.assignment.rank_of(self.replica, trainer.instance) if trainer.assignment else None,
            replicas=trainer.assignment.replicas if trainer.assignment else None,
        )

    @property
    def has_trainer(self) -> bool:
        return self.alive and self.trainer.state not in DEPARTED_STATES | EXITED_STATES

    def receive(self, view: AllocationView) -> None:
        """Act on a view, as a real agent does."""
        if self.view is not None and view.version < self.view.version:
            return
        self.view = view
        trainer, following = self.trainer, view.active
        if not self.has_trainer or following is None or trainer.frozen:
            return
        holds = trainer.state is HOLDING and trainer.generation == trainer.assigned
        match instruction(view, self.replica, trainer.instance, trainer.assigned, holds=holds):
            case Instruction.RELEASE:
                trainer.state = REENTERING
            case Instruction.HOLD:
                trainer.hold(following.generation)
            case Instruction.ASSIGN:
                trainer.assignment = following


class SimulatedJob(RuleBasedStateMachine):
    """Agents, a controller and a service whose messages are lost, delayed, repeated and reordered."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Rendezvous()
        self.spec: JobSpec | None = None
        self.version = 1
        self.agents: list[Agent] = []
        self.latest: dict[int, Agent] = {}
        self.in_flight: list[Registration] = []
        self.published: Allocation | None = None
        self.failed_generations: set[int] = set()
        self.data_was_lost = False
        self.finished_by_all = 0
        """The newest step that all members of a generation have finished."""
        self.now = NOW
        self.replaced_at = float("-inf")
        """When a spare has last taken the place of a slow member."""

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
        following = state.active
        if following is None or following == before.active:
            return
        if before.active is not None:
            assert following.generation > before.active.generation
        assert following.generation <= state.desired.generation
        assert len(following.indices) == following.replicas == len(following.members)
        if not self.data_was_lost:
            assert following.replicas == 0 or self.is_valid(following.replicas)
            self.check_that_state_is_kept(before, following)
            self.check_that_slow_ones_join_last(before, following)

    def is_valid(self, replicas: int) -> bool:
        return self.spec is None or is_valid_replicas(self.spec.bounds, replicas)

    def check_that_state_is_kept(self, before: Rendezvous, following: ActiveAllocation) -> None:
        """If a member of the previous generation has state and is there, the next one has state."""
        previous = before.active
        if previous is None or following.replicas == 0:
            return
        there = [
            agent.trainer
            for agent in self.agents
            if agent.has_trainer
            and agent.trainer.step is not None
            and previous.admits(agent.replica, agent.trainer.instance)
            and agent.replica in self.state.replicas
            and self.state.replicas[agent.replica].instance == agent.trainer.instance
        ]
        assert not there or following.has_state

    def check_that_slow_ones_join_last(self, before: Rendezvous, following: ActiveAllocation) -> None:
        """A replica that was slow joins only if no other one that waits could."""
        assert self.state.desired is not None
        present = before.active.members if before.active is not None else ()
        known, stayed = self.state.slow_places, {member.instance for member in present}
        joined = [each for each in following.members if each.instance not in stayed]
        waiting = [
            each
            for each in self.state.replicas.values()
            if each.state is WAITING
            and each.replica in self.state.desired.indices
            and each.replica not in following.indices
            and each.instance not in {*self.state.left_out, *stayed}
        ]
        if any(known.includes(self.state.replicas[each.replica]) for each in joined):
            assert all(map(known.includes, waiting))

    @property
    def view(self) -> AllocationView:
        return self.state.view(self.version)

    # -- without faults

    @initialize(replicas=st.integers(1, REPLICAS), spares=st.integers(0, SPARES), spec=st.sampled_from(SPECS))
    def submit(self, replicas: int, spares: int, spec: JobSpec | None) -> None:
        self.spec = spec
        for index in range(replicas + spares):
            self.send(self.start_agent(index))
        self.allocate(replicas, spares)

    @rule(replicas=st.integers(0, REPLICAS), spares=st.integers(0, SPARES))
    def allocate(self, replicas: int, spares: int) -> None:
        if replicas and not self.is_valid(replicas):
            return
        newest = self.state.desired or self.published
        generation = newest.generation + 1 if newest else 1
        self.published = Allocation(generation, replicas, spares=spares if replicas else 0)
        self.publish()

    @rule(index=st.integers(0, REPLICAS + SPARES - 1))
    def start(self, index: int) -> None:
        """Start an agent, which may be the second of its replica."""
        self.send(self.start_agent(index))

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
        """Deliver all registrations and views; replace trainers and agents that have ended."""
        self.synchronize()

    @precondition(lambda self: any(not agent.has_trainer for agent in self.agents))
    @rule(data=st.data())
    def start_trainer(self, data: st.DataObject) -> None:
        self.restart(self.choose(data, [agent for agent in self.agents if not agent.has_trainer]))

    @rule(data=st.data())
    def form(self, data: st.DataObject) -> None:
        """Some of the members of a generation get the state and run."""
        for members in self.complete_generations():
            self.enter(members, data.draw(st.integers(1, len(members))))

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        """Some of the members finish a step, or the others do, which have not."""
        for members in self.complete_generations():
            if all(trainer.runs for trainer in members):
                self.finish_step(members, data.draw(st.integers(1, len(members))))

    @precondition(lambda self: any(self.lost_peers(agent) is not None for agent in self.agents))
    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        """A trainer notices that peers are lost or hold."""
        agent = self.choose(data, [agent for agent in self.agents if self.lost_peers(agent) is not None])
        self.notice_loss(agent)
        self.send(agent)

    @precondition(lambda self: self.state.active is not None)
    @rule(seconds=st.sampled_from([1.0, MIN_PAUSE, MEMORY]), data=st.data())
    def report_slow(self, seconds: float, data: st.DataObject) -> None:
        """Rank 0 reports a slow member: a spare takes its place, or nothing changes."""
        before = self.state.active
        assert before is not None
        members = [member.replica for member in before.members]
        slow = data.draw(st.sampled_from([None, *members]))
        self.now += seconds
        self.change(
            report(self.state, reported(before.generation, slow, before.replicas), self.spec, now=self.now)
        )
        following = self.state.active
        if following == before:
            return
        assert following is not None
        (joined,) = set(following.members) - {replace(each, holds=True) for each in before.members}
        assert following.indices == before.indices - {slow} | {joined.replica}
        assert following.replicas == before.replicas
        assert not self.state.slow_places.includes(self.state.replicas[joined.replica])
        assert self.data_was_lost or self.now - self.replaced_at >= MIN_PAUSE
        self.replaced_at = self.now

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        registration = self.choose(data, self.in_flight)
        if not again:
            self.in_flight.remove(registration)
        self.change(register(self.state, registration, self.spec))

    # -- faults

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def lose_a_message(self, data: st.DataObject) -> None:
        self.in_flight.remove(self.choose(data, self.in_flight))

    @precondition(lambda self: any(agent.has_trainer for agent in self.agents))
    @rule(data=st.data(), replica_state=st.sampled_from([LOST, LOST, FAILED, TERMINATED, FINISHED]))
    def end_a_trainer(self, data: st.DataObject, replica_state: ReplicaState) -> None:
        agent = self.choose(data, [agent for agent in self.agents if agent.has_trainer])
        if replica_state is FINISHED and not agent.trainer.runs:
            return
        agent.trainer.state = replica_state
        if replica_state is FAILED:
            self.failed_generations.add(agent.trainer.generation)
        self.send(agent)
        if replica_state in EXITED_STATES:
            self.remove(agent)

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def kill_an_agent(self, data: st.DataObject) -> None:
        self.remove(self.choose(data, self.agents))

    @precondition(lambda self: any(agent.trainer.frozen != agent.has_trainer for agent in self.agents))
    @rule(data=st.data())
    def freeze_or_thaw(self, data: st.DataObject) -> None:
        agent = self.choose(data, self.agents)
        agent.trainer.frozen = not agent.trainer.frozen

    @precondition(lambda self: any(agent.trainer.assigned for agent in self.agents))
    @rule(data=st.data(), index=st.integers(0, REPLICAS + SPARES - 1))
    def suspect(self, data: st.DataObject, index: int) -> None:
        """A trainer takes a peer for lost that is not."""
        agent = self.choose(data, [agent for agent in self.agents if agent.trainer.assigned])
        if agent.has_trainer and index != agent.replica:
            agent.trainer.hold(agent.trainer.assigned, frozenset({index}))
            self.send(agent)

    @rule(index=st.integers(0, REPLICAS + SPARES - 1))
    def expire_replica(self, index: int) -> None:
        self.change(expire(self.state, [index], self.spec))

    @rule(republish=st.booleans())
    def lose_the_data(self, republish: bool) -> None:
        self.version += 1
        self.state = Rendezvous()
        self.data_was_lost = True
        if republish:
            self.publish()

    @rule()
    def publish(self) -> None:
        try:
            self.change(allocate(self.state, self.published or Allocation(1, 1), self.spec))
        except StaleAllocationError:
            self.published = self.state.desired

    # -- invariants

    @invariant()
    def the_active_generation_is_at_most_the_desired_generation(self) -> None:
        if self.state.active is not None:
            assert self.state.desired is not None
            assert self.state.active.generation <= self.state.desired.generation

    @invariant()
    def at_most_one_generation_trains(self) -> None:
        if not self.data_was_lost:
            training = [
                members[0].generation
                for members in self.complete_generations()
                if all(trainer.runs for trainer in members)
                and all(trainer.replica in self.state.replicas for trainer in members)
            ]
            assert len(set(training)) <= 1

    @invariant()
    def only_failed_generations_count_as_failures(self) -> None:
        assert 0 <= self.state.failures <= len(self.failed_generations)
        assert self.state.disruptions >= 0

    def teardown(self) -> None:
        """Without further faults, the desired allocation becomes active and remains active."""
        for registration in self.in_flight:
            self.change(register(self.state, registration, self.spec))
        self.in_flight.clear()
        stable, rounds = self.state, 0
        for _ in range(100):
            self.synchronize()
            is_stable = (self.state.desired, self.state.active, self.state.broken) == (
                *(stable.desired, stable.active),
                stable.broken,
            )
            stable, rounds = self.state, rounds + 1 if is_stable else 0
            if rounds == 5:
                break
        assert rounds == 5, "the state does not become stable"
        if stable.complete:
            return
        assert stable.desired is not None
        assert active(stable) is not None, "deadlock"
        assert stable.active is not None
        assert stable.active.generation == stable.desired.generation
        assert stable.active.replicas == stable.desired.replicas
        assert stable.active.indices <= set(stable.desired.indices)
        if stable.active.members:
            spares = set(stable.desired.indices) - stable.active.indices
            waiting = {index for index in spares if stable.replicas[index].state is WAITING}
            assert waiting == spares, "spares wait"
        members = [agent.trainer for agent in self.agents if agent.has_trainer and agent.trainer.runs]
        assert {trainer.instance for trainer in members} == {
            member.instance for member in stable.active.members
        }

    def synchronize(self) -> None:
        """Replace agents that have exited, then deliver the registration and the view of every agent."""
        self.publish()
        assert self.state.desired is not None
        for agent in self.agents:
            agent.trainer.frozen = False
            if not agent.has_trainer:
                self.restart(agent)
        for index in self.state.desired.indices:
            if self.latest.get(index) not in self.agents:
                self.start_agent(index)
        instances = {agent.trainer.instance for agent in self.agents}
        self.change(
            expire(
                self.state,
                [
                    replica.replica
                    for replica in self.state.replicas.values()
                    if replica.instance not in instances and replica.state not in EXITED_STATES
                ],
                self.spec,
            )
        )
        for agent in self.agents:
            self.change(register(self.state, agent.registration, self.spec))
        for agent in self.agents:
            self.poll_view(agent, delivered=True)
        for agent in self.agents:
            self.notice_loss(agent)
        for members in self.complete_generations():
            self.enter(members, len(members))
            self.finish_step(members, len(members))

    # -- the trainers

    def trainer_of(self, instance: str) -> Trainer | None:
        """The trainer process of this instance, if it has not ended."""
        for agent in self.agents:
            if agent.has_trainer and agent.trainer.instance == instance:
                return agent.trainer
        return None

    def complete_generations(self) -> list[list[Trainer]]:
        """For each generation whose members are all there and connected: its trainers, by rank."""
        found = []
        allocations = {
            agent.trainer.assignment.generation: agent.trainer.assignment
            for agent in self.agents
            if agent.has_trainer and agent.trainer.assignment is not None
        }
        for generation, allocation in allocations.items():
            trainers = [self.trainer_of(member.instance) for member in allocation.members]
            members = [
                trainer
                for trainer in trainers
                if trainer is not None
                and not trainer.frozen
                and trainer.assignment == allocation
                and (trainer.state, trainer.generation) != (HOLDING, generation)
                and trainer.assigned == generation
            ]
            if members and len(members) == allocation.replicas:
                found.append(members)
        return found

    def enter(self, members: list[Trainer], size: int) -> None:
        assignment = members[0].assignment
        assert assignment is not None
        steps = [trainer.step for trainer in members if trainer.step is not None]
        newest = max(steps, default=0)
        if not self.data_was_lost and assignment.has_state:
            assert newest >= self.finished_by_all, "a step is lost that all members had finished"
        self.finished_by_all = newest if not assignment.has_state else self.finished_by_all
        for trainer in [each for each in members if not each.runs][:size]:
            trainer.state, trainer.generation, trainer.step = RUNNING, assignment.generation, newest
            trainer.lost = frozenset()

    def finish_step(self, members: list[Trainer], size: int) -> None:
        steps = [trainer.step or 0 for trainer in members]
        behind = [trainer for trainer in members if trainer.step == min(steps)]
        for trainer in behind[:size]:
            trainer.step = min(steps) + 1
            trainer.stepped = trainer.generation
        if not self.data_was_lost:
            self.finished_by_all = max(self.finished_by_all, min(each.step or 0 for each in members))

    def lost_peers(self, agent: Agent) -> frozenset[int] | None:
        """The peers that are lost for the agent's trainer; None if it need not hold."""
        trainer, allocation = agent.trainer, agent.trainer.assignment
        if not agent.has_trainer or trainer.frozen or allocation is None:
            return None
        generation = allocation.generation
        if trainer.assigned != generation or (trainer.state, trainer.generation) == (HOLDING, generation):
            return None
        lost, held = set(), False
        for member in allocation.members:
            peer = self.trainer_of(member.instance)
            if peer is None or peer.frozen:
                lost.add(member.replica)
            elif (peer.state, peer.generation) == (HOLDING, generation) or peer.assigned > generation:
                held = True
        return frozenset(lost) if lost or held else None

    def notice_loss(self, agent: Agent) -> None:
        lost = self.lost_peers(agent)
        if lost is not None:
            agent.trainer.hold(agent.trainer.assigned, lost)

    # -- helpers

    def choose(self, data: st.DataObject, options: Iterable[T]) -> T:
        return data.draw(st.sampled_from(list(options)))

    def start_agent(self, index: int) -> Agent:
        agent = self.latest[index] = Agent(index, Trainer(index, f"agent-{next(_unique)}"))
        self.agents.append(agent)
        return agent

    def restart(self, agent: Agent) -> None:
        agent.trainer = Trainer(agent.replica, agent.trainer.agent)

    def remove(self, agent: Agent) -> None:
        agent.alive = False
        self.agents.remove(agent)

    def send(self, agent: Agent) -> None:
        self.in_flight.append(agent.registration)

    def poll_view(self, agent: Agent, *, delivered: bool = False) -> None:
        before = agent.registration
        agent.receive(self.view)
        if agent.trainer.state is WAITING and agent.trainer.instance in self.state.left_out:
            self.restart(agent)
        if agent.registration != before:
            if delivered:
                self.change(register(self.state, agent.registration, self.spec))
            else:
                self.send(agent)


def test_the_invariants_hold_under_random_faults() -> None:
    run_state_machine_as_test(
        SimulatedJob, settings=settings(max_examples=examples(50), stateful_step_count=50)
    )
