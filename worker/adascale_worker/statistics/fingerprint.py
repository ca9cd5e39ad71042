"""Whether gradients are still what they were."""

from collections.abc import Iterable

import torch
from torch import Tensor

from adascale_worker.statistics.norms import local

PROBES = 4


class Fingerprint:
    """Recognises gradients that were multiplied by something since.

    It looks at the smallest gradients only: a GradScaler, or clipping by the norm, multiplies all of them.

    Args:
        parameters: on the CPU.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = sorted(parameters, key=Tensor.numel)[:PROBES]
        self._norms: list[float] = []

    def take(self) -> None:
        """Remember the gradients as they are."""
        self._norms = self._now()

    def matches(self) -> bool:
        """Whether gradients are as they were. If the probes are all zero that cannot be told: False."""
        return any(norm > 0.0 for norm in self._norms) and self._norms == self._now()

    def _now(self) -> list[float]:
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
        return [float(norm) for norm in torch._foreach_norm(gradients, 2)] if gradients else []
