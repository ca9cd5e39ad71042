"""Puts the buffers of a model back when a step is discarded: BatchNorm's statistics, for example."""

from __future__ import annotations

import torch
from torch import Tensor


class ModelBuffers:
    """Copies the buffers of a model that have changed since the last copy.

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
        for buffer in self._model.buffers():
            known = self._copies.get(id(buffer))
            if known is None or known[0] is not buffer:
                known = (buffer, buffer.detach().clone(), buffer._version)
            elif known[2] != buffer._version:
                known = (buffer, known[1].copy_(buffer), buffer._version)
            copies[id(buffer)] = known
        self._copies = copies

    def restore(self) -> None:
        """Put the buffers back that have changed since the first forward pass of this step."""
        if not self._is_recorded:
            return
        self._is_recorded = False
        with torch.no_grad():
            for buffer, copied, number in self._copies.values():
                if buffer._version != number:
                    buffer.copy_(copied)
        self._copies.clear()
