"""Rendezvous: spares that take the places of slow members."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.messages.allocation import Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration
from adascale_core.rendezvous.instruction import Instruction, instruction, is_taken_for_lost
from adascale_core.rendezvous.rendezvous import Rendezvous, report
from adascale_core.rendezvous.slow_places import MAX_PAUSE, MEMORY, MIN_PAUSE, SlowPlaces
from support.rendezvous import (
    ELASTIC,
    LOST,
    NOW,
    REENTERING,
    RUNNING,
    WAITING,
    active,
    after,
    desired,
    holding,
    registration,
    reported,
    running,
    with_spares,
)

DAY = 86_400.0


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
