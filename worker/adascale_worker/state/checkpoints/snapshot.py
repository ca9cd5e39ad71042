"""A copy of a state in memory, in the form in which it is written to storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adascale_storage import Part
from adascale_worker.state import tree
from adascale_worker.state.file import StateFileLayout, data_bytes, lay_out, offsets_of
from adascale_worker.state.tree import TensorLayout


class Snapshot:
    """A copy of a state, in memory that is allocated once and used again.

    It takes as much memory as the tensors of the state. For tensors on a GPU the memory is pinned, so that
    they are copied at the full speed of the bus; torch rounds its size up to a power of two.

    From a GPU, `copy` launches the copies, and neither it nor training waits for them: what reads the copy
    does. Tensors that only the optimizer's step changes are copied in a stream of their own, beside the next
    forward and backward passes, and `before_step` lets the step wait for that, on the GPU. The program may
    change all other tensors at any time, so they are copied in its own stream.
    """

    def __init__(self) -> None:
        self._spec = b""
        self._layouts: Sequence[TensorLayout] = ()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copied: dict[torch.device, torch.cuda.Event] = {}
        """What happens when all tensors of a GPU are copied."""
        self._sources: Sequence[Tensor] = ()
        """What is copied: its memory must not be used for anything else meanwhile."""
        self._step_must_wait = False

    def copy(
        self, state: Any, weights: Sequence[Tensor] = (), changed_by_step: Iterable[Tensor] = ()
    ) -> None:
        """Copy a state, in place of the last one."""
        self.wait()
        self._spec, tensors = tree.flatten(state)
        self._prepare(tensors)
        self._sources = tensors
        later = {tensor.data_ptr() for tensor in changed_by_step if tensor.is_cuda and tensor.numel()}
        beside: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for view, tensor in zip(self._views, tensors, strict=True):
            if tensor.is_cuda:
                beside.setdefault(tensor.device, [])
            if tensor.data_ptr() in later:
                beside[tensor.device].append((view, tensor))
            else:
                view.copy_(tensor, non_blocking=True)
        for device, pairs in beside.items():
            self._copied[device] = self._copy_beside(device, pairs)
        self._step_must_wait = bool(later)
        addresses = {weight.data_ptr() for weight in weights}
        self._weights = [
            view
            for view, tensor in zip(self._views, tensors, strict=True)
            if tensor.data_ptr() in addresses and tensor.is_floating_point()
        ]

    def before_step(self) -> None:
        """Let what the program launches from now on wait for the copies, on the GPU. The program does not."""
        if self._step_must_wait:
            self._step_must_wait = False
            for device, copied in self._copied.items():
                torch.cuda.current_stream(device).wait_event(copied)

    def wait(self) -> None:
        """Wait until the state is copied. May be called in any thread."""
        for copied in self._copied.values():
            copied.synchronize()
        self._sources = ()

    @property
    def weights(self) -> Sequence[Tensor]:
        """The copies of the weights. Waits until the state is copied."""
        self.wait()
        return self._weights

    @property
    def layout(self) -> StateFileLayout:
        """Where the parts of the copied state are in its file."""
        return lay_out(self._spec)

    def parts(self, chunk_bytes: int) -> Iterator[Part]:
        """Return the tensors of the copied state, as they follow the file's header, in parts.

        Waits until the state is copied.
        """
        self.wait()
        content = self._memory.numpy().data
        length = data_bytes(self._layouts)
        for start in range(0, length, chunk_bytes):
            yield content[start : min(start + chunk_bytes, length)]

    def _copy_beside(self, device: torch.device, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Copy tensors in a stream of their own, and return what happens when all copies are made."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for view, tensor in pairs:
                view.copy_(tensor, non_blocking=True)
        # The thread that waits for it sleeps.
        copied = torch.cuda.Event(blocking=True)
        copied.record(stream)
        return copied

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
            self._layouts, self._views, self._memory = (), [], torch.empty(0, dtype=torch.uint8, device="cpu")
            self._memory = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._layouts = layouts
        self._views = [
            self._memory[offset : offset + layout.bytes].view(layout.dtype).view(layout.shape)
            for layout, offset in zip(layouts, offsets_of(layouts), strict=True)
        ]
