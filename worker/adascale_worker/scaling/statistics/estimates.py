"""The estimates that one step gives of the gradients of each parameter group, and their moving averages.

All numbers are tensors of shape (groups,). They are on the host, or on the device of the learning rates if
these are tensors on a GPU, so that a step can be made without reading them back.

The formulas are those of AdaScale SGD (Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for
Distributed Training", ICML 2020, arXiv 2007.05105, section 3 and appendix B.3), with the terms of
`adascale_core.batch.gain`.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adascale_core.batch.gain import GradientEstimate, require_scale, require_smoothing
from adascale_worker.scaling.statistics.norms import accumulation_dtype


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The estimates from one step, for each parameter group."""

    grad_sqr: Tensor  # estimated squared norms of the true gradients, shape (groups,)
    grad_var: Tensor  # estimated total variances of a gradient at the initial batch size, shape (groups,)
    valid: Tensor  # whether the numbers are usable, shape (groups,). Numbers that are not may have any value.
    biased: bool = False  # whether they come from consecutive gradients


def from_micro_gradients(
    count: int, mean_of_sqr: Tensor, sqr_of_mean: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
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
    inner_product: Tensor, sqr_of_difference: Tensor, previous_scale: float, scale: float
) -> tuple[Tensor, Tensor]:
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


UNBIASED, BIASED = 0, 1
GRAD_SQR, GRAD_VAR, WEIGHT, SQUARE, SQR_WEIGHT, COUNT = range(6)
NAMES = ("grad_sqr", "grad_var", "weight", "square", "sqr_weight", "count")


class MovingAverages:
    """Exponential moving averages of the estimates of steps, per parameter group. Immutable.

    Weighted sums and weights are kept separately, and divided when they are read. So an average is debiased
    (nothing pulls it to an initial value), and stays right when the smoothing changes.
    """

    # Each group has two averages: of estimates from micro-gradients, and of these together with estimates
    # from consecutive gradients. The second starts from the first, and the next unbiased estimate deletes it.

    def __init__(self, sums: Tensor) -> None:
        # shape (2, len(NAMES), groups). The weights are at most 1; 0 without an estimate.
        self._sums = sums
        self._on_host: list[GradientEstimate | None] | None = None

    @classmethod
    def empty(cls, groups: int, device: torch.device) -> "MovingAverages":
        """Return averages of no estimates, for `groups` parameter groups."""
        return cls(torch.zeros(2, len(NAMES), groups, dtype=accumulation_dtype(device), device=device))

    @property
    def groups(self) -> int:
        """The number of parameter groups."""
        return self._sums.shape[-1]

    def to(self, device: torch.device) -> "MovingAverages":
        """Return the same averages on `device`."""
        if device == self._sums.device:
            return self
        return MovingAverages(self._sums.to(device, accumulation_dtype(device)))

    def with_groups(self, groups: int) -> "MovingAverages":
        """Return the same averages with empty ones for the additional groups, up to `groups`."""
        if groups <= self.groups:
            return self
        new = MovingAverages.empty(groups - self.groups, self._sums.device)
        return MovingAverages(torch.cat([self._sums, new._sums], -1))

    def without(self, groups: Sequence[int]) -> "MovingAverages":
        """Return the same averages without the averages of `groups`."""
        numbers = torch.arange(self.groups, device=self._sums.device)
        kept = ~torch.isin(numbers, torch.tensor(groups, device=self._sums.device))
        return MovingAverages(torch.where(kept, self._sums, 0.0))

    def updated(self, step: StepEstimate, smoothing: float, *, debias: bool = True) -> "MovingAverages":
        """Return the averages with the estimates of one more step."""
        require_smoothing(smoothing)
        sums = self._sums
        past = self._latest() if step.biased else sums[UNBIASED]
        ones = torch.ones_like(step.grad_sqr)
        # Without `debias`, as in appendix B.3 of the paper: the plain mean of the first 1 / (1 - smoothing)
        # estimates, and a moving average after that.
        count = past[COUNT] + 1.0
        numbers = torch.stack([step.grad_sqr, step.grad_var, ones, step.grad_sqr.square(), ones, count])
        share = ones - smoothing if debias else (1.0 / count).clamp(min=1.0 - smoothing)
        average = torch.lerp(past, numbers, share)
        average[SQR_WEIGHT] = (1.0 - share).square() * past[SQR_WEIGHT] + share.square()
        average[COUNT] = count
        if step.biased:
            # With smoothing 0 the unbiased average would get the weight 0 and be lost, so it stays as it is.
            aged = sums[UNBIASED]
            if smoothing > 0.0:
                aged = smoothing * aged
                aged[SQR_WEIGHT] *= smoothing
                aged[COUNT] = sums[UNBIASED, COUNT]
            new = torch.stack([aged, average])
        else:
            new = torch.stack([average, torch.zeros_like(average)])
        return MovingAverages(torch.where(step.valid, new, sums))

    def gains(self, scale: float) -> Tensor:
        """Return the gain of each group at `scale`, shape (groups,), without waiting for the device.

        As `GradientEstimate.gain`; 1 for a group without an estimate.
        """
        return _gain(*self._averages(), scale)

    def gain(self, scale: float, counted: Tensor) -> Tensor:
        """Return the gain of several groups together at `scale`, shape (), without waiting for the device."""
        grad_sqr, grad_var = (torch.where(counted, average, 0.0) for average in self._averages())
        return _gain(grad_sqr.sum(), grad_var.sum(), scale)

    def on_host(self) -> Sequence[GradientEstimate | None]:
        """Return the average of each group as numbers; None for a group without an estimate.

        The first call waits for the device.
        """
        if self._on_host is None:
            sums, is_biased = self._latest()[:COUNT], self._sums[BIASED, WEIGHT] > 0.0
            rows = torch.cat([sums, is_biased[None].to(sums.dtype)]).T.tolist()
            self._on_host = [_estimate(*row) if row[WEIGHT] > 0.0 else None for row in rows]
        return self._on_host

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the averages of each group as numbers."""
        sums = self._sums.tolist()

        def average(kind: int, group: int) -> dict[str, float]:
            named = {name: row[group] for name, row in zip(NAMES, sums[kind], strict=True)}
            return {**named, "count": int(named["count"])}

        return [
            {
                "unbiased": average(UNBIASED, group),
                "biased": average(BIASED, group) if sums[BIASED][WEIGHT][group] > 0.0 else None,
            }
            for group in range(self.groups)
        ]

    @classmethod
    def from_state_dict(cls, state: Sequence[Mapping[str, Any]], device: torch.device) -> "MovingAverages":
        """Return the averages that `state_dict` returned `state` for."""
        empty = dict.fromkeys(NAMES, 0.0)
        averages = [[group[kind] or empty for group in state] for kind in ("unbiased", "biased")]
        sums = [[[average[name] for average in kind] for name in NAMES] for kind in averages]
        return cls(torch.tensor(sums, dtype=accumulation_dtype(device), device=device))

    def _latest(self) -> Tensor:
        """The sums of the average that is read: the biased average if it exists, for each group."""
        return torch.where(self._sums[BIASED, WEIGHT] > 0.0, self._sums[BIASED], self._sums[UNBIASED])

    def _averages(self) -> tuple[Tensor, Tensor]:
        """`grad_sqr` and `grad_var`; zero for a group without an estimate."""
        sums = self._latest()
        has_estimate = sums[WEIGHT] > 0.0
        weight = torch.where(has_estimate, sums[WEIGHT], 1.0)
        return sums[GRAD_SQR] / weight, sums[GRAD_VAR] / weight


def _estimate(
    grad_sqr: float, grad_var: float, weight: float, square: float, sqr_weight: float, is_biased: float
) -> GradientEstimate:
    """Return the estimate of weighted sums, with the standard error of the weighted mean of `grad_sqr`."""
    mean, variance = grad_sqr / weight, grad_var / weight
    # The mean has the error of that of so many samples of equal weight.
    samples = weight**2 / sqr_weight
    spread = square / weight - mean**2
    error = math.sqrt(max(spread, 0.0) / (samples - 1.0)) if samples > 1.0 + 1e-9 else math.inf
    if not math.isfinite(error):  # One sample does not show its error.
        error = min(abs(mean) + abs(variance), sys.float_info.max)
    return GradientEstimate(mean, variance, is_biased > 0.0, error)


def _gain(grad_sqr: Tensor, grad_var: Tensor, scale: float) -> Tensor:
    require_scale(scale)
    grad_sqr, grad_var = grad_sqr.clamp(min=0.0), grad_var.clamp(min=0.0)
    largest = torch.maximum(grad_sqr, grad_var)
    is_positive = largest > 0.0
    # Dividing first keeps the sum of two huge numbers, or the quotient of two tiny ones, in range.
    largest = torch.where(is_positive, largest, 1.0)
    grad_sqr, grad_var = grad_sqr / largest, grad_var / largest
    gain = (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)
    return torch.where(is_positive, gain, 1.0).clamp(min(1.0, scale), max(1.0, scale))
