"""When an agent kills a trainer that does not leave its generation, and starts the next one."""

import pytest

from adascale_core.names import LEAVE_GRACE
from adascale_worker.agent.agent import REPLACED_GRACE, RESCALE_GRACE, release_grace, restart_delay


def test_the_delay_of_restarts_doubles_until_a_step_is_made() -> None:
    assert [restart_delay(fruitless) for fruitless in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert restart_delay(3000) == 30


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
