"""The formulas of AdaScale against the paper's properties and values computed by hand."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adascale_core.batch.gain import GradientEstimate, default_smoothing, require_smoothing, total
from adascale_core.batch.plans import BatchBounds, EfficiencyBound, plan_batch

numbers = st.floats(min_value=-1e150, max_value=1e150)
sizes = st.just(0.0) | st.floats(min_value=1e-6, max_value=1e3)
scales = st.floats(min_value=1e-3, max_value=1e6)


@given(numbers, numbers, scales)
def test_gain_lies_between_one_and_scale(grad_sqr: float, grad_var: float, scale: float) -> None:
    gain = GradientEstimate(grad_sqr, grad_var).gain(scale)
    assert min(1.0, scale) <= gain <= max(1.0, scale)


@given(numbers, numbers, scales, scales)
def test_the_gain_does_not_fall_when_the_scale_rises(
    sqr: float, var: float, scale: float, other: float
) -> None:
    estimate = GradientEstimate(sqr, var)
    low, high = sorted((scale, other))
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
def test_a_scale_that_is_not_positive_and_finite_is_rejected(scale: float) -> None:
    with pytest.raises(ValueError, match=r"got scale .*positive and finite"):
        GradientEstimate(1.0, 1.0).gain(scale)
    with pytest.raises(ValueError, match="got scale"):
        default_smoothing(scale)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_estimate_is_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        GradientEstimate(bad, 1.0)
    with pytest.raises(ValueError, match="must be finite"):
        GradientEstimate(1.0, bad)


@given(sizes, sizes, st.floats(1e-9, 1e9), st.floats(1.0, 1e4))
def test_the_cautious_gain_is_the_lowest_of_the_range(
    sqr: float, var: float, error: float, scale: float
) -> None:
    estimate = GradientEstimate(sqr, var, grad_sqr_error=error)
    low, high = estimate.gain_range(scale)
    assert low <= estimate.gain(scale) <= high
    assert estimate.cautious.gain(scale) == low


def test_a_squared_gradient_that_is_zero_by_chance_gives_no_cautious_gain_of_s() -> None:
    by_chance = GradientEstimate(-0.3, 1.0, grad_sqr_error=0.1)
    assert by_chance.gain(64.0) == 64.0
    assert by_chance.cautious.gain(64.0) == GradientEstimate(0.1, 1.0).gain(64.0)
    assert by_chance.gain_range(64.0) == pytest.approx((1.1 / (1 / 64 + 0.1), 64.0))


def test_without_a_known_error_the_range_is_the_gain() -> None:
    estimate = GradientEstimate(0.5, 2.0)
    assert estimate.cautious == estimate
    assert estimate.gain_range(8.0) == (estimate.gain(8.0),) * 2


@given(numbers, numbers, st.floats(1.0, 1e6), st.floats(1.001, 1e6))
def test_steps_with_a_limit_take_a_share_of_the_steps_without_it(
    sqr: float, var: float, scale: float, max_gain: float
) -> None:
    assume(not 0.0 < abs(var) < 1e-300)  # parts of such small numbers have fewer digits
    estimate = GradientEstimate(sqr, var)
    gain, limited = estimate.gain(scale), estimate.limited(max_gain).gain(scale)
    assert 1 / limited == pytest.approx(1 / max_gain + (1 - 1 / max_gain) / gain, rel=1e-9)
    assert 1.0 <= limited <= min(gain, max_gain) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("grad_sqr", "grad_var", "max_gain", "expected"),
    [
        (0.0, 1.0, 20.0, (0.05, 0.95)),
        (1.0, 0.0, 20.0, (1.0, 0.0)),
        (2.0, 8.0, 4.0, (4.0, 6.0)),
        (-1.0, 8.0, 4.0, (2.0, 6.0)),
        (0.0, 0.0, 4.0, (0.0, 0.0)),
    ],
)
def test_a_limit_counts_a_part_of_the_variance_as_squared_gradient(
    grad_sqr: float, grad_var: float, max_gain: float, expected: tuple[float, float]
) -> None:
    estimate = GradientEstimate(grad_sqr, grad_var, biased=True, grad_sqr_error=0.5)
    limited = estimate.limited(max_gain)
    assert (limited.grad_sqr, limited.grad_var) == pytest.approx(expected)
    assert (limited.biased, limited.grad_sqr_error) == (True, 0.5)


def test_a_batch_is_not_larger_than_limited_gains_are_worth() -> None:
    only_noise, bounds = GradientEstimate(0.0, 1.0), BatchBounds(4, 512, (2, 256))
    assert plan_batch(bounds, 2, estimate=only_noise, efficiency=EfficiencyBound(0.5)).global_bsz == 512
    # gain(S) / S = 1 / (S / 9 + 8 / 9) is 0.5 at S = 10
    limited = only_noise.limited(9.0)
    assert plan_batch(bounds, 2, estimate=limited, efficiency=EfficiencyBound(0.5)).global_bsz == 40
    by_goodput = plan_batch(bounds, 2, estimate=limited, throughput=lambda plan: 1 / (16 + plan.global_bsz))
    assert by_goodput.global_bsz < 512


@pytest.mark.parametrize("max_gain", [1.0, 0.0, -3.0, math.inf, math.nan])
def test_a_limit_that_is_not_above_one_and_finite_is_rejected(max_gain: float) -> None:
    with pytest.raises(ValueError, match=r"got max_gain .*above 1 and finite"):
        GradientEstimate(1.0, 1.0).limited(max_gain)


def test_the_estimates_of_groups_add_up() -> None:
    groups = [GradientEstimate(1.0, -2.0), GradientEstimate(0.5, 3.0)]
    assert total(groups) == GradientEstimate(1.5, 1.0)
    assert total([*groups, GradientEstimate(0.0, 0.0, biased=True)]).biased
    errors = [GradientEstimate(1.0, 1.0, grad_sqr_error=0.25), GradientEstimate(1.0, 1.0, grad_sqr_error=0.5)]
    assert total(errors).grad_sqr_error == 0.75


def test_the_default_smoothing_is_that_of_the_paper() -> None:
    assert default_smoothing(1.0) == pytest.approx(0.999)
    assert default_smoothing(500.0) == pytest.approx(0.5)
    assert default_smoothing(4000.0) == 0.0


@pytest.mark.parametrize("smoothing", [1.0, -0.1, math.nan])
def test_smoothing_out_of_range_is_rejected(smoothing: float) -> None:
    with pytest.raises(ValueError, match=r"got smoothing .*at least 0 and below 1"):
        require_smoothing(smoothing)
