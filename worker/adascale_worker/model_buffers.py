"""Puts the buffers of a model back when a step is discarded: BatchNorm's statistics, for example."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class ModelBuffers:
    """Copies the buffers of a model that have changed since the last copy.

    Whether a buffer has changed is known by its version. The kernels of BatchNorm change `running_mean` and
    `running_var` without counting a version, so buffers with such names are always copied.

    Args:
        model: the program's model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._is_recorded = False

    def begin_step(self) -> None:
        """Let the next call of `record` copy the buffers."""
        self._is_recorded = False

    def record(self) -> None:
        """Copy the buffers, at the first forward pass of a step."""
        if self._is_recorded:
            return
        self._is_recorded = True
        copies = {}
        for buffer, version in self._buffers():
            known = self._copies.get(id(buffer))
            if known is None or known[0] is not buffer:
                known = (buffer, buffer.detach().clone(), version)
            elif known[2] != version or version < 0:
                known = (buffer, known[1].copy_(buffer), version)
            copies[id(buffer)] = known
        self._copies = copies

    def restore(self) -> None:
        """Put the buffers back that have changed since the first forward pass of this step."""
        if not self._is_recorded:
            return
        self._is_recorded = False
        with torch.no_grad():
            for buffer, copied, version in self._copies.values():
                if version < 0 or buffer._version != version:
                    buffer.copy_(copied)
        self._copies.clear()

    def _buffers(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each buffer and its version; -1 if a change may not be counted."""
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                yield buffer, -1 if name.startswith("running_") else buffer._version
