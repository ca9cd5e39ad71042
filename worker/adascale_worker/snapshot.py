"""A copy of a state in memory, in the form in which it is written to storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adascale_worker import state_tree
from adascale_worker.state_file import StateFileLayout, data_bytes, lay_out, offsets_of
from adascale_worker.state_tree import TensorLayout
from adascale_worker.storage.interface import Part


class Snapshot:
    """A copy of a state, in memory that is allocated once and used again.

    It takes as much memory as the tensors of the state. For tensors on a GPU the memory is pinned, so that
    they are copied at the full speed of the bus.
    """

    def __init__(self) -> None:
        self._spec = b""
        self._layouts: Sequence[TensorLayout] = ()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []
        self.weights: list[Tensor] = []
        """The copies of the weights."""

    def copy(self, state: Any, weights: Sequence[Tensor] = ()) -> None:
        """Copy a state, in place of the last one.

        Args:
            state: consists of `state_tree.ALLOWED` types.
            weights: tensors of the state, whose copies `weights` returns.

        Raises:
            UnsupportedStateError: an object in the state has another type.
        """
        self._spec, tensors = state_tree.flatten(state)
        self._prepare(tensors)
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor, non_blocking=True)
        addresses = {weight.data_ptr() for weight in weights}
        self.weights = [
            view
            for view, tensor in zip(self._views, tensors, strict=True)
            if tensor.data_ptr() in addresses and tensor.is_floating_point()
        ]
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)

    @property
    def layout(self) -> StateFileLayout:
        """Where the parts of the copied state are in its file."""
        return lay_out(self._spec)

    def parts(self, chunk_bytes: int) -> Iterator[Part]:
        """Return the tensors of the copied state, as they follow the file's header, in parts.

        Args:
            chunk_bytes: length of each part, except the last, which may be shorter.
        """
        content = self._memory.numpy().data
        length = data_bytes(self._layouts)
        for start in range(0, length, chunk_bytes):
            yield content[start : min(start + chunk_bytes, length)]

    def _prepare(self, tensors: Sequence[Tensor]) -> None:
        """Divide the memory into a view for each tensor."""
        layouts = [TensorLayout(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        pinned = any(tensor.is_cuda for tensor in tensors)
        length = data_bytes(layouts)
        is_large_enough = length <= self._memory.numel() and pinned == self._memory.is_pinned()
        if layouts == self._layouts and is_large_enough:
            return
        if not is_large_enough:
            # The old memory is released before more is allocated.
            self._layouts, self._views, self._memory = (), [], torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
        self._layouts = layouts
        self._views = [
            self._memory[offset : offset + layout.bytes].view(layout.dtype).view(layout.shape)
            for layout, offset in zip(layouts, offsets_of(layouts), strict=True)
        ]
