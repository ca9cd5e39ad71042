"""When an agent kills a trainer that does not leave its generation."""

import pytest

from adascale_core.messages import ActiveAllocation, Allocation, AllocationView
from adascale_core.names import LEAVE_GRACE
from adascale_worker.agent.kill_deadline import RESCALE_GRACE, KillDeadline, leave_grace


def view(active: int, *, broken: bool = False, complete: bool = False) -> AllocationView:
    return AllocationView(
        1, Allocation(active, 1), ActiveAllocation(active, 1, "127.0.0.1", 1), broken, complete
    )


@pytest.mark.parametrize(
    ("latest", "expected"),
    [
        (None, None),
        (view(2), None),
        (view(1), None),
        (view(2, complete=True), None),
        (view(2, broken=True), LEAVE_GRACE),
        (view(3), RESCALE_GRACE),
        (view(3, broken=True), LEAVE_GRACE),
        (view(2, broken=True, complete=True), 0.0),
        (view(3, complete=True), 0.0),
    ],
)
def test_the_grace_depends_on_how_generation_2_has_ended(
    latest: AllocationView | None, expected: float | None
) -> None:
    assert leave_grace(latest, 2) == expected


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
