"""What a larger batch is worth: the estimates and the gain of AdaScale SGD.

The formulas are those of AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105, section 3 and appendix
B.3), in the words of our design: a gradient at the initial batch size B0 is the true gradient, of squared
norm `grad_sqr`, plus noise of total variance `grad_var`. At scale S, a batch of S * B0, the noise has
variance `grad_var / S`. Neither quantity depends on S, so a change of scale keeps what is known.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

SMOOTHING_HORIZON = 1000.0
"""Scale at which a single step is taken to be information enough (the paper's default)."""


@dataclass(frozen=True, slots=True)
class GradientEstimate:
    """What is known of the gradients of a model, or of one of its parameter groups.

    The two numbers are unbiased, so either may be negative by chance. They are clamped only here, where
    they are read: clamping them before they are averaged would bias the average. The clamp is at zero,
    hence the same for gradients in any unit.

    Attributes:
        grad_sqr: estimated squared norm of the true gradient.
        grad_var: estimated total variance (trace of the covariance) of a gradient at B0.
        biased: whether it comes from consecutive gradients, not from those of one step.

    Raises:
        ValueError: a number is infinite or NaN.
    """

    grad_sqr: float
    grad_var: float
    biased: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.grad_sqr) and math.isfinite(self.grad_var)):
            raise ValueError(
                f"got grad_sqr={self.grad_sqr} and grad_var={self.grad_var}; both must be finite: "
                "leave a step whose gradients are not finite out of the estimate"
            )

    def gain(self, scale: float) -> float:
        """Return how many steps at B0 one step at `scale` is worth.

        (grad_var + grad_sqr) / (grad_var / S + grad_sqr): between 1 and S, on either side of S = 1. It is
        1 where nothing is known (both numbers zero): a gain of 1 is right for no noise, and safe.

        Raises:
            ValueError: `scale` is not a positive finite number.
        """
        require_scale(scale)
        grad_sqr = max(self.grad_sqr, 0.0)
        grad_var = max(self.grad_var, 0.0)
        largest = max(grad_sqr, grad_var)
        if largest == 0.0:
            return 1.0
        # Dividing first keeps the sum of two huge numbers, or the quotient of two tiny ones, in range.
        grad_sqr /= largest
        grad_var /= largest
        gain = (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)
        # Rounding must not carry the gain out of its bounds by the last bit.
        return min(max(gain, min(1.0, scale)), max(1.0, scale))

    def efficiency(self, scale: float) -> float:
        """Return gain / S: the share of each sample's worth at B0 that is left at `scale`.

        At most 1 for S >= 1.

        Raises:
            ValueError: `scale` is not a positive finite number.
        """
        return self.gain(scale) / scale


def total(estimates: Iterable[GradientEstimate]) -> GradientEstimate:
    """Return the estimate for all parameter groups together: norms and variances add up."""
    known = list(estimates)
    return GradientEstimate(
        math.fsum(estimate.grad_sqr for estimate in known),
        math.fsum(estimate.grad_var for estimate in known),
        any(estimate.biased for estimate in known),
    )


def default_smoothing(scale: float) -> float:
    """Return the paper's share of the past in the moving average, max(1 - S/1000, 0)."""
    require_scale(scale)
    return max(1.0 - scale / SMOOTHING_HORIZON, 0.0)


def require_scale(scale: float) -> None:
    """Raise ValueError unless `scale` is a positive finite number."""
    if not (math.isfinite(scale) and scale > 0.0):
        raise ValueError(
            f"got scale {scale}; it must be positive and finite: replicas * local batch size * accumulation "
            "steps / initial batch size"
        )


def require_smoothing(smoothing: float) -> None:
    """Raise ValueError unless `smoothing` is at least 0 and below 1."""
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(
            f"got smoothing {smoothing}; it must be at least 0 and below 1: the share of the past in the "
            "moving average of the estimates"
        )
