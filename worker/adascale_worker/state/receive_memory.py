"""Memory for the state that a new replica gets from the others, prepared before the others wait for it.

The weights are received into those of its model, and the rest into new memory. The kernel clears each page of
new memory when it is first written, which takes about as long as the transfer itself. A replica that waits to
join does it while the others train.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from adascale_worker.program.hyperparameters import HasGroups
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.state.tree import TensorLayout, layout_of

SMALL: Final = 1 << 20
"""Bytes of a tensor up to which it is sent together with others, and no memory is prepared for it."""
_MADV_POPULATE_WRITE: Final = 23
"""Of linux/mman.h, since Linux 5.14."""


class ReceiveMemory:
    """Memory on the host, by its size. Each part is used once."""

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        for size in sizes:
            if size > SMALL:
                memory = torch.empty(size, dtype=torch.uint8, device="cpu")
                _populate(memory)
                self._free[size].append(memory)

    @property
    def prepared_bytes(self) -> int:
        """Bytes that are prepared and not used."""
        return sum(memory.numel() for each in self._free.values() for memory in each)

    def tensor(self, layout: TensorLayout) -> Tensor:
        """Return an uninitialized tensor on the host, in prepared memory if there is some of its size."""
        free = self._free.get(layout.bytes)
        if not free:
            return torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
        return free.pop().view(layout.dtype).view(layout.shape)

    def clear(self) -> None:
        """Release the memory that is not used."""
        self._free.clear()


class InitialWeights:
    """A copy of a model's large tensors, or of its shards of them, so that a state can be received into them.

    A new replica makes it while the others train. They would wait longer if it received the weights elsewhere
    and then copied them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        saved = model.state_dict()
        # One object for each tensor, also if it has several names.
        shards = {tensor: local_shard(tensor) for tensor in tensors.values()}
        self._tensors = {
            name: shards[tensor]
            for name, tensor in tensors.items()
            if shards[tensor].nbytes > SMALL
            and shards[tensor].is_contiguous()
            and _is_same(shards[tensor], saved.get(name))
        }
        self._copies = {shard: shard.clone() for shard in set(self._tensors.values())}
        self._is_received = False

    @property
    def names(self) -> set[str]:
        """The names of the tensors in the model's state."""
        return set(self._tensors)

    def places(self, numbers: Mapping[str, int], expected: Sequence[TensorLayout]) -> dict[int, Tensor]:
        """Return the tensors of the model to receive a state into, by their numbers in that state.

        From now on, their contents are undefined until a state is loaded, or they are put back.
        """
        found: dict[int, set[Tensor | None]] = defaultdict(set)
        for name, number in numbers.items():
            # The members that have the state may use one tensor by several names.
            found[number].add(self._tensors.get(name))
        places: dict[int, Tensor] = {}
        for number, (tensor, *others) in found.items():
            if tensor is not None and not others and expected[number] == layout_of(tensor):
                places[number] = tensor
        self._is_received = True
        return places

    def put_back(self) -> None:
        """Give the model its initial weights again, after a state that has not arrived completely."""
        if self._is_received:
            with torch.no_grad():
                for tensor, copy in self._copies.items():
                    tensor.copy_(copy)
            self._is_received = False


def _is_same(tensor: Tensor, saved: object) -> bool:
    if not isinstance(saved, Tensor):
        return False
    shard = local_shard(saved)
    return (
        type(shard) is Tensor
        and shard.data_ptr() == tensor.data_ptr()
        and (shard.dtype, shard.shape, shard.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    )


def expected_sizes(
    model: torch.nn.Module, optimizer: HasGroups, received_in_place: Collection[str] = ()
) -> list[int]:
    """Return the bytes of the tensors that a model and its optimizer have after some steps, on this process.

    The states of the optimizer do not exist before its first step. Those that SGD, Adam and AdamW make are
    known. A wrong expectation costs time and memory until the replica has joined, and nothing else.
    """
    sizes = [
        local_shard(tensor).nbytes
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and name not in received_in_place
    ]
    for group in optimizer.param_groups:
        copies = _states_per_parameter(group)
        for parameter in group["params"]:
            if parameter.requires_grad:
                sizes += [local_shard(parameter).nbytes] * copies
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
