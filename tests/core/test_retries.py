"""Which failures of a program are not retried."""

import pytest

from adascale_core.failures import ExitClass, ProgramFailure, is_permanent, repeats_early_failure


def failed(generation: int, log: str = "KeyError\n", code: int = 1, replica: int = 0) -> ProgramFailure:
    return ProgramFailure(replica, generation, code, log)


@pytest.mark.parametrize(
    ("failures", "latest", "measured", "expected"),
    [
        ([], 0, (), False),
        ([failed(1)], 0, (), False),
        ([failed(1), failed(2)], 0, (), True),
        ([failed(0), failed(0)], 9, (), True),
        ([failed(1), failed(2)], 2, (), False),
        ([failed(1), failed(3)], 2, (), False),
        ([failed(1), failed(2), failed(3, "other")], 0, (), False),
        ([failed(1), failed(2, code=2)], 0, (), False),
        ([failed(1), failed(2, replica=1)], 0, (), False),
        ([failed(1), failed(1, replica=1), failed(2, replica=1)], 0, (), True),
        ([failed(1, "a\nb\nc"), failed(2, "x\nb\nc\n")], 0, (), True),
        ([failed(1, "a\nb\nc"), failed(2, "a\nx\nc")], 0, (), False),
        ([failed(1), failed(2)], 0, (2,), True),
        ([failed(1), failed(2)], 0, (1, 2), False),
    ],
)
def test_a_failure_repeats_if_a_replica_fails_twice_alike_before_a_step_and_no_other_count_has_trained(
    failures: list[ProgramFailure], latest: int, measured: tuple[int, ...], expected: bool
) -> None:
    assert repeats_early_failure(failures, latest, 2, measured) is expected


@pytest.mark.parametrize(
    ("exit_class", "measured", "expected"),
    [
        (ExitClass.INVALID_PROGRAM, (1,), True),
        (ExitClass.SINGLE_REPLICA_PROGRAM, (2,), True),
        (ExitClass.SINGLE_REPLICA_PROGRAM, (1, 2), False),
        (ExitClass.PROGRAM_FAILURE, (), False),
        (ExitClass.KILLED, (), False),
    ],
)
def test_a_failure_is_permanent_if_the_program_must_be_changed(
    exit_class: ExitClass, measured: tuple[int, ...], expected: bool
) -> None:
    assert is_permanent(exit_class, measured) is expected
