"""The gain of AdaScale SGD: how many steps at the initial batch size one step is worth.

The formulas are those of Johnson et al. 2020 (AdaScale SGD, arXiv 2007.05105, section 3 and appendix B.3). A
gradient at the initial batch size B0 is the true gradient, of squared norm `grad_sqr`, plus noise of total
variance `grad_var`. At scale S, with a batch of S * B0 samples, the noise has the variance `grad_var / S`.
Neither quantity depends on S, so estimates stay valid when the scale changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

SMOOTHING_HORIZON = 1000.0
"""The scale at which a single step is enough for an estimate (the paper's default)."""


@dataclass(frozen=True, slots=True)
class GradientEstimate:
    """An estimate of the gradients of a model, or of one of its parameter groups.

    Both numbers are unbiased, so each may be negative by chance. They are clamped only when the gain is
    computed: clamping them before they are averaged would bias the average. They are clamped at zero, which
    does not depend on the unit of the gradients.
    """

    grad_sqr: float  # estimated squared norm of the true gradient
    grad_var: float  # estimated total variance (trace of the covariance) of a gradient at B0
    biased: bool = False  # whether it is computed from gradients of consecutive steps, not of one step
    # standard error of `grad_sqr`; 0 if it is not known. That of `grad_var` is small compared with it:
    # the variance of one gradient is far larger than what is left of it in a mean.
    grad_sqr_error: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.grad_sqr) and math.isfinite(self.grad_var)):
            raise ValueError(
                f"got grad_sqr={self.grad_sqr} and grad_var={self.grad_var}; both must be finite: "
                "leave a step whose gradients are not finite out of the estimate"
            )

    def gain(self, scale: float) -> float:
        """Return how many steps at B0 one step at `scale` is worth.

        gain(S) = (grad_var + grad_sqr) / (grad_var / S + grad_sqr)

        It is between 1 and S, also for S < 1. It is 1 if both numbers are zero, which is correct without
        noise, and safe otherwise.
        """
        require_scale(scale)
        grad_sqr = max(self.grad_sqr, 0.0)
        grad_var = max(self.grad_var, 0.0)
        largest = max(grad_sqr, grad_var)
        if largest == 0.0:
            return 1.0
        # Dividing first avoids an overflow of the sum and an underflow of the quotient.
        grad_sqr /= largest
        grad_var /= largest
        gain = (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)
        # Rounding may exceed the bounds by the last bit.
        return min(max(gain, min(1.0, scale)), max(1.0, scale))

    @property
    def cautious(self) -> GradientEstimate:
        """The estimate of one standard error more `grad_sqr`, whose gains are the lower ones.

        For decisions: with few measured steps, `grad_sqr` is often zero by chance, and the gain S.
        """
        if self.grad_sqr_error == 0.0:
            return self
        sqr = max(self.grad_sqr, 0.0) + self.grad_sqr_error
        return GradientEstimate(sqr, self.grad_var, self.biased)

    def limited(self, max_gain: float) -> GradientEstimate:
        """The estimate whose gain is below `max_gain` = L at every scale.

            1 / limited gain = 1 / L + (1 - 1 / L) / gain

        So T steps at B0 take T / L steps, and 1 - 1 / L of those without the limit in addition. This is the
        gain of another estimate, in which the L-th part of the variance counts as squared gradient, so what
        chooses batch sizes by estimates needs no limit of its own. The error of `grad_sqr` stays as it is.
        """
        require_max_gain(max_gain)
        grad_sqr, grad_var = max(self.grad_sqr, 0.0), max(self.grad_var, 0.0)
        share = grad_var / max_gain
        return replace(self, grad_sqr=grad_sqr + share, grad_var=grad_var - share)

    def gain_range(self, scale: float) -> tuple[float, float]:
        """Return the gains at one standard error more and less of `grad_sqr`, the lower one first."""
        less = GradientEstimate(self.grad_sqr - self.grad_sqr_error, self.grad_var)
        gains = self.cautious.gain(scale), less.gain(scale)
        return min(gains), max(gains)

    def efficiency(self, scale: float) -> float:
        """Return gain / S, the progress per sample relative to that at B0; at most 1 for S >= 1."""
        return self.gain(scale) / scale


def total(estimates: Iterable[GradientEstimate]) -> GradientEstimate:
    """Return the estimate for all parameter groups: the sums of squared norms and of variances."""
    groups = list(estimates)
    return GradientEstimate(
        math.fsum(estimate.grad_sqr for estimate in groups),
        math.fsum(estimate.grad_var for estimate in groups),
        any(estimate.biased for estimate in groups),
        # The same samples cause the errors of all groups, so they may add up.
        math.fsum(estimate.grad_sqr_error for estimate in groups),
    )


def default_smoothing(scale: float) -> float:
    """Return the paper's weight of the past in the moving average, max(1 - S/1000, 0)."""
    require_scale(scale)
    return max(1.0 - scale / SMOOTHING_HORIZON, 0.0)


def require_scale(scale: float) -> None:
    """Raise ValueError unless `scale` is a positive finite number."""
    if not (math.isfinite(scale) and scale > 0.0):
        raise ValueError(
            f"got scale {scale}; it must be positive and finite: replicas * local batch size * accumulation "
            "steps / initial batch size"
        )


def require_max_gain(max_gain: float) -> None:
    """Raise ValueError unless `max_gain` is a finite number above 1."""
    if not (math.isfinite(max_gain) and max_gain > 1.0):
        raise ValueError(
            f"got max_gain {max_gain}; it must be above 1 and finite: the gain that no batch size exceeds, "
            "such as 20; leave it out for gains without a limit"
        )


def require_smoothing(smoothing: float) -> None:
    """Raise ValueError unless 0 <= `smoothing` < 1."""
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(
            f"got smoothing {smoothing}; it must be at least 0 and below 1: the weight of the past in the "
            "moving average of the estimates"
        )
