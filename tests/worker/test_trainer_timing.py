"""When an agent kills a trainer that does not leave its generation."""

import pytest

from adascale_core.names import LEAVE_GRACE
from adascale_worker.agent.trainer_timing import REPLACED_GRACE, RESCALE_GRACE, KillDeadline, release_grace


def test_without_a_deadline_no_trainer_is_killed() -> None:
    assert not KillDeadline().is_exceeded(1e9)


def test_a_deadline_is_advanced_but_not_postponed() -> None:
    deadline = KillDeadline()
    deadline.advance(10.0)
    deadline.advance(20.0)
    assert [deadline.is_exceeded(now) for now in (9.0, 10.0, 10.5)] == [False, False, True]
    deadline.advance(5.0)
    assert deadline.is_exceeded(6.0)


def test_a_deadline_that_is_set_replaces_the_one_before() -> None:
    deadline = KillDeadline()
    deadline.advance(10.0)
    deadline.set(20.0)
    assert not deadline.is_exceeded(15.0)


def test_a_deadline_can_be_removed() -> None:
    deadline = KillDeadline()
    deadline.set(10.0)
    deadline.clear()
    assert not deadline.is_exceeded(11.0)


@pytest.mark.parametrize(
    ("was_lost", "last", "expected"),
    [
        pytest.param(True, False, REPLACED_GRACE, id="taken for lost, and others have the state"),
        pytest.param(True, True, LEAVE_GRACE, id="taken for lost, and it has the only state"),
        pytest.param(False, False, RESCALE_GRACE, id="not desired any more"),
        pytest.param(False, True, RESCALE_GRACE, id="suspended"),
    ],
)
def test_a_trainer_that_others_have_replaced_has_the_least_time_to_exit(
    was_lost: bool, last: bool, expected: float
) -> None:
    assert release_grace(was_lost=was_lost, last=last) == expected
    assert REPLACED_GRACE < LEAVE_GRACE < RESCALE_GRACE
