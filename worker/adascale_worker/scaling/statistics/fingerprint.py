"""Detection of gradients that were changed between backward and step."""

from collections.abc import Iterable

from torch import Tensor

from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.torch_private.tensors import l2_norms

PROBES = 4


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
