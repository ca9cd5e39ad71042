"""Changes of all gradients between backward and step: the loss scale of a GradScaler, and clipping.

Statistics are read at the end of backward, before gradients are unscaled or clipped. Then they are in units
of the loss scale, and must be divided by its square. If the scaler is given, its scale is read. Otherwise the
loss scale is inferred from the change of the gradients until `step()`: scalers start from a power of two and
double or halve, so a change of the norm by a power of two is unscaling, and any other change is clipping.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler

from adascale_worker.process.user_code import warn_user
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.torch_private.autograd import l2_norms

TOLERANCE = 1e-6

IMPLAUSIBLE_CLIPPING = 1e-3
"""If no loss scale was inferred before, a change below this factor is not taken for clipping alone."""


class LossScale:
    """The current loss scale."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        self.inferred = torch.ones((), dtype=torch.float64)
        self._unexplained_change: Tensor | None = None
        self._warned = False

    def from_scaler(self) -> float | None:
        """Return the scale of the scaler; None without a scaler."""
        if self._scaler is None:
            return None
        return self._scaler.get_scale() if self._scaler.is_enabled() else 1.0

    def infer(self, after_backward: Tensor, before_step: Tensor) -> Tensor:
        """Return the loss scale, inferred from the squared norm of the gradients at two times.

        NaN if it cannot be determined; the statistics of the step are of no use then.
        """
        inferred = self.inferred.to(after_backward)
        usable = (after_backward > 0.0) & (before_step > 0.0) & torch.isfinite(after_backward + before_step)
        change = torch.where(usable, before_step / after_backward, 1.0).sqrt()
        power = change.log2()
        nearest = power.round()
        is_power_of_two = (power - nearest).abs() < TOLERANCE
        self.inferred = torch.where(usable & is_power_of_two, torch.exp2(-nearest), inferred)
        unknown = usable & ~is_power_of_two & (inferred == 1.0) & (change < IMPLAUSIBLE_CLIPPING)
        self._unexplained_change = torch.where(unknown, change, 0.0)
        return torch.where(unknown, math.nan, self.inferred)

    def warn_if_unknown(self) -> None:
        """Warn once if a step was left out because its loss scale is unknown.

        The first call after a measured step waits for the device.
        """
        if self._warned or self._unexplained_change is None:
            return
        change = float(self._unexplained_change)
        self._unexplained_change = None
        if change == 0.0:
            return
        self._warned = True
        warn_user(
            f"gradients were multiplied by {change:.3g} between backward() and step(), probably by a "
            "GradScaler and by clipping. The loss scale cannot be determined from the two together, so such "
            "steps are left out of the estimates: pass AdaScale(..., grad_scaler=scaler), or, without a "
            "scaler, grad_scaler=torch.amp.GradScaler(enabled=False)"
        )


PROBES = 4
"""Gradients whose norms are compared."""


class GradientFingerprint:
    """The norms of a few gradients, to detect that all gradients were multiplied by a number.

    Only the smallest gradients are read: a GradScaler, or clipping by the norm, multiplies all of them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = sorted(parameters, key=Tensor.numel)[:PROBES]
        self._recorded: list[float] = []

    def record(self) -> None:
        """Record the gradients as they are now."""
        self._recorded = self._norms()

    def is_unchanged(self) -> bool:
        """Whether the gradients are as recorded. False if all recorded norms are zero."""
        return any(norm > 0.0 for norm in self._recorded) and self._recorded == self._norms()

    def _norms(self) -> list[float]:
        gradients = [local_shard(p.grad) for p in self._parameters if p.grad is not None]
        return [float(norm) for norm in l2_norms(gradients)]
