"""The factor by which a GradScaler made gradients larger.

Statistics are taken at the end of backward, before gradients are unscaled or clipped. They are in units of
the loss scale then, and must be divided by its square. Where the scaler is known it is asked. Elsewhere
the scale is seen from what became of the gradients until `step()`: scalers start from a power of two and
double or halve, so a change of the norm by a power of two is theirs, and any other is clipping.
"""

import math
import warnings
from typing import Protocol

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
        seen: the last scale inferred from gradients; 1 if none was.
    """

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self.scaler = scaler
        self.seen = 1.0
        self._warned = False

    def ask(self) -> float | None:
        """Return the scaler's scale; None if there is no scaler to ask."""
        if self.scaler is None:
            return None
        return self.scaler.get_scale() if self.scaler.is_enabled() else 1.0

    def infer(self, before: float, after: float) -> float | None:
        """Return the loss scale, from the squared norm of gradients after backward and before the step.

        None if it cannot be told: the step's statistics are of no use then.
        """
        if not (before > 0.0 and after > 0.0 and math.isfinite(before) and math.isfinite(after)):
            return self.seen
        change = math.sqrt(after / before)
        power = math.log2(change)
        if abs(power - round(power)) < TOLERANCE:
            self.seen = 2.0 ** -round(power)
            return self.seen
        if self.seen == 1.0 and change < IMPLAUSIBLE_CLIPPING:
            self._warn(change)
            return None
        return self.seen

    def _warn(self, change: float) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"gradients were multiplied by {change:.3g} between backward() and step(): by a GradScaler "
                "and by clipping, it seems. Such steps are left out of the estimates, because the loss scale "
                "cannot be told from the two: pass AdaScale(..., grad_scaler=scaler)",
                RuntimeWarning,
                stacklevel=5,
            )
