"""Changes of all gradients between backward and step: the loss scale of a GradScaler, and clipping.

Statistics are read at the end of backward, before gradients are unscaled or clipped. Then they are in units
of the loss scale, and must be divided by its square. If the scaler is given, its scale is read. Otherwise the
loss scale is inferred from the change of the gradients until `step()`: scalers start from a power of two and
double or halve, so a change of the norm by a power of two is unscaling, and any other change is clipping.
"""

import math

import torch
from torch import Tensor
from torch.amp import GradScaler

from adascale_worker.process.user_code import warn_user
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.scaling.statistics.parameters import HOST, OptimizerParameters
from adascale_worker.torch_private.autograd import l2_norms

TOLERANCE = 1e-6

IMPLAUSIBLE_CLIPPING = 1e-3
"""If no loss scale was inferred before, a change below this factor is not taken for clipping alone."""


PROBES = 4
"""Gradients whose norms are compared."""


class LossScale:
    """The current loss scale, and whether the gradients have changed since backward.

    The norms of a few gradients show a change, since a GradScaler, or clipping by the norm, multiplies all of
    them by a number. The smallest ones are read.
    """

    def __init__(self, scaler: GradScaler | None, parameters: OptimizerParameters) -> None:
        self._scaler = scaler
        self._parameters = parameters
        self._probed: list[Tensor] = []
        self._norms: list[float] = []
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

    def record_gradients(self) -> None:
        """Record the gradients as they are now, unless comparing them would wait for the device."""
        parameters = self._parameters
        if parameters.lr_is_on_device or parameters.device != HOST:
            # To read all gradients before the step costs only a few kernels.
            self.forget_gradients()
            return
        if not self._probed:
            trained = (p for group in parameters.groups() for p in group if p.requires_grad)
            self._probed = sorted(trained, key=Tensor.numel)[:PROBES]
        self._norms = self._read()

    def forget_gradients(self) -> None:
        """Read other gradients from now on, because other parameters are trained."""
        self._probed, self._norms = [], []

    def gradients_are_unchanged(self) -> bool:
        """Whether gradients are certainly as recorded: not unscaled, clipped or averaged since."""
        return any(norm > 0.0 for norm in self._norms) and self._norms == self._read()

    def _read(self) -> list[float]:
        gradients = [local_shard(p.grad) for p in self._probed if p.grad is not None]
        return [float(norm) for norm in l2_norms(gradients)]
