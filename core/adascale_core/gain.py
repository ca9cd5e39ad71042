"""What a larger batch is worth: the estimates and the gain of AdaScale SGD.

The formulas are those of AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105, section 3 and appendix
B.3), in the words of our design: a gradient at the initial batch size B0 is the true gradient, of squared
norm `grad_sqr`, plus noise of total variance `grad_var`. At scale S, a batch of S * B0, the noise has
variance `grad_var / S`. Neither quantity depends on S, so a change of scale keeps what is known.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

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
        biased: whether it comes from consecutive gradients, see `from_consecutive_gradients`.

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


def from_micro_gradients(
    count: int, mean_of_sqr: float, sqr_of_mean: float, scale: float
) -> GradientEstimate:
    """Return the unbiased estimate from the `count` gradients that one step is the mean of.

    With n micro-gradients g_i of equal batch size, L = mean |g_i|^2 and M = |mean g_i|^2:
    grad_sqr = (n M - L) / (n - 1) and grad_var = (L - M) S / (n - 1). (Appendix B.3 of the paper, with
    the variance taken to B0 whatever batch size a micro-gradient has.)

    Args:
        count: n, replicas times accumulation steps; at least 2.
        mean_of_sqr: L.
        sqr_of_mean: M.
        scale: S of the whole step, all n micro-gradients together.

    Raises:
        ValueError: fewer than two gradients, or a number out of range.
    """
    if count < 2:
        raise ValueError(
            f"got {count} gradient in a step; the spread of gradients needs at least 2: "
            "use from_consecutive_gradients"
        )
    require_scale(scale)
    return GradientEstimate(
        (count * sqr_of_mean - mean_of_sqr) / (count - 1),
        (mean_of_sqr - sqr_of_mean) * scale / (count - 1),
    )


def from_consecutive_gradients(
    inner_product: float, sqr_of_difference: float, previous_scale: float, scale: float
) -> GradientEstimate:
    """Return the biased estimate from the gradients of two consecutive steps of one replica.

    The two stand in for two gradients at the same point: grad_sqr = g1 . g2, and the difference has
    variance grad_var (1/S1 + 1/S2). For equal scales this is `from_micro_gradients` with n = 2.

    The bias: the parameters moved between the two, by d say, so that grad_var contains
    |H d|^2 / (1/S1 + 1/S2) with H the Hessian, and grad_sqr is the product of two gradients a step apart.
    Both vanish with the learning rate. (AdaptDL's gradient noise scale does so for one replica.)

    Args:
        inner_product: g1 . g2.
        sqr_of_difference: |g1 - g2|^2.
        previous_scale: S1, scale of the earlier step.
        scale: S2, scale of the later one.

    Raises:
        ValueError: a number out of range.
    """
    require_scale(previous_scale)
    require_scale(scale)
    return GradientEstimate(
        inner_product, sqr_of_difference / (1.0 / previous_scale + 1.0 / scale), biased=True
    )


def default_smoothing(scale: float) -> float:
    """Return the paper's share of the past in the moving average, max(1 - S/1000, 0)."""
    require_scale(scale)
    return max(1.0 - scale / SMOOTHING_HORIZON, 0.0)


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """The samples of many steps, averaged with exponentially falling weights.

    The weighted sums and the weight are kept apart, and divided when read. So the average is debiased
    (nothing is pulled to an initial value), and stays right when the smoothing changes on the way.

    Attributes:
        grad_sqr: weighted sum of the samples' `grad_sqr`.
        grad_var: weighted sum of the samples' `grad_var`.
        weight: sum of the weights; 0 while there is no sample, at most 1.
        count: number of samples.
    """

    grad_sqr: float = 0.0
    grad_var: float = 0.0
    weight: float = 0.0
    count: int = 0

    def updated(self, sample: GradientEstimate, smoothing: float, *, debias: bool = True) -> "MovingAverage":
        """Return the average with one more sample.

        Args:
            sample: what one step said.
            smoothing: share of the past, theta, at least 0 and below 1.
            debias: True divides by the weight so far. False is the paper's appendix B.3: the plain mean
                of the first 1 / (1 - theta) samples, a moving average after that.

        Raises:
            ValueError: `smoothing` is out of range.
        """
        require_smoothing(smoothing)
        share = 1.0 - smoothing
        if not debias:
            share = max(share, 1.0 / (self.count + 1))
        return MovingAverage(
            (1.0 - share) * self.grad_sqr + share * sample.grad_sqr,
            (1.0 - share) * self.grad_var + share * sample.grad_var,
            (1.0 - share) * self.weight + share,
            self.count + 1,
        )

    def aged(self, smoothing: float) -> "MovingAverage":
        """Return the average after a step without a sample: unchanged, but of less weight for the next.

        With smoothing 0 the past would weigh nothing and nothing would be known; it then stays.

        Raises:
            ValueError: `smoothing` is out of range.
        """
        require_smoothing(smoothing)
        if smoothing == 0.0:
            return self
        return replace(
            self,
            grad_sqr=smoothing * self.grad_sqr,
            grad_var=smoothing * self.grad_var,
            weight=smoothing * self.weight,
        )


@dataclass(frozen=True, slots=True)
class RunningEstimate:
    """What the steps so far say of one parameter group.

    Attributes:
        unbiased: average of the samples from micro-gradients.
        biased: average that samples from consecutive gradients went into, since the last unbiased one;
            None if there was none. It starts from `unbiased`, and the next unbiased sample drops it.
    """

    unbiased: MovingAverage = field(default_factory=MovingAverage)
    biased: MovingAverage | None = None

    @property
    def estimate(self) -> GradientEstimate | None:
        """The current average, or None while there is no sample."""
        average = self.unbiased if self.biased is None else self.biased
        if average.weight == 0.0:
            return None
        return GradientEstimate(
            average.grad_sqr / average.weight, average.grad_var / average.weight, self.biased is not None
        )

    def updated(
        self, sample: GradientEstimate, smoothing: float, *, debias: bool = True
    ) -> "RunningEstimate":
        """Return what is known after one more sample; arguments as for `MovingAverage.updated`."""
        if not sample.biased:
            return RunningEstimate(self.unbiased.updated(sample, smoothing, debias=debias))
        past = self.unbiased if self.biased is None else self.biased
        return RunningEstimate(self.unbiased.aged(smoothing), past.updated(sample, smoothing, debias=debias))


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
