"""The estimates that one step gives of the gradients of a parameter group, and their moving averages.

The formulas are those of AdaScale SGD (Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for
Distributed Training", ICML 2020, arXiv 2007.05105, section 3 and appendix B.3), with the terms of
`adascale_core.batch.gain`.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from adascale_core.batch.gain import GradientEstimate, require_scale, require_smoothing


def from_micro_gradients(
    count: int, mean_of_sqr: float, sqr_of_mean: float, scale: float
) -> tuple[float, float]:
    """Return the unbiased `grad_sqr` and `grad_var` from the gradients that one step is the mean of."""
    # With n micro-gradients g_i of equal batch size, L = mean |g_i|^2 and M = |mean g_i|^2:
    # grad_sqr = (n M - L) / (n - 1) and grad_var = (L - M) S / (n - 1). (Appendix B.3 of the paper, with
    # the variance converted to B0 from any batch size of a micro-gradient.)
    if count < 2:
        raise ValueError(
            f"got {count} gradient in a step; the variance of gradients needs at least 2: "
            "use from_consecutive_gradients"
        )
    require_scale(scale)
    return (
        (count * sqr_of_mean - mean_of_sqr) / (count - 1),
        (mean_of_sqr - sqr_of_mean) * (scale / (count - 1)),
    )


def from_consecutive_gradients(
    inner_product: float, sqr_of_difference: float, previous_scale: float, scale: float
) -> tuple[float, float]:
    """Return the biased `grad_sqr` and `grad_var` from two consecutive steps of one replica.

    The two gradients take the place of two gradients at the same point: grad_sqr = g1 . g2, and the
    difference has variance grad_var (1/S1 + 1/S2). AdaptDL estimates the noise of one replica in this way.
    """
    # The bias: the parameters move between the two steps, by d, so that grad_var contains
    # |H d|^2 / (1/S1 + 1/S2) with H the Hessian. With SGD, d = -lr g1, so that grad_sqr lacks lr tr(H V), V
    # the covariance of g1, besides what the true gradient loses by the step: where noise dominates, more than
    # all of it. Both effects vanish with the learning rate. For equal scales this is `from_micro_gradients`
    # with n = 2.
    require_scale(previous_scale)
    require_scale(scale)
    return inner_product, sqr_of_difference / (1.0 / previous_scale + 1.0 / scale)


@dataclass(frozen=True, slots=True)
class WeightedSums:
    """Weighted sums over estimates, and of their weights, which are at most 1. The average is their quotient.

    So it is debiased (nothing pulls it to an initial value), and stays right when the smoothing changes.
    """

    grad_sqr: float = 0.0
    grad_var: float = 0.0
    weight: float = 0.0
    square: float = 0.0  # of `grad_sqr`
    sqr_weight: float = 0.0
    count: int = 0

    def with_sample(
        self, grad_sqr: float, grad_var: float, smoothing: float, *, debias: bool
    ) -> "WeightedSums":
        """Return the sums with one more estimate."""
        # Without `debias`, as in appendix B.3 of the paper: the plain mean of the first 1 / (1 - smoothing)
        # estimates, and a moving average after that.
        count = self.count + 1
        new = 1.0 - smoothing if debias else max(1.0 / count, 1.0 - smoothing)
        past = 1.0 - new
        return WeightedSums(
            past * self.grad_sqr + new * grad_sqr,
            past * self.grad_var + new * grad_var,
            past * self.weight + new,
            past * self.square + new * grad_sqr * grad_sqr,
            past * past * self.sqr_weight + new * new,
            count,
        )

    def aged(self, smoothing: float) -> "WeightedSums":
        """Return the sums with less weight beside the next estimates."""
        return WeightedSums(
            smoothing * self.grad_sqr,
            smoothing * self.grad_var,
            smoothing * self.weight,
            smoothing * self.square,
            smoothing * smoothing * self.sqr_weight,
            self.count,
        )


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """The exponential moving average of the estimates of a parameter group."""

    unbiased: WeightedSums = WeightedSums()  # of estimates from micro-gradients
    # of these together with later ones from consecutive gradients, if there are any
    biased: WeightedSums | None = None

    def updated(
        self, grad_sqr: float, grad_var: float, smoothing: float, *, biased: bool = False, debias: bool = True
    ) -> "MovingAverage":
        """Return the average with the estimates of one more step; `biased` if from consecutive gradients."""
        require_smoothing(smoothing)
        past = self.unbiased if self.biased is None or not biased else self.biased
        sums = past.with_sample(grad_sqr, grad_var, smoothing, debias=debias)
        if not biased:
            return MovingAverage(sums)
        # With smoothing 0 the unbiased average would get the weight 0 and be lost, so it stays as it is.
        return MovingAverage(self.unbiased.aged(smoothing) if smoothing > 0.0 else self.unbiased, sums)

    def estimate(self) -> GradientEstimate | None:
        """Return the average with the standard error of its `grad_sqr`; None without any estimate."""
        sums = self.unbiased if self.biased is None else self.biased
        if sums.weight <= 0.0:
            return None
        mean, variance = sums.grad_sqr / sums.weight, sums.grad_var / sums.weight
        # The mean has the error of that of so many samples of equal weight.
        samples = sums.weight * sums.weight / sums.sqr_weight
        spread = sums.square / sums.weight - mean * mean
        error = math.sqrt(max(spread, 0.0) / (samples - 1.0)) if samples > 1.0 + 1e-9 else math.inf
        if not math.isfinite(error):  # One sample does not show its error.
            error = min(abs(mean) + abs(variance), sys.float_info.max)
        return GradientEstimate(mean, variance, self.biased is not None, error)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as numbers."""
        return {"unbiased": asdict(self.unbiased), "biased": self.biased and asdict(self.biased)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "MovingAverage":
        """Return the average that `state_dict` returned `state` for."""
        biased = state["biased"]
        return cls(WeightedSums(**state["unbiased"]), None if biased is None else WeightedSums(**biased))


TOLERANCE = 1e-6

IMPLAUSIBLE_CLIPPING = 1e-3
"""If no loss scale was inferred before, a change below this factor is not taken for clipping alone."""


def infer_loss_scale(after_backward: float, before_step: float, known: float) -> float:
    """Return the loss scale, from squared norms of the gradients at two times; NaN if it is unclear.

    GradScalers start from a power of two and double or halve, so a change of the norm by a power of two is
    unscaling, and any other change is clipping, with the scale `known` from before.
    """
    if not (after_backward > 0.0 and before_step > 0.0 and math.isfinite(after_backward + before_step)):
        return known
    power = math.log2(before_step) / 2.0 - math.log2(after_backward) / 2.0
    if abs(power - round(power)) < TOLERANCE:
        return 2.0 ** -round(power)
    is_unclear = known == 1.0 and power < math.log2(IMPLAUSIBLE_CLIPPING)
    return math.nan if is_unclear else known
