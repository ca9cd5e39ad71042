"""The losses of micro-batches, for the logs of the framework."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossSums:
    """The mean loss of the steps since the last log and since the beginning.

    The loss of a step is the mean over its micro-batches on all replicas, weighted as the gradient is. This
    replica adds up its part of it on its device. The parts of all replicas are added when the framework logs,
    evaluates or saves.
    """

    def __init__(self) -> None:
        self._micro_batches: Tensor | float = 0.0
        """Of the present step: the sum of the losses times their weights."""
        self._weight = 0.0
        """Of these micro-batches."""
        self._steps: Tensor | float = 0.0
        """The sum of the losses of the steps that are not exchanged yet, the part of this replica."""
        self._parts = 0.0
        """The sum of the parts of these steps that this replica has made."""
        self._interval = _Sums()
        self._total = _Sums()

    def begin_step(self) -> None:
        """Forget the micro-batches of a step that was not completed."""
        self._micro_batches, self._weight = 0.0, 0.0

    def add(self, loss: Tensor, weight: float) -> None:
        """Add the mean loss of a micro-batch of this replica. Does not wait for the device."""
        if weight:
            self._micro_batches = loss.detach().double().mean() * weight + self._micro_batches
            self._weight += weight

    def finish_step(self, weight: float, *, only_finite: bool) -> None:
        """Add the loss of a step that was made. Does not wait for the device."""
        if weight:
            loss = torch.as_tensor(self._micro_batches) / weight
            if only_finite:
                loss = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))
            self._steps = loss + self._steps
            self._parts += self._weight / weight
        self.begin_step()

    def take(self) -> dict[str, float]:
        """Return what this replica has added since the last call. Waits for the device."""
        taken = {"loss": float(self._steps), "steps": self._parts}
        self._steps, self._parts = 0.0, 0.0
        return taken

    def add_sums(self, loss: float, steps: float) -> None:
        """Add the sums over the replicas of what each has taken."""
        for sums in (self._interval, self._total):
            sums.loss += loss
            sums.steps += steps

    def take_interval(self) -> float:
        """Return the mean loss of the steps since the last call."""
        mean, self._interval = self._interval.mean, _Sums()
        return mean

    @property
    def total_mean(self) -> float:
        """The mean loss of all steps."""
        return self._total.mean

    def state_dict(self) -> dict[str, Any]:
        """Return what all replicas have taken."""
        return {"interval": vars(self._interval).copy(), "total": vars(self._total).copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what all replicas have taken."""
        self._interval, self._total = _Sums(**state["interval"]), _Sums(**state["total"])


class _Sums:
    """The sum of losses of steps."""

    def __init__(self, loss: float = 0.0, steps: float = 0.0) -> None:
        self.loss = loss
        self.steps = steps

    @property
    def mean(self) -> float:
        return self.loss / self.steps if self.steps else 0.0
