"""How the failures of a program are counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.failures import FailureCount


@pytest.mark.parametrize(
    ("before", "generations", "expected"),
    [
        (FailureCount(), [], FailureCount()),
        (FailureCount(), [3], FailureCount(1, 3)),
        (FailureCount(), [3, 3], FailureCount(1, 3)),
        (FailureCount(), [3, 4], FailureCount(2, 4)),
        (FailureCount(1, 3), [3], FailureCount(1, 3)),
        (FailureCount(1, 3), [2], FailureCount(1, 3)),
        (FailureCount(1, 3), [3, 5], FailureCount(2, 5)),
        (FailureCount(), [0], FailureCount()),
        (FailureCount(2, 0, 2), [1], FailureCount(3, 1, 2)),
    ],
    ids=str,
)
def test_each_generation_counts_once(
    before: FailureCount, generations: list[int], expected: FailureCount
) -> None:
    assert before.with_generations(generations) == expected


@pytest.mark.parametrize(
    ("before", "starts", "expected"),
    [
        (FailureCount(), [], FailureCount()),
        (FailureCount(), [1, 1, 1], FailureCount(1, 0, 1)),
        (FailureCount(), [2, 1], FailureCount(2, 0, 2)),
        (FailureCount(2, 0, 2), [2], FailureCount(2, 0, 2)),
        (FailureCount(2, 0, 2), [3, 2], FailureCount(3, 0, 3)),
        (FailureCount(2, 0, 2), [], FailureCount(2, 0, 0)),
        (FailureCount(2, 0, 0), [1], FailureCount(3, 0, 1)),
        (FailureCount(1, 4), [1], FailureCount(2, 4, 1)),
    ],
    ids=str,
)
def test_each_round_of_starts_counts_once(
    before: FailureCount, starts: list[int], expected: FailureCount
) -> None:
    assert before.with_false_starts(starts) == expected


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_a_counted_failure_does_not_count_again(generations: list[int], starts: list[int]) -> None:
    counted = FailureCount().with_generations(generations).with_false_starts(starts)
    assert counted.with_generations(generations).with_false_starts(starts) == counted


def test_the_limit_itself_is_not_exceeded() -> None:
    assert [FailureCount(count).exceeds(3) for count in (0, 3, 4)] == [False, False, True]
