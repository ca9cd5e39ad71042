"""Copies the state of training from one member to others, over the process group.

The source sends the structure of its state, then its tensors in chunks, from where they are. A receiver
allocates the tensors and loads them when all have arrived, so a transfer that fails leaves its previous state
intact. Another member that takes part in the broadcast and needs no state has one chunk of memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from adascale_worker.process_group import ReplicaGroup
from adascale_worker.receive_memory import SMALL, ReceiveMemory
from adascale_worker.state_tree import flatten, layouts, unflatten

CHUNK: Final = 64 << 20
"""Bytes of one broadcast. Smaller tensors are sent together."""


def send(group: ReplicaGroup, state: Any, *, device: torch.device) -> None:
    """Send a state from this rank to those that call `receive`. A collective call.

    Args:
        group: the replicas.
        state: consists of types that `flatten` supports.
        device: of the receivers' large tensors.

    Raises:
        PeersLostError: a member was lost.
    """
    spec, tensors = flatten(state)
    document = torch.frombuffer(bytearray(spec), dtype=torch.uint8)
    group.broadcast_integers([len(spec)], source=group.rank)
    group.broadcast_tensor(document, group.rank)
    _Broadcast(group, group.rank).run([_bytes_of(_placed(tensor, device)) for tensor in tensors], packs=True)


def receive(group: ReplicaGroup, source: int, *, device: torch.device, memory: ReceiveMemory) -> Any:
    """Return the state of rank `source`. A collective call.

    Args:
        group: the replicas.
        source: rank of the sender.
        device: of the large tensors.
        memory: for tensors on the host.

    Raises:
        PeersLostError: a member was lost.
    """
    spec = _receive_spec(group, source)
    tensors = [
        memory.tensor(layout)
        if device.type == "cpu" or layout.bytes <= SMALL
        else torch.empty(layout.shape, dtype=layout.dtype, device=device)
        for layout in layouts(spec)
    ]
    _Broadcast(group, source).run([_bytes_of(tensor) for tensor in tensors], packs=False)
    return unflatten(spec, tensors)


def forward(group: ReplicaGroup, source: int, *, device: torch.device) -> None:
    """Take part in a transfer between other members. A collective call.

    Raises:
        PeersLostError: a member was lost.
    """
    spec = _receive_spec(group, source)
    scratch = torch.empty(0, dtype=torch.uint8, device=device)
    pending = 0
    for size in [layout.bytes for layout in layouts(spec)]:
        if size > SMALL:
            scratch = _discard(group, source, size, scratch)
            continue
        pending += size
        if pending >= CHUNK:
            _discard(group, source, pending, torch.empty(0, dtype=torch.uint8))
            pending = 0
    _discard(group, source, pending, torch.empty(0, dtype=torch.uint8))


def _receive_spec(group: ReplicaGroup, source: int) -> bytes:
    (length,) = group.broadcast_integers([0], source=source)
    document = torch.empty(length, dtype=torch.uint8)
    group.broadcast_tensor(document, source)
    return document.numpy().tobytes()


def _discard(group: ReplicaGroup, source: int, size: int, scratch: Tensor) -> Tensor:
    if scratch.numel() < min(size, CHUNK):
        scratch = torch.empty(min(size, CHUNK), dtype=torch.uint8, device=scratch.device)
    for start in range(0, size, CHUNK):
        group.broadcast_tensor(scratch[: min(CHUNK, size - start)], source)
    return scratch


class _Broadcast:
    """Broadcasts tensors of bytes: large ones in chunks, small ones together."""

    def __init__(self, group: ReplicaGroup, source: int) -> None:
        self._group = group
        self._source = source

    def run(self, tensors: Sequence[Tensor], *, packs: bool) -> None:
        small: list[Tensor] = []
        pending = 0
        for tensor in tensors:
            if tensor.numel() > SMALL:
                self._in_chunks(tensor)
                continue
            small.append(tensor)
            pending += tensor.numel()
            if pending >= CHUNK:
                self._together(small, packs=packs)
                small, pending = [], 0
        self._together(small, packs=packs)

    def _in_chunks(self, tensor: Tensor) -> None:
        for start in range(0, tensor.numel(), CHUNK):
            self._group.broadcast_tensor(tensor[start : start + CHUNK], self._source)

    def _together(self, tensors: list[Tensor], *, packs: bool) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        if not sum(sizes):
            return
        buffer = torch.cat(tensors) if packs else torch.empty(sum(sizes), dtype=torch.uint8)
        self._in_chunks(buffer)
        if not packs:
            for tensor, part in zip(tensors, buffer.split(sizes), strict=True):
                tensor.copy_(part)


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    size = tensor.numel() * tensor.element_size()
    return tensor.to(device) if size > SMALL else tensor.cpu()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as bytes, in the same memory."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
