"""Puts the buffers of a model back when a step is discarded: BatchNorm's statistics, for example."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adascale_worker.torch_private.tensors import version_of


class ModelBuffers:
    """Copies the buffers of a model that have changed since the last copy; keeps the replaced copies.

    Whether a buffer has changed is known by its version. The kernels of BatchNorm change `running_mean` and
    `running_var` without counting a version, so buffers with such names are always copied.
    """

    state = None
    """No part of the state of training is kept beside the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._places: list[tuple[torch.nn.Module, str, Tensor]] = []
        """Module, name, buffer: a forward pass may assign another tensor to the name."""
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
        self._places = list(self._buffers())
        for _, name, buffer in self._places:
            version = _version(name, buffer)
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
                if version < 0 or version_of(buffer) != version:
                    buffer.copy_(copied)
        for module, name, buffer in self._places:
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)
        self._copies.clear()
        self._places.clear()

    def _buffers(self) -> Iterator[tuple[torch.nn.Module, str, Tensor]]:
        """Yield the module, the name and the tensor of each buffer."""
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                yield module, name, buffer


def _version(name: str, buffer: Tensor) -> int:
    """Return the version of a buffer; -1 if a change may not be counted."""
    return -1 if name.startswith("running_") else version_of(buffer)
