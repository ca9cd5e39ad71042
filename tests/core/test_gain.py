"""The formulas of AdaScale against the paper's properties and values computed by hand."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.gain import (
    GradientEstimate,
    MovingAverage,
    RunningEstimate,
    default_smoothing,
    from_consecutive_gradients,
    from_micro_gradients,
    total,
)

numbers = st.floats(min_value=-1e150, max_value=1e150)
sizes = st.just(0.0) | st.floats(min_value=1e-6, max_value=1e3)
scales = st.floats(min_value=1e-3, max_value=1e6)
vectors = st.lists(st.integers(-8, 8), min_size=3, max_size=3)


def dot(a: list[int], b: list[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


@given(numbers, numbers, scales)
def test_gain_lies_between_one_and_scale(grad_sqr: float, grad_var: float, scale: float) -> None:
    gain = GradientEstimate(grad_sqr, grad_var).gain(scale)
    assert min(1.0, scale) <= gain <= max(1.0, scale)


@given(numbers, numbers, scales, scales)
def test_gain_never_falls_when_the_scale_rises(sqr: float, var: float, one: float, other: float) -> None:
    estimate = GradientEstimate(sqr, var)
    low, high = sorted((one, other))
    assert estimate.gain(low) <= estimate.gain(high) * (1 + 1e-12)


@given(sizes, sizes, scales, st.sampled_from([1e-30, 1e-9, 1e9, 1e30]))
def test_gain_does_not_depend_on_the_unit_of_gradients(
    sqr: float, var: float, scale: float, unit: float
) -> None:
    gain = GradientEstimate(sqr, var).gain(scale)
    assert GradientEstimate(sqr * unit, var * unit).gain(scale) == pytest.approx(gain, rel=1e-9)


@pytest.mark.parametrize(
    ("grad_sqr", "grad_var", "scale", "gain"),
    [
        (2.0, 2.0, 2.0, 4 / 3),
        (-2.0, 8.0, 2.0, 2.0),
        (0.0, 0.0, 64.0, 1.0),
        (1.0, 0.0, 64.0, 1.0),
        (0.0, 1.0, 64.0, 64.0),
        (-1.0, -1.0, 64.0, 1.0),
        (1e-200, 1e-200, 3.0, 1.5),
        (1e308, 1e308, 3.0, 1.5),
        (1.0, 1.0, 0.5, 2 / 3),
    ],
)
def test_gain_of_known_numbers(grad_sqr: float, grad_var: float, scale: float, gain: float) -> None:
    estimate = GradientEstimate(grad_sqr, grad_var)
    assert estimate.gain(scale) == pytest.approx(gain, abs=1e-12)
    assert estimate.efficiency(scale) == pytest.approx(gain / scale, abs=1e-12)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"got scale .*positive and finite"):
        GradientEstimate(1.0, 1.0).gain(scale)
    with pytest.raises(ValueError, match="got scale"):
        default_smoothing(scale)
    with pytest.raises(ValueError, match="got scale"):
        from_micro_gradients(2, 1.0, 1.0, scale)
    with pytest.raises(ValueError, match="got scale"):
        from_consecutive_gradients(1.0, 1.0, 1.0, scale)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_estimate_is_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        GradientEstimate(bad, 1.0)
    with pytest.raises(ValueError, match="must be finite"):
        GradientEstimate(1.0, bad)


def test_groups_add_up() -> None:
    groups = [GradientEstimate(1.0, -2.0), GradientEstimate(0.5, 3.0)]
    assert total(groups) == GradientEstimate(1.5, 1.0)
    assert total([*groups, GradientEstimate(0.0, 0.0, biased=True)]).biased


@given(st.lists(vectors, min_size=2, max_size=5), st.integers(1, 64))
def test_micro_gradients_give_the_sample_mean_and_variance(gradients: list[list[int]], scale: int) -> None:
    """The usual unbiased estimators of statistics, computed exactly and in another way."""
    n = len(gradients)
    mean = [Fraction(sum(column), n) for column in zip(*gradients, strict=True)]
    sqr_of_mean = sum(x * x for x in mean)
    mean_of_sqr = Fraction(sum(dot(g, g) for g in gradients), n)
    pairs = [dot(a, b) for i, a in enumerate(gradients) for j, b in enumerate(gradients) if i != j]
    variance = sum((x - m) ** 2 for g in gradients for x, m in zip(g, mean, strict=True)) / (n - 1)

    got = from_micro_gradients(n, float(mean_of_sqr), float(sqr_of_mean), scale)

    assert got.grad_sqr == pytest.approx(sum(pairs) / len(pairs), abs=1e-9)
    assert got.grad_var == pytest.approx(float(variance) * scale / n, abs=1e-9)
    assert not got.biased


def test_one_gradient_has_no_spread() -> None:
    with pytest.raises(ValueError, match=r"got 1 gradient in a step; .* at least 2"):
        from_micro_gradients(1, 1.0, 1.0, 1.0)


@given(vectors, vectors, st.integers(1, 64))
def test_two_steps_of_the_same_scale_count_as_two_micro_gradients(
    a: list[int], b: list[int], scale: int
) -> None:
    difference = [x - y for x, y in zip(a, b, strict=True)]
    mean = [(x + y) / 2 for x, y in zip(a, b, strict=True)]
    expected = from_micro_gradients(2, (dot(a, a) + dot(b, b)) / 2, sum(x * x for x in mean), 2 * scale)

    got = from_consecutive_gradients(dot(a, b), dot(difference, difference), scale, scale)

    assert got.grad_sqr == pytest.approx(expected.grad_sqr)
    assert got.grad_var == pytest.approx(expected.grad_var)
    assert got.biased


def test_two_steps_of_different_scales_weigh_the_difference_by_both() -> None:
    """A difference of gradients at S = 1 and S = 4 has variance grad_var * (1 + 1/4)."""
    assert from_consecutive_gradients(3.0, 5.0, 1.0, 4.0) == GradientEstimate(3.0, 4.0, biased=True)


def test_default_smoothing_is_the_papers() -> None:
    assert default_smoothing(1.0) == pytest.approx(0.999)
    assert default_smoothing(500.0) == pytest.approx(0.5)
    assert default_smoothing(4000.0) == 0.0


def test_nothing_is_known_before_the_first_sample() -> None:
    assert RunningEstimate().estimate is None


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 0.99)), min_size=1, max_size=12))
def test_average_is_the_weighted_mean_even_when_smoothing_changes(steps: list[tuple[float, float]]) -> None:
    running = RunningEstimate()
    for value, smoothing in steps:
        running = running.updated(GradientEstimate(value, 2 * value), smoothing)
    weights = [
        (1 - smoothing) * math.prod(later for _, later in steps[i + 1 :])
        for i, (_, smoothing) in enumerate(steps)
    ]
    mean = sum(w * v for w, (v, _) in zip(weights, steps, strict=True)) / sum(weights)

    assert running.estimate is not None
    assert running.estimate.grad_sqr == pytest.approx(mean, abs=1e-6)
    assert running.estimate.grad_var == pytest.approx(2 * mean, abs=1e-6)
    assert running.unbiased.count == len(steps)


@given(st.floats(-1e3, 1e3), st.floats(0, 0.999), st.integers(1, 20), st.booleans())
def test_constant_samples_average_to_themselves(value: float, theta: float, steps: int, debias: bool) -> None:
    running = RunningEstimate()
    for _ in range(steps):
        running = running.updated(GradientEstimate(value, value), theta, debias=debias)
    assert running.estimate is not None
    assert running.estimate.grad_sqr == pytest.approx(value, abs=1e-9)


def test_without_debiasing_the_first_samples_are_averaged_plainly() -> None:
    running = RunningEstimate()
    averages = []
    for value in (1.0, 2.0, 6.0, 0.0, 10.0):
        running = running.updated(GradientEstimate(value, value), 0.75, debias=False)
        assert running.estimate is not None
        averages.append(running.estimate.grad_sqr)
    assert averages == pytest.approx([1.0, 1.5, 3.0, 2.25, 0.75 * 2.25 + 0.25 * 10.0])


def test_aging_keeps_the_average_and_lessens_its_weight() -> None:
    average = MovingAverage().updated(GradientEstimate(4.0, 8.0), 0.9)
    aged = average.aged(0.9)
    assert aged.grad_sqr / aged.weight == pytest.approx(4.0)
    later = aged.updated(GradientEstimate(0.0, 0.0), 0.9)
    assert later.grad_sqr / later.weight == pytest.approx(4.0 * 0.81 / (0.81 + 1.0))
    assert average.aged(0.0) == average


def test_the_next_unbiased_sample_drops_biased_ones() -> None:
    first = RunningEstimate().updated(GradientEstimate(100.0, 100.0, biased=True), 0.9)
    assert first.estimate is not None
    assert first.estimate.biased

    second = first.updated(GradientEstimate(1.0, 2.0), 0.9)

    assert second == RunningEstimate().updated(GradientEstimate(1.0, 2.0), 0.9)


def test_biased_samples_after_unbiased_ones_are_averaged_in_until_unbiased_ones_return() -> None:
    """A job that goes down to one replica and up again: the old estimate ages, but is not lost."""
    known = RunningEstimate().updated(GradientEstimate(1.0, 2.0), 0.9)
    alone = known.updated(GradientEstimate(3.0, 2.0, biased=True), 0.9)
    assert alone.estimate is not None
    assert alone.estimate.biased
    assert 1.0 < alone.estimate.grad_sqr < 3.0

    again = alone.updated(GradientEstimate(5.0, 2.0), 0.9)

    assert again.unbiased == known.unbiased.aged(0.9).updated(GradientEstimate(5.0, 2.0), 0.9)
    assert again.biased is None


@pytest.mark.parametrize("smoothing", [1.0, -0.1, math.nan])
def test_smoothing_out_of_range_is_refused(smoothing: float) -> None:
    with pytest.raises(ValueError, match=r"got smoothing .*at least 0 and below 1"):
        RunningEstimate().updated(GradientEstimate(1.0, 1.0), smoothing)
    with pytest.raises(ValueError, match="got smoothing"):
        MovingAverage().aged(smoothing)
