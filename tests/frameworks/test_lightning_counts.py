"""What Lightning counts from progress."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_frameworks.lightning.loops import Count, Counts, plain

PROGRESS = st.lists(st.floats(1.0, 40.0), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("before", "after", "interval", "remainder"),
    [
        (9.0, 10.0, 10, 0),
        (9.0, 11.0, 10, 0),
        (9.5, 31.2, 10, 0),
        (10.0, 11.0, 10, 1),
        (11.0, 14.9, 5, 4),
        (0.0, 1.0, 1, 0),
        (0.0, 0.0, 5, 0),
        (-2.5, 3.0, 5, 0),
    ],
)
def test_the_remainder_is_0_if_a_step_has_passed_over_a_multiple(
    before: float, after: float, interval: int, remainder: int
) -> None:
    count = Count(after, before)
    assert count % interval == remainder
    assert count == int(after)
    for shifted in (count + 1 - 1, 1 + count - 1, count - 7 + 7):
        assert shifted % interval == remainder
    assert (count - 1) % interval == Count(after - 1, before - 1) % interval
    assert type(count - Count(1.0, 0.0)) is int


def test_the_remainder_in_manual_optimization_is_that_of_optimizer_steps() -> None:
    assert [Count(7 * step, steps=step) % 3 for step in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [(Count(7 * step, steps=step - 3.5) + 1) % 3 for step in range(4)] == [0, 1, 2, 0]
    assert Count(14, steps=2) == 14


@given(PROGRESS, st.integers(1, 50))
def test_each_multiple_is_met_by_one_step(gains: list[float], interval: int) -> None:
    progress, met = 0.0, 0
    for gain in gains:
        before, progress = progress, progress + gain
        met += Count(progress, before) % interval == 0
    assert met <= int(progress) // interval
    assert (met > 0) == (int(progress) >= interval)


def test_a_count_is_saved_as_a_plain_integer() -> None:
    kept = {"steps": [Count(12.5, 9.0), (Count(12.5, steps=9.0), "text")]}
    for saved in (pickle.loads(pickle.dumps(kept)), plain(kept)):
        assert saved == {"steps": [12, (12, "text")]}
        assert type(saved["steps"][0]) is type(saved["steps"][1][0]) is int


@given(PROGRESS, st.integers(1, 12))
def test_only_the_last_step_of_an_epoch_reaches_the_number_of_its_batches(
    gains: list[float], length: int
) -> None:
    counts = Counts(float(length), length)
    for gain in gains:
        counts.before, counts.after = counts.after, counts.after + gain
        is_last, done = counts.ends_epoch, counts.batches
        assert (done == length) == is_last
        assert 0 <= done <= length
        if is_last:
            counts.begin_epoch(int(counts.after) // length)


@given(st.integers(1, 30), st.integers(1, 10), st.integers(1, 8))
def test_at_the_initial_batch_size_the_counts_are_those_of_plain_lightning(
    steps: int, length: int, interval: int
) -> None:
    counts = Counts(float(length), length)
    for step in range(steps):
        counts.begin_epoch(step // length)
        assert counts.batch_index == step % length
        counts.before, counts.after = float(step), step + 1.0
        is_last = (step + 1) % length == 0
        assert counts.ends_epoch is is_last
        assert counts.batches == step % length + 1
        assert (counts.batches % interval == 0) == ((step % length + 1) % interval == 0)
        assert counts.logged_step(interval, counts.before, counts.after) == step


@given(st.integers(1, 30), st.floats(0, 100), st.floats(1, 40))
def test_the_step_that_is_logged_is_that_of_a_multiple_if_the_step_has_crossed_one(
    interval: int, before: float, gain: float
) -> None:
    step = Counts(1.0, 1).logged_step(interval, before, before + gain) + 1
    crosses = int(before + gain) // interval > int(before) // interval
    assert step == (int(before + gain) // interval * interval if crosses else int(before + gain))
    assert Counts(1.0, 1).logged_step(0, before, before + gain) + 1 == int(before + gain)
