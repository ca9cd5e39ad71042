"""Estimates of steps and their averages, compared with `worker.reference` and with plain statistics."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.batch.gain import GradientEstimate
from adascale_worker.scaling.statistics.estimates import (
    MovingAverage,
    from_consecutive_gradients,
    from_micro_gradients,
    infer_loss_scale,
)
from worker import reference

EMPTY = MovingAverage()

vectors = st.lists(st.integers(-8, 8), min_size=3, max_size=3)
numbers = st.floats(-1e3, 1e3)
smoothings = st.just(0.0) | st.floats(0.0, 0.999)
samples = st.tuples(numbers, numbers, st.booleans())
"""`grad_sqr`, `grad_var`, whether they are biased."""


def dot(a: list[int], b: list[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def only_estimate(average: MovingAverage) -> GradientEstimate:
    estimate = average.estimate()
    assert estimate is not None
    return estimate


# -- a step -------------------------------------------------------------------------------------------------


@given(st.lists(vectors, min_size=2, max_size=5), st.integers(1, 64))
def test_micro_gradients_give_the_sample_mean_and_variance(gradients: list[list[int]], scale: int) -> None:
    """They are the usual unbiased estimators, computed here exactly and in another way."""
    n = len(gradients)
    mean = [Fraction(sum(column), n) for column in zip(*gradients, strict=True)]
    sqr_of_mean = sum(x * x for x in mean)
    mean_of_sqr = Fraction(sum(dot(g, g) for g in gradients), n)
    pairs = [dot(a, b) for i, a in enumerate(gradients) for j, b in enumerate(gradients) if i != j]
    variance = sum((x - m) ** 2 for g in gradients for x, m in zip(g, mean, strict=True)) / (n - 1)

    sqr, var = from_micro_gradients(n, float(mean_of_sqr), float(sqr_of_mean), scale)

    assert sqr == pytest.approx(sum(pairs) / len(pairs), abs=1e-9)
    assert var == pytest.approx(float(variance) * scale / n, abs=1e-9)


def test_one_gradient_raises() -> None:
    with pytest.raises(ValueError, match=r"got 1 gradient in a step; .* at least 2"):
        from_micro_gradients(1, 1, 1, 1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_not_positive_and_finite_raises(scale: float) -> None:
    with pytest.raises(ValueError, match="got scale"):
        from_micro_gradients(2, 1, 1, scale)
    with pytest.raises(ValueError, match="got scale"):
        from_consecutive_gradients(1, 1, 1.0, scale)
    with pytest.raises(ValueError, match="got scale"):
        from_consecutive_gradients(1, 1, scale, 1.0)


@given(vectors, vectors, st.integers(1, 64))
def test_two_steps_of_the_same_scale_equal_two_micro_gradients(
    a: list[int], b: list[int], scale: int
) -> None:
    difference = [x - y for x, y in zip(a, b, strict=True)]
    mean = [(x + y) / 2 for x, y in zip(a, b, strict=True)]
    expected = from_micro_gradients(2, (dot(a, a) + dot(b, b)) / 2, sum(x * x for x in mean), 2 * scale)

    actual = from_consecutive_gradients(dot(a, b), dot(difference, difference), scale, scale)

    assert actual == pytest.approx(expected, abs=1e-9)


def test_two_steps_of_different_scales_weigh_the_difference_by_both() -> None:
    """A difference of gradients at S = 1 and S = 4 has variance grad_var * (1 + 1/4)."""
    assert from_consecutive_gradients(3, 5, 1.0, 4.0) == (3, 4)


# -- many steps ---------------------------------------------------------------------------------------------


def test_there_is_no_estimate_before_the_first_step() -> None:
    assert EMPTY.estimate() is None


@given(st.lists(st.tuples(numbers, st.floats(0, 0.99)), min_size=1, max_size=12))
def test_average_is_the_weighted_mean_even_when_smoothing_changes(steps: list[tuple[float, float]]) -> None:
    estimates = EMPTY
    for value, smoothing in steps:
        estimates = estimates.updated(value, 2 * value, smoothing)

    sqr, var = reference.average([(value, 2 * value) for value, _ in steps], [theta for _, theta in steps])

    assert only_estimate(estimates).grad_sqr == pytest.approx(sqr, abs=1e-6)
    assert only_estimate(estimates).grad_var == pytest.approx(var, abs=1e-6)
    assert estimates.state_dict()["unbiased"]["count"] == len(steps)


@given(numbers, st.floats(0, 0.999), st.integers(1, 20), st.booleans(), st.booleans())
def test_the_average_of_equal_estimates_is_that_estimate(
    value: float, theta: float, steps: int, debias: bool, biased: bool
) -> None:
    estimates = EMPTY
    for _ in range(steps):
        estimates = estimates.updated(value, value, theta, biased=biased, debias=debias)
    assert only_estimate(estimates).grad_sqr == pytest.approx(value, abs=1e-9)
    assert only_estimate(estimates).biased == biased


def test_without_debiasing_the_first_estimates_have_equal_weights() -> None:
    estimates = EMPTY
    averages = []
    for value in (1.0, 2.0, 6.0, 0.0, 10.0):
        estimates = estimates.updated(value, value, 0.75, debias=False)
        averages.append(only_estimate(estimates).grad_sqr)
    assert averages == pytest.approx([1.0, 1.5, 3.0, 2.25, 0.75 * 2.25 + 0.25 * 10.0])


@given(st.lists(st.tuples(numbers, st.floats(0, 0.99)), min_size=2, max_size=12))
def test_the_standard_error_is_that_of_the_reference(steps: list[tuple[float, float]]) -> None:
    estimates = EMPTY
    for value, smoothing in steps:
        estimates = estimates.updated(value, 1.0, smoothing)
    values, thetas = zip(*steps, strict=True)
    total_weight, squares, later = 0.0, 0.0, 1.0
    for theta in reversed(thetas):
        total_weight, squares = total_weight + (1 - theta) * later, squares + ((1 - theta) * later) ** 2
        later *= theta
    if total_weight**2 / squares > 1.01:
        expected = reference.standard_error(values, thetas)
        assert only_estimate(estimates).grad_sqr_error == pytest.approx(expected, rel=1e-4, abs=1e-2)


def test_the_standard_error_of_equal_weights_is_the_usual_one() -> None:
    values, estimates = [1.0, 4.0, -2.0, 7.0], EMPTY
    for value in values:
        estimates = estimates.updated(value, 1.0, 0.99, debias=False)
    expected = statistics.stdev(values) / math.sqrt(len(values))
    assert only_estimate(estimates).grad_sqr_error == pytest.approx(expected)


def test_a_single_sample_may_be_wrong_by_all_of_it() -> None:
    assert only_estimate(EMPTY.updated(-2.0, 3.0, 0.9)).grad_sqr_error == pytest.approx(5.0)


def test_an_unbiased_estimate_deletes_the_biased_average() -> None:
    first = EMPTY.updated(100.0, 100.0, 0.9, biased=True)
    assert only_estimate(first).biased

    second = first.updated(1.0, 2.0, 0.9)

    assert second.state_dict() == EMPTY.updated(1.0, 2.0, 0.9).state_dict()


def test_biased_estimates_are_averaged_in_until_the_next_unbiased_estimate() -> None:
    """A job shrinks to one replica and grows again: the unbiased average loses weight and is kept."""
    before = EMPTY.updated(4.0, 2.0, 0.9)
    single = before.updated(6.0, 2.0, 0.9, biased=True)
    assert only_estimate(single).biased
    assert 4.0 < only_estimate(single).grad_sqr < 6.0

    again = single.updated(0.0, 0.0, 0.9)

    assert not only_estimate(again).biased
    assert only_estimate(again).grad_sqr == pytest.approx(4.0 * 0.81 / (0.81 + 1.0))


def test_biased_estimates_do_not_change_the_error_of_the_unbiased_average() -> None:
    """All its samples lose weight alike, so it is worth as many samples of equal weight as before."""
    before = EMPTY.updated(4.0, 2.0, 0.9).updated(6.0, 1.0, 0.9)
    after = before
    for _ in range(20):
        after = after.updated(6.0, 2.0, 0.9, biased=True)

    first, second = before.state_dict()["unbiased"], after.state_dict()["unbiased"]

    samples = first["weight"] ** 2 / first["sqr_weight"]
    assert second["weight"] ** 2 / second["sqr_weight"] == pytest.approx(samples)


def test_without_smoothing_biased_estimates_keep_the_unbiased_average() -> None:
    single = EMPTY.updated(4.0, 2.0, 0.9).updated(6.0, 2.0, 0.0, biased=True)
    assert only_estimate(single).grad_sqr == 6.0
    assert single.state_dict()["unbiased"]["weight"] == pytest.approx(0.1)


@given(st.lists(samples, max_size=8), smoothings)
def test_saving_and_loading_does_not_change_the_averages(
    steps: list[tuple[float, float, bool]], smoothing: float
) -> None:
    straight = saved = EMPTY
    for sqr, var, biased in steps:
        straight = straight.updated(sqr, var, smoothing, biased=biased)
        after = saved.updated(sqr, var, smoothing, biased=biased)
        saved = MovingAverage.from_state_dict(after.state_dict())
    assert saved.state_dict() == straight.state_dict()


@pytest.mark.parametrize("smoothing", [1.0, -0.1, math.nan])
def test_smoothing_out_of_range_raises(smoothing: float) -> None:
    with pytest.raises(ValueError, match=r"got smoothing .*at least 0 and below 1"):
        EMPTY.updated(1.0, 1.0, smoothing)


@pytest.mark.parametrize(
    ("change", "known", "expected"),
    [
        (1.0, 1.0, 1.0),
        (1 / 1024, 1.0, 1024.0),
        (1 / 512, 1024.0, 512.0),
        (0.3, 1.0, 1.0),
        (0.3 / 1024, 1024.0, 1024.0),
        (0.3 / 1024, 1.0, math.nan),
        (math.inf, 8.0, 8.0),
        (0.0, 8.0, 8.0),
    ],
)
def test_a_change_by_a_power_of_two_is_that_of_a_loss_scale(
    change: float, known: float, expected: float
) -> None:
    norm = 3.0
    found = infer_loss_scale(norm * norm, (norm * change) * (norm * change), known)
    assert found == pytest.approx(expected, nan_ok=True)
