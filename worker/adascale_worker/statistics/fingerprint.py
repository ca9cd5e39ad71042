"""Whether gradients are still what they were."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adascale_worker.statistics.norms import Gradients

PROBES = 4


class Fingerprint:
    """Recognises gradients that were replaced, written to, or multiplied.

    A write raises the version of a tensor, but a GradScaler's does not. So the norms of the smallest
    gradients are compared too: whoever scales gradients scales all of them.

    Args:
        gradients: by parameter group, on the CPU.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._versions = _versions(gradients)
        self._probes = sorted((g for group in gradients for g in group), key=Tensor.numel)[:PROBES]
        self._norms = _norms(self._probes)

    def matches(self, gradients: Gradients) -> bool:
        """Whether these are the same as then. If the probes are all zero that cannot be told: False."""
        return (
            any(norm > 0.0 for norm in self._norms)
            and _versions(gradients) == self._versions
            and _norms(self._probes) == self._norms
        )


def _versions(gradients: Gradients) -> list[tuple[int, int]]:
    return [(gradient.data_ptr(), gradient._version) for group in gradients for gradient in group]


def _norms(gradients: Sequence[Tensor]) -> list[float]:
    return [float(norm) for norm in torch._foreach_norm(list(gradients), 2)] if gradients else []
