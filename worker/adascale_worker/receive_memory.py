"""Memory for the state that a new replica gets from the others, prepared before the others wait for it.

The kernel clears each page of new memory when it is first written, which takes about as long as the transfer
itself. A replica that waits to join does it while the others train.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from adascale_worker.hyperparameters import HasGroups
from adascale_worker.state_tree import TensorLayout

SMALL: Final = 1 << 20
"""Bytes of a tensor up to which it is sent together with others, and no memory is prepared for it."""
_MADV_POPULATE_WRITE: Final = 23
"""Of linux/mman.h, since Linux 5.14."""


class ReceiveMemory:
    """Memory on the host, by its size. Each part is used once.

    Args:
        sizes: bytes of the tensors that are expected.
    """

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        for size in sizes:
            if size > SMALL:
                memory = torch.empty(size, dtype=torch.uint8)
                _populate(memory)
                self._free[size].append(memory)

    @property
    def prepared_bytes(self) -> int:
        """Bytes that are prepared and not used."""
        return sum(memory.numel() for each in self._free.values() for memory in each)

    def tensor(self, layout: TensorLayout) -> Tensor:
        """Return an uninitialized tensor on the host, in prepared memory if there is some of its size.

        Args:
            layout: type and shape of the tensor.
        """
        free = self._free.get(layout.bytes)
        if not free:
            return torch.empty(layout.shape, dtype=layout.dtype)
        return free.pop().view(layout.dtype).view(layout.shape)

    def clear(self) -> None:
        """Release what is not used."""
        self._free.clear()


def expected_sizes(model: torch.nn.Module, optimizer: HasGroups) -> list[int]:
    """Return the bytes of the tensors that a model and its optimizer have after some steps.

    The states of the optimizer do not exist before its first step. Those that SGD, Adam and AdamW make are
    known. A wrong expectation costs time and memory until the replica has joined, and nothing else.
    """
    sizes = [tensor.nbytes for tensor in model.state_dict().values() if isinstance(tensor, Tensor)]
    for group in optimizer.param_groups:
        copies = _states_per_parameter(group)
        for parameter in group["params"]:
            if parameter.requires_grad:
                sizes += [parameter.nbytes] * copies
    return sizes


def _states_per_parameter(group: dict[str, object]) -> int:
    """Return how many tensors of the size of a parameter an optimizer keeps for each of a group."""
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    return 1 if group.get("momentum") else 0


def _populate(memory: Tensor) -> None:
    """Let the kernel map all pages of `memory`, or write them if it cannot."""
    page = mmap.PAGESIZE
    start = memory.data_ptr() // page * page
    length = memory.data_ptr() + memory.numel() - start
    madvise = ctypes.CDLL(None).madvise
    if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
        memory.zero_()
