"""Gives all members of a generation the same state, from the memory of the members that have it.

The members that get the state are shared out among those that have it, which send at the same time. Those
that get it from the same member form a chain: each passes every chunk on while it receives the next. So each
member sends the state at most once, and the time of a transfer hardly grows with the number of members.

The sender sends the structure of its state, then its tensors in chunks, from where they are. A receiver
allocates the tensors and loads them when all have arrived, so a transfer that fails leaves its previous state
intact.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Work

from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.hyperparameters import HasGroups
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.state.tree import TensorLayout, flatten, layouts, unflatten

SMALL: Final = 1 << 20
"""Bytes of a tensor up to which it is sent together with others, and no memory is prepared for it."""
_MADV_POPULATE_WRITE: Final = 23
"""Of linux/mman.h, since Linux 5.14."""


# The kernel clears each page of new memory when it is first written, which takes about as long as the
# transfer itself. A replica that waits to join does it while the others train.


class ReceiveMemory:
    """Memory on the host for a state that is received, by its size. Each part is used once."""

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


def expected_sizes(model: torch.nn.Module, optimizer: HasGroups) -> list[int]:
    """Return the bytes of the tensors that a model and its optimizer have after some steps, on this process.

    The states of the optimizer do not exist before its first step. Those that SGD, Adam and AdamW make are
    known. A wrong expectation costs time and memory until the replica has joined, and nothing else.
    """
    tensors = [each for each in model.state_dict().values() if isinstance(each, Tensor)]
    sizes = [local_shard(tensor).nbytes for tensor in tensors]
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
        parts = [bytes_of(tensor.to(device)) for tensor in tensors[part]]
        link.exchange(parts[0] if len(parts) == 1 else torch.cat(parts))
    link.finish()


def receive(group: ReplicaGroup, route: Route, *, device: torch.device, memory: ReceiveMemory) -> Any:
    """Return the state that comes from another member, and pass it on."""
    link = _Link(group, route.source, route.target)
    length = torch.zeros(1, dtype=torch.int64, device=device)
    link.exchange(length)
    link.wait_until_received()
    document = torch.empty(int(length), dtype=torch.uint8, device=device)
    link.exchange(document)
    link.wait_until_received()
    spec = document.cpu().numpy().tobytes()
    expected = layouts(spec)
    tensors: list[Tensor] = []
    for part in _parts([layout.bytes for layout in expected]):
        together = expected[part]
        if together[0].bytes > SMALL:
            (layout,) = together
            tensor = (
                memory.tensor(layout)
                if device.type == "cpu"
                else torch.empty(layout.shape, dtype=layout.dtype, device=device)
            )
            link.exchange(bytes_of(tensor))
            tensors.append(tensor)
            continue
        sizes = [layout.bytes for layout in together]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        link.exchange(buffer)
        link.wait_until_received()
        for layout, received in zip(together, buffer.cpu().split(sizes), strict=True):
            tensor = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
            bytes_of(tensor).copy_(received)
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


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as bytes, in the same memory."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
