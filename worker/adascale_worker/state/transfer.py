"""How replicas get the state of others as a whole, between two steps, from the memory of those that have it.

Those that get it are shared out among them, and those that get it from the same member form a chain: each
passes every chunk on while it receives the next. So each member sends the state at most once. A transfer that
fails leaves the previous state intact.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Work

from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.state.tree import (
    TensorIndex,
    TensorLayout,
    Tree,
    flatten,
    layouts,
    memory_of,
    unflatten,
)

SMALL: Final = 1 << 20
"""Bytes of a tensor up to which it is sent together with others."""
LEAST: Final = 1 << 12
"""Bytes of a tensor above which it is not sent to a replica that has it."""
HOST: Final = torch.device("cpu")
WORD, ROW = 8, 8192
"""Bytes of a word, and of a row of words, of a checksum."""
CHUNK: Final = 32 << 20
"""Bytes of one message."""
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


def named_tensors(state: Tree, least: int) -> dict[str, Tensor]:
    """Return the tensors of a state that have more bytes than `least`, by name."""
    spec, tensors = flatten(state)
    named = zip(TensorIndex(spec).names(), tensors, strict=True)
    return {name: tensor for name, tensor in named if tensor.nbytes > least}


def checksum(tensor: Tensor) -> str:
    """Return what is the same for the same tensor, and for others with a probability of about 2**-60.

    Of a table of words, the sums of rows with fixed random weights are hashed.
    """
    content = bytes_of(tensor)
    if content.data_ptr() % WORD:
        content = content.clone()
    table = content[: content.numel() // ROW * ROW].view(torch.int64).view(-1, ROW // WORD)
    weights = _weights().to(table.device)
    if table.is_cuda:  # without products of integer matrices
        sums = [(part * weights).sum(1) for part in table.split(1 << 14)]
    else:
        sums = [torch.mv(table, weights)]
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    for part in (*sums, content[table.numel() * WORD :]):
        digest.update(memory_of(part))
    return digest.hexdigest()


@cache
def _weights() -> Tensor:
    """Return odd numbers, so that a word that differs changes the sum of its row."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (ROW // WORD,), generator=generator) | 1


def find_known(
    group: ReplicaGroup, sources: Sequence[int], make_state: Callable[[], Tree], *, has_followed: bool
) -> dict[str, Tensor]:
    """Return the tensors that all receivers have already, by name: those of this replica. A collective call.

    `has_followed`: whether this replica has made the steps of others, and may have their tensors.
    """
    if not any(group.gather_in_lane(has_followed)):
        return {}
    takes_part = has_followed or group.rank == sources[0]
    own = named_tensors(make_state(), LEAST) if takes_part else {}
    # All compute checksums at the same time.
    rows = group.gather_in_lane({name: checksum(tensor) for name, tensor in own.items()})
    if not rows:
        return {}
    receivers = [row for rank, row in enumerate(rows) if rank not in sources]
    same = [
        name for name, known in rows[sources[0]].items() if all(row.get(name) == known for row in receivers)
    ]
    return {name: own.get(name, torch.empty(0)) for name in same}


def transfer(
    group: ReplicaGroup,
    route: Route,
    make_state: Callable[[], Any],
    known: Mapping[str, Tensor],  # by name: those that are not sent
) -> Any | None:
    """Send the state, or return the state that comes from another member and pass it on."""
    link, device = _Link(group, route), group.transfer_device
    spec, tensors = flatten(make_state()) if route.source is None else (b"", [])
    length = torch.tensor([len(spec)], device=device)
    link.exchange(length)
    link.wait_until_received()
    content = spec if route.source is None else bytes(int(length))
    document = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    link.exchange(document)
    link.wait_until_received()
    if route.source is not None:
        spec = document.cpu().numpy().tobytes()
    found = layouts(spec)
    own = [known.get(name) for name in TensorIndex(spec).names()] if known else [None] * len(found)
    if route.source is not None:
        pairs = zip(found, own, strict=True)
        tensors = [_empty(layout, device) if kept is None else kept for layout, kept in pairs]
    sent = [tensor for tensor, kept in zip(tensors, own, strict=True) if kept is None]
    small = [bytes_of(tensor) for tensor in sent if tensor.nbytes <= SMALL]
    together = torch.cat([each.to(device) for each in small]) if small else document[:0]
    link.exchange(together)
    for tensor in sent:
        if tensor.nbytes > SMALL:
            link.exchange(bytes_of(tensor.to(device)))
    link.finish()
    if route.source is None:
        return None
    for each, received in zip(small, together.cpu().split([len(each) for each in small]), strict=True):
        each.copy_(received)
    return unflatten(spec, tensors)


def _empty(layout: TensorLayout, device: torch.device) -> Tensor:
    """Return an uninitialized tensor; a small one is on the host."""
    place = device if layout.bytes > SMALL else HOST
    return torch.empty(layout.shape, dtype=layout.dtype, device=place)


class _Link:
    """Receives tensors of bytes from one member and passes them on to another, in chunks."""

    def __init__(self, group: ReplicaGroup, route: Route) -> None:
        self._group = group
        self._source, self._target = route.source, route.target
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


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as bytes, in the same memory."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
