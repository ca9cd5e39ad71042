"""The factor by which a GradScaler made gradients larger.

Statistics are taken at the end of backward, before gradients are unscaled or clipped. They are in units of
the loss scale then, and must be divided by its square. Where the scaler is known it is asked. Elsewhere
the scale is seen from what became of the gradients until `step()`: scalers start from a power of two and
double or halve, so a change of the norm by a power of two is theirs, and any other is clipping.
"""

import math
import warnings
from typing import Protocol

import torch
from torch import Tensor

TOLERANCE = 1e-6

IMPLAUSIBLE_CLIPPING = 1e-3
"""Smallest factor taken for clipping where no loss scale was ever seen."""


class GradScaler(Protocol):
    """What is asked of a `torch.amp.GradScaler`."""

    def is_enabled(self) -> bool: ...  # noqa: D102

    def get_scale(self) -> float: ...  # noqa: D102


class LossScale:
    """The loss scale in force.

    Attributes:
        scaler: the training loop's GradScaler, if it was told.
        seen: the last scale inferred from gradients, no dimension; 1 if none was.
    """

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self.scaler = scaler
        self.seen = torch.ones((), dtype=torch.float64)
        self._doubt: Tensor | None = None
        self._warned = False

    def ask(self) -> float | None:
        """Return the scaler's scale; None if there is no scaler to ask."""
        if self.scaler is None:
            return None
        return self.scaler.get_scale() if self.scaler.is_enabled() else 1.0

    def infer(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the loss scale, from the squared norm of gradients after backward and before the step.

        NaN if it cannot be told: the step's statistics are of no use then.

        Args:
            before, after: of no dimension, and at the same place.
        """
        seen = self.seen.to(before)
        usable = (before > 0.0) & (after > 0.0) & torch.isfinite(before + after)
        change = torch.where(usable, after / before, 1.0).sqrt()
        power = change.log2()
        nearest = power.round()
        by_a_power = (power - nearest).abs() < TOLERANCE
        self.seen = torch.where(usable & by_a_power, torch.exp2(-nearest), seen)
        unknown = usable & ~by_a_power & (seen == 1.0) & (change < IMPLAUSIBLE_CLIPPING)
        self._doubt = torch.where(unknown, change, 0.0)
        return torch.where(unknown, math.nan, self.seen)

    def warn(self) -> None:
        """Tell, once, of steps that were left out; this waits for the device."""
        if self._warned or self._doubt is None or (change := float(self._doubt)) == 0.0:
            return
        self._warned = True
        warnings.warn(
            f"gradients were multiplied by {change:.3g} between backward() and step(): by a GradScaler "
            "and by clipping, it seems. Such steps are left out of the estimates, because the loss scale "
            "cannot be told from the two: pass AdaScale(..., grad_scaler=scaler)",
            RuntimeWarning,
            stacklevel=5,
        )
