"""What steps say of the gradients of each parameter group, and what is known after many of them.

All numbers are tensors of one number per group, and lie where learning rates lie: in the host's memory, or,
where these are tensors on a GPU, there, so that a step is made without the host knowing any of them.

The formulas are those of AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105, section 3 and appendix B.3), in
the words of `adascale_core.gain`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adascale_core.gain import GradientEstimate, require_scale, require_smoothing
from adascale_worker.statistics.norms import widest_type


@dataclass(frozen=True, slots=True)
class Samples:
    """What one step says of each parameter group.

    Attributes:
        grad_sqr: estimated squared norms of the true gradients, shape (groups,).
        grad_var: estimated total variances of a gradient at the initial batch size, shape (groups,).
        valid: whether the numbers are of use, shape (groups,); those that are not may be anything.
        biased: whether they come from consecutive gradients.
    """

    grad_sqr: Tensor
    grad_var: Tensor
    valid: Tensor
    biased: bool = False


def from_micro_gradients(
    count: int, mean_of_sqr: Tensor, sqr_of_mean: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the unbiased `grad_sqr` and `grad_var` from the gradients that one step is the mean of.

    With n micro-gradients g_i of equal batch size, L = mean |g_i|^2 and M = |mean g_i|^2:
    grad_sqr = (n M - L) / (n - 1) and grad_var = (L - M) S / (n - 1). (Appendix B.3 of the paper, with
    the variance taken to B0 whatever batch size a micro-gradient has.)

    Args:
        count: n, replicas times accumulation steps.
        mean_of_sqr: L, any shape.
        sqr_of_mean: M, of the same shape.
        scale: S of the whole step, all n micro-gradients together.

    Raises:
        ValueError: fewer than two gradients, or the scale is not a positive finite number.
    """
    if count < 2:
        raise ValueError(
            f"got {count} gradient in a step; the spread of gradients needs at least 2: "
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

    The two stand in for two gradients at the same point: grad_sqr = g1 . g2, and the difference has
    variance grad_var (1/S1 + 1/S2). For equal scales this is `from_micro_gradients` with n = 2.

    The bias: the parameters moved between the two, by d say, so that grad_var contains
    |H d|^2 / (1/S1 + 1/S2) with H the Hessian, and grad_sqr is the product of two gradients a step apart.
    Both vanish with the learning rate. (AdaptDL's gradient noise scale does so for one replica.)

    Args:
        inner_product: g1 . g2, any shape.
        sqr_of_difference: |g1 - g2|^2, of the same shape.
        previous_scale: S1, scale of the earlier step.
        scale: S2, scale of the later one.

    Raises:
        ValueError: a scale is not a positive finite number.
    """
    require_scale(previous_scale)
    require_scale(scale)
    return inner_product, sqr_of_difference / (1.0 / previous_scale + 1.0 / scale)


UNBIASED, BIASED = 0, 1
GRAD_SQR, GRAD_VAR, WEIGHT = 0, 1, 2


class Estimates:
    """The samples of many steps, averaged with exponentially falling weights, per parameter group.

    Weighted sums and weights are kept apart, and divided when read. So an average is debiased (nothing is
    pulled to an initial value), and stays right when the smoothing changes on the way. There are two
    averages of each group: one of samples from micro-gradients, and one that samples from consecutive
    gradients went into since; it starts from the first, and the next unbiased sample drops it.

    Never changed: `updated` returns new ones.

    Args:
        sums: of `grad_sqr`, of `grad_var` and of weights, all weighted, of both averages: shape
            (2, 3, groups). The weights are at most 1, and 0 where there is no sample.
        counts: of samples, shape (2, groups).
    """

    def __init__(self, sums: Tensor, counts: Tensor) -> None:
        self._sums = sums
        self._counts = counts
        self._told: list[GradientEstimate | None] | None = None

    @classmethod
    def nothing(cls, groups: int, device: torch.device) -> "Estimates":
        """Nothing known of any of `groups` parameter groups."""
        dtype = widest_type(device)
        return cls(
            torch.zeros(2, 3, groups, dtype=dtype, device=device),
            torch.zeros(2, groups, dtype=dtype, device=device),
        )

    @property
    def groups(self) -> int:
        """The number of parameter groups."""
        return self._counts.shape[-1]

    def to(self, device: torch.device) -> "Estimates":
        """Return the same at another place."""
        if device == self._sums.device:
            return self
        dtype = widest_type(device)
        return Estimates(self._sums.to(device, dtype), self._counts.to(device, dtype))

    def with_groups(self, groups: int) -> "Estimates":
        """Return the same, with nothing known of the groups that are new."""
        if groups <= self.groups:
            return self
        new = Estimates.nothing(groups - self.groups, self._sums.device)
        return Estimates(torch.cat([self._sums, new._sums], -1), torch.cat([self._counts, new._counts], -1))

    def updated(self, samples: Samples, smoothing: float, *, debias: bool = True) -> "Estimates":
        """Return what is known after one more step.

        Args:
            samples: what the step said of each group.
            smoothing: share of the past, theta, at least 0 and below 1.
            debias: True divides by the weight so far. False is the paper's appendix B.3: the plain mean
                of the first 1 / (1 - theta) samples, a moving average after that.

        Raises:
            ValueError: `smoothing` is out of range.
        """
        require_smoothing(smoothing)
        sums, counts = self._sums, self._counts
        past, count = self._latest() if samples.biased else (sums[UNBIASED], counts[UNBIASED])
        sample = torch.stack([samples.grad_sqr, samples.grad_var, torch.ones_like(samples.grad_sqr)])
        if debias:
            average = torch.lerp(past, sample, 1.0 - smoothing)
        else:
            average = torch.lerp(past, sample, (1.0 / (count + 1.0)).clamp(min=1.0 - smoothing))
        if samples.biased:
            # With smoothing 0 the past would weigh nothing, and nothing would be known of it: it stays.
            aged = smoothing * sums[UNBIASED] if smoothing > 0.0 else sums[UNBIASED]
            new, new_counts = torch.stack([aged, average]), torch.stack([counts[UNBIASED], count + 1.0])
        else:
            new = torch.stack([average, torch.zeros_like(average)])
            new_counts = torch.stack([count + 1.0, torch.zeros_like(count)])
        return Estimates(
            torch.where(samples.valid, new, sums), torch.where(samples.valid, new_counts, counts)
        )

    def gains(self, scale: float) -> Tensor:
        """Return the gain of each group at `scale`, shape (groups,), without a word to the host.

        As `GradientEstimate.gain`; 1 where nothing is known.
        """
        return _gain(*self._averages(), scale)

    def gain(self, scale: float) -> Tensor:
        """Return the gain of all groups together at `scale`, no dimension, without a word to the host."""
        grad_sqr, grad_var = self._averages()
        return _gain(grad_sqr.sum(), grad_var.sum(), scale)

    def told(self) -> Sequence[GradientEstimate | None]:
        """Return the estimate of each group as numbers; None where nothing is known.

        The first time this waits for the device.
        """
        if self._told is None:
            self._told = self.tell(self.packed().tolist())
        return self._told

    def packed(self) -> Tensor:
        """Return what `tell` makes numbers of, so that it can be read together with other things."""
        (sums, _), biased = self._latest(), self._sums[BIASED, WEIGHT] > 0.0
        return torch.cat([*sums, biased.to(sums.dtype)])

    def tell(self, numbers: Sequence[float]) -> list[GradientEstimate | None]:
        """Return `told` from the numbers of `packed`."""
        groups = zip(*(numbers[row * self.groups : (row + 1) * self.groups] for row in range(4)), strict=True)
        self._told = [
            GradientEstimate(grad_sqr / weight, grad_var / weight, biased > 0.0) if weight > 0.0 else None
            for grad_sqr, grad_var, weight, biased in groups
        ]
        return self._told

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the averages of each group as numbers."""
        sums, counts = self._sums.tolist(), self._counts.tolist()

        def average(kind: int, group: int) -> dict[str, float]:
            grad_sqr, grad_var, weight = (row[group] for row in sums[kind])
            count = int(counts[kind][group])
            return {"grad_sqr": grad_sqr, "grad_var": grad_var, "weight": weight, "count": count}

        return [
            {
                "unbiased": average(UNBIASED, group),
                "biased": average(BIASED, group) if sums[BIASED][WEIGHT][group] > 0.0 else None,
            }
            for group in range(self.groups)
        ]

    @classmethod
    def from_state_dict(cls, state: Sequence[Mapping[str, Any]], device: torch.device) -> "Estimates":
        """Return what `state_dict` was called of."""
        nothing = {"grad_sqr": 0.0, "grad_var": 0.0, "weight": 0.0, "count": 0}
        averages = [[group[kind] or nothing for group in state] for kind in ("unbiased", "biased")]
        dtype = widest_type(device)
        parts = ("grad_sqr", "grad_var", "weight")
        sums = [[[average[part] for average in kind] for part in parts] for kind in averages]
        counts = [[average["count"] for average in kind] for kind in averages]
        return cls(
            torch.tensor(sums, dtype=dtype, device=device), torch.tensor(counts, dtype=dtype, device=device)
        )

    def _latest(self) -> tuple[Tensor, Tensor]:
        """The average that is read, of each group."""
        biased = self._sums[BIASED, WEIGHT] > 0.0
        return (
            torch.where(biased, self._sums[BIASED], self._sums[UNBIASED]),
            torch.where(biased, self._counts[BIASED], self._counts[UNBIASED]),
        )

    def _averages(self) -> tuple[Tensor, Tensor]:
        """`grad_sqr` and `grad_var`; zeros where nothing is known."""
        sums, _ = self._latest()
        known = sums[WEIGHT] > 0.0
        weight = torch.where(known, sums[WEIGHT], 1.0)
        return sums[GRAD_SQR] / weight, sums[GRAD_VAR] / weight


def _gain(grad_sqr: Tensor, grad_var: Tensor, scale: float) -> Tensor:
    require_scale(scale)
    grad_sqr, grad_var = grad_sqr.clamp(min=0.0), grad_var.clamp(min=0.0)
    largest = torch.maximum(grad_sqr, grad_var)
    known = largest > 0.0
    # Dividing first keeps the sum of two huge numbers, or the quotient of two tiny ones, in range.
    largest = torch.where(known, largest, 1.0)
    grad_sqr, grad_var = grad_sqr / largest, grad_var / largest
    gain = (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)
    return torch.where(known, gain, 1.0).clamp(min(1.0, scale), max(1.0, scale))
