"""Rendezvous: which replicas are members of the next generation, and when it begins."""

import json
from dataclasses import replace

import pytest

from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.rendezvous.rendezvous import (
    DEPARTED_STATES,
    EXITED_STATES,
    Rendezvous,
    StaleAllocationError,
    allocate,
    register,
)
from support.rendezvous import (
    ELASTIC,
    FAILED,
    HOLDING,
    LOST,
    REENTERING,
    RUNNING,
    TERMINATED,
    WAITING,
    active,
    after,
    desired,
    holding,
    registration,
    running,
    with_spares,
)

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
        replace(registration(0, WAITING, trainer="agent.1"), state_port=40123),
        replace(registration(1, WAITING), state_port=40124),
    )
    assert active(state) == (1, [0])
    # Neither trainer was lost before the other one was there.
    next_trainer = replace(registration(0, WAITING, trainer=replacement), state_port=40123)
    state = after(state, registration(0, RUNNING, 1, trainer="agent.1"), next_trainer)
    assert active(state) == (2, [member])
    assert state.active is not None
    assert state.active.members[0].state_port == 40123 + member


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
