"""Moving averages of the estimates of many steps, for each parameter group.

All numbers are tensors with one number per group, on the host or on the device of the learning rates, as in
`adascale_worker.scaling.statistics.estimates`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adascale_core.batch.gain import GradientEstimate, require_scale, require_smoothing
from adascale_worker.scaling.statistics.estimates import StepEstimate
from adascale_worker.scaling.statistics.norms import accumulation_dtype

UNBIASED, BIASED = 0, 1
GRAD_SQR, GRAD_VAR, WEIGHT = 0, 1, 2


class MovingAverages:
    """Exponential moving averages of the estimates of steps, per parameter group.

    Weighted sums and weights are kept separately, and divided when they are read. So an average is debiased
    (nothing pulls it to an initial value), and stays right when the smoothing changes. Each group has two
    averages: of estimates from micro-gradients, and of these together with estimates from consecutive
    gradients. The second starts from the first, and the next unbiased estimate deletes it.

    Immutable: `updated` returns new averages.

    Args:
        sums: weighted sums of `grad_sqr`, of `grad_var` and of weights, for both averages: shape
            (2, 3, groups). The weights are at most 1, and 0 without an estimate.
        counts: numbers of estimates, shape (2, groups).
    """

    def __init__(self, sums: Tensor, counts: Tensor) -> None:
        self._sums = sums
        self._counts = counts
        self._on_host: list[GradientEstimate | None] | None = None

    @classmethod
    def empty(cls, groups: int, device: torch.device) -> "MovingAverages":
        """Return averages of no estimates, for `groups` parameter groups."""
        dtype = accumulation_dtype(device)
        return cls(
            torch.zeros(2, 3, groups, dtype=dtype, device=device),
            torch.zeros(2, groups, dtype=dtype, device=device),
        )

    @property
    def groups(self) -> int:
        """The number of parameter groups."""
        return self._counts.shape[-1]

    def to(self, device: torch.device) -> "MovingAverages":
        """Return the same averages on `device`."""
        if device == self._sums.device:
            return self
        dtype = accumulation_dtype(device)
        return MovingAverages(self._sums.to(device, dtype), self._counts.to(device, dtype))

    def with_groups(self, groups: int) -> "MovingAverages":
        """Return the same averages with empty ones for the additional groups, up to `groups`."""
        if groups <= self.groups:
            return self
        new = MovingAverages.empty(groups - self.groups, self._sums.device)
        return MovingAverages(
            torch.cat([self._sums, new._sums], -1), torch.cat([self._counts, new._counts], -1)
        )

    def without(self, groups: Sequence[int]) -> "MovingAverages":
        """Return the same averages without the averages of `groups`."""
        numbers = torch.arange(self.groups, device=self._sums.device)
        kept = ~torch.isin(numbers, torch.tensor(groups, device=self._sums.device))
        return MovingAverages(torch.where(kept, self._sums, 0.0), torch.where(kept, self._counts, 0.0))

    def updated(self, step: StepEstimate, smoothing: float, *, debias: bool = True) -> "MovingAverages":
        """Return the averages with the estimates of one more step.

        Args:
            step: the estimates of the step.
            smoothing: weight of the past, theta, at least 0 and below 1.
            debias: True divides by the weight so far. False is appendix B.3 of the paper: the plain mean
                of the first 1 / (1 - theta) estimates, a moving average after that.

        Raises:
            ValueError: `smoothing` is out of range.
        """
        require_smoothing(smoothing)
        sums, counts = self._sums, self._counts
        past, count = self._latest() if step.biased else (sums[UNBIASED], counts[UNBIASED])
        numbers = torch.stack([step.grad_sqr, step.grad_var, torch.ones_like(step.grad_sqr)])
        if debias:
            average = torch.lerp(past, numbers, 1.0 - smoothing)
        else:
            average = torch.lerp(past, numbers, (1.0 / (count + 1.0)).clamp(min=1.0 - smoothing))
        if step.biased:
            # With smoothing 0 the unbiased average would get the weight 0 and be lost, so it stays as it is.
            aged = smoothing * sums[UNBIASED] if smoothing > 0.0 else sums[UNBIASED]
            new, new_counts = torch.stack([aged, average]), torch.stack([counts[UNBIASED], count + 1.0])
        else:
            new = torch.stack([average, torch.zeros_like(average)])
            new_counts = torch.stack([count + 1.0, torch.zeros_like(count)])
        return MovingAverages(torch.where(step.valid, new, sums), torch.where(step.valid, new_counts, counts))

    def gains(self, scale: float) -> Tensor:
        """Return the gain of each group at `scale`, shape (groups,), without waiting for the device.

        As `GradientEstimate.gain`; 1 for a group without an estimate.
        """
        return _gain(*self._averages(), scale)

    def gain(self, scale: float, counted: Tensor) -> Tensor:
        """Return the gain of several groups together at `scale`, shape (), without waiting for the device.

        Args:
            scale: S.
            counted: whether each group counts, shape (groups,).
        """
        grad_sqr, grad_var = (torch.where(counted, average, 0.0) for average in self._averages())
        return _gain(grad_sqr.sum(), grad_var.sum(), scale)

    def on_host(self) -> Sequence[GradientEstimate | None]:
        """Return the average of each group as numbers; None for a group without an estimate.

        The first call waits for the device.
        """
        if self._on_host is None:
            self._on_host = self._interpret(self.packed().tolist())
        return self._on_host

    def packed(self) -> Tensor:
        """Return the numbers that `set_host_numbers` takes, to read them together with other tensors."""
        (sums, _), is_biased = self._latest(), self._sums[BIASED, WEIGHT] > 0.0
        return torch.cat([*sums, is_biased.to(sums.dtype)])

    def set_host_numbers(self, numbers: Sequence[float]) -> None:
        """Store the numbers of `packed` after they were read, so that `on_host` does not wait."""
        self._on_host = self._interpret(numbers)

    def _interpret(self, numbers: Sequence[float]) -> list[GradientEstimate | None]:
        rows = zip(*(numbers[row * self.groups : (row + 1) * self.groups] for row in range(4)), strict=True)
        return [
            GradientEstimate(grad_sqr / weight, grad_var / weight, is_biased > 0.0) if weight > 0.0 else None
            for grad_sqr, grad_var, weight, is_biased in rows
        ]

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
    def from_state_dict(cls, state: Sequence[Mapping[str, Any]], device: torch.device) -> "MovingAverages":
        """Return the averages that `state_dict` returned `state` for."""
        empty = {"grad_sqr": 0.0, "grad_var": 0.0, "weight": 0.0, "count": 0}
        averages = [[group[kind] or empty for group in state] for kind in ("unbiased", "biased")]
        dtype = accumulation_dtype(device)
        names = ("grad_sqr", "grad_var", "weight")
        sums = [[[average[name] for average in kind] for name in names] for kind in averages]
        counts = [[average["count"] for average in kind] for kind in averages]
        return cls(
            torch.tensor(sums, dtype=dtype, device=device), torch.tensor(counts, dtype=dtype, device=device)
        )

    def _latest(self) -> tuple[Tensor, Tensor]:
        """Sums and counts of the average that is read: the biased average if it exists, for each group."""
        has_biased = self._sums[BIASED, WEIGHT] > 0.0
        return (
            torch.where(has_biased, self._sums[BIASED], self._sums[UNBIASED]),
            torch.where(has_biased, self._counts[BIASED], self._counts[UNBIASED]),
        )

    def _averages(self) -> tuple[Tensor, Tensor]:
        """`grad_sqr` and `grad_var`; zero for a group without an estimate."""
        sums, _ = self._latest()
        has_estimate = sums[WEIGHT] > 0.0
        weight = torch.where(has_estimate, sums[WEIGHT], 1.0)
        return sums[GRAD_SQR] / weight, sums[GRAD_VAR] / weight


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
