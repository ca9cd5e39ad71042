"""Copies the state of training from members that have it to members that do not.

The members that get the state are shared out among those that have it, which send at the same time. Those
that get it from the same member form a chain: each passes every chunk on while it receives the next. So each
member sends the state at most once, and the time of a transfer hardly grows with the number of members.

The sender sends the structure of its state, then its tensors in chunks, from where they are. A receiver
allocates the tensors and loads them when all have arrived, so a transfer that fails leaves its previous state
intact. One without a state receives large weights into those of its model, of which it keeps a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Work

from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.state.receive_memory import SMALL, ReceiveMemory
from adascale_worker.state.tree import flatten, layouts, unflatten

CHUNK: Final = 32 << 20
"""Bytes of one message. Smaller tensors are sent together."""
AHEAD: Final = 2
"""Messages that a member receives at the same time, and those that it sends. With one, the sender would wait
for each next permission of the receiver to send."""


@dataclass(frozen=True)
class Route:
    """How the state passes through one member."""

    source: int | None  # rank of the member that it comes from; None if this member has it
    target: int | None  # rank of the member that it is passed on to; None at the end of a chain


def routes(sources: Sequence[int], receivers: Iterable[int], nodes: Sequence[str]) -> dict[int, Route]:
    """Return the route of each member that takes part in a transfer, by rank.

    Chains differ in length by one member at most. A member is put into a chain of its own node where that
    chain is not longer than another.
    """
    chains: dict[int, list[int]] = {source: [source] for source in sources}
    for receiver in receivers:
        chain = min(chains.values(), key=lambda each: (len(each), nodes[each[-1]] != nodes[receiver]))
        chain.append(receiver)
    return {
        rank: Route(
            chain[index - 1] if index else None,
            chain[index + 1] if index + 1 < len(chain) else None,
        )
        for chain in chains.values()
        if len(chain) > 1
        for index, rank in enumerate(chain)
    }


def send(group: ReplicaGroup, target: int, state: Any, *, device: torch.device) -> None:
    """Send a state to a rank that calls `receive`."""
    spec, tensors = flatten(state)
    link = _Link(group, None, target)
    document = torch.frombuffer(bytearray(spec), dtype=torch.uint8).to(device)
    link.exchange(torch.tensor([len(spec)], device=device))
    link.exchange(document)
    for part in _parts([tensor.nbytes for tensor in tensors]):
        parts = [_bytes_of(tensor.to(device)) for tensor in tensors[part]]
        link.exchange(parts[0] if len(parts) == 1 else torch.cat(parts))
    link.finish()


def receive(
    group: ReplicaGroup,
    route: Route,
    *,
    device: torch.device,
    memory: ReceiveMemory,
    places: Callable[[bytes], Mapping[int, Tensor]] = lambda _: {},
) -> Any:
    """Return the state that comes from another member, and pass it on."""
    link = _Link(group, route.source, route.target)
    length = torch.zeros(1, dtype=torch.int64, device=device)
    link.exchange(length)
    link.wait_until_received()
    document = torch.empty(int(length), dtype=torch.uint8, device=device)
    link.exchange(document)
    link.wait_until_received()
    spec = document.cpu().numpy().tobytes()
    expected, placed = layouts(spec), places(spec)
    tensors: list[Tensor] = []
    for part in _parts([layout.bytes for layout in expected]):
        together = expected[part]
        if together[0].bytes > SMALL:
            (layout,) = together
            tensor = placed.get(part.start)
            if tensor is None:
                tensor = (
                    memory.tensor(layout)
                    if device.type == "cpu"
                    else torch.empty(layout.shape, dtype=layout.dtype, device=device)
                )
            link.exchange(_bytes_of(tensor))
            tensors.append(tensor)
            continue
        sizes = [layout.bytes for layout in together]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        link.exchange(buffer)
        link.wait_until_received()
        for layout, received in zip(together, buffer.cpu().split(sizes), strict=True):
            tensor = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
            _bytes_of(tensor).copy_(received)
            tensors.append(tensor)
    link.finish()
    return unflatten(spec, tensors)


class _Link:
    """Receives tensors of bytes from one member and passes them on to another, in chunks."""

    def __init__(self, group: ReplicaGroup, source: int | None, target: int | None) -> None:
        self._group = group
        self._source = source
        self._target = target
        self._receiving: deque[tuple[Work, Tensor]] = deque()
        """What may not have been received yet."""
        self._sending: deque[tuple[Work, Tensor]] = deque()
        """What may not have been sent yet, with its memory."""

    def exchange(self, tensor: Tensor) -> None:
        """Start to receive into a tensor of one dimension if there is a source, and to send it if not.

        What is received is sent later if there is a target.
        """
        if not tensor.numel():
            return
        for chunk in tensor.split(CHUNK // tensor.element_size()):
            if self._source is None:
                self._send(chunk)
                continue
            self._receiving.append((self._group.receive(chunk, self._source), chunk))
            if len(self._receiving) == AHEAD:
                self._pass_on()

    def wait_until_received(self) -> None:
        """Wait until all tensors are received."""
        while self._receiving:
            self._pass_on()

    def finish(self) -> None:
        """Wait until everything is received and sent."""
        self.wait_until_received()
        while self._sending:
            self._wait_for_sent()
        self._group.wait_for_device()

    def _pass_on(self) -> None:
        work, chunk = self._receiving.popleft()
        self._group.wait(work)
        self._send(chunk)

    def _send(self, chunk: Tensor) -> None:
        if self._target is None:
            return
        self._sending.append((self._group.send(chunk, self._target), chunk))
        if len(self._sending) == AHEAD:
            self._wait_for_sent()

    def _wait_for_sent(self) -> None:
        work, _ = self._sending.popleft()
        self._group.wait(work)


def _parts(sizes: Sequence[int]) -> list[slice]:
    """Return which tensors are sent together: large ones alone, others up to `CHUNK` bytes."""
    parts: list[slice] = []
    first, pending = 0, 0
    for index, size in enumerate(sizes):
        if size > SMALL or pending + size > CHUNK:
            if index > first:
                parts.append(slice(first, index))
            first, pending = index, 0
        if size > SMALL:
            parts.append(slice(index, index + 1))
            first = index + 1
        else:
            pending += size
    if first < len(sizes):
        parts.append(slice(first, len(sizes)))
    return parts


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as bytes, in the same memory."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
