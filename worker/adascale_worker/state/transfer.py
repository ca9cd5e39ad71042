"""How replicas get the state of others: as a whole between two steps, or in pieces while the others train.

**As a whole**, from the memory of the members that have it. Those that get it are shared out among them, and
those that get it from the same member form a chain: each passes every chunk on while it receives the next. So
each member sends the state at most once. A transfer that fails leaves the previous state intact.

**In pieces.** The next rank 0 sends at the end of a step some parameters, each with what the optimizer keeps
for it, and from then on their mean gradients and its hyperparameters: the replica that joins makes the same
steps. What remains is sent between two steps, with a checksum of each tensor that is not sent again. Where
these differ, and when the connection is lost, the others wait for the whole state.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils.hooks import RemovableHandle

from adascale_core.errors import AdaScaleError
from adascale_worker.membership.links import StateNumber
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.hyperparameters import HasGroups
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.state.file import Snapshot, data_bytes, divide
from adascale_worker.state.tree import (
    TensorIndex,
    TensorLayout,
    Tree,
    flatten,
    layout_of,
    layouts,
    memory_of,
    unflatten,
)

SMALL: Final = 1 << 20
"""Bytes of a tensor up to which it is sent together with others, and no memory is prepared for it."""
HOST: Final = torch.device("cpu")
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

    def tensor(self, layout: TensorLayout, device: torch.device = HOST) -> Tensor:
        """Return an uninitialized tensor, in prepared memory if there is some of its size.

        A small one is on the host.
        """
        free = self._free.get(layout.bytes) if device == HOST else None
        if not free:
            device = device if layout.bytes > SMALL else HOST
            return torch.empty(layout.shape, dtype=layout.dtype, device=device)
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


def transfer(
    group: ReplicaGroup, route: Route, make_state: Callable[[], Any], memory: ReceiveMemory
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
        tensors = [memory.tensor(each, device) for each in layouts(spec)]
    small = [bytes_of(tensor) for tensor in tensors if tensor.nbytes <= SMALL]
    together = torch.cat([each.to(device) for each in small]) if small else document[:0]
    link.exchange(together)
    for tensor in tensors:
        if tensor.nbytes > SMALL:
            link.exchange(bytes_of(tensor.to(device)))
    link.finish()
    if route.source is None:
        return None
    for each, received in zip(small, together.cpu().split([len(each) for each in small]), strict=True):
        each.copy_(received)
    return unflatten(spec, tensors)


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


TIMEOUT: Final = 10.0
"""Seconds for which a replica that joins may take nothing of what it is sent."""
POLL: Final = 0.1
"""Seconds after which a wait looks for news of the others."""
SHARE_OF_STEP: Final = 0.9
"""The share of the time of a step in which its message is to be sent."""
LARGEST_PIECE: Final = 512 << 20
"""Bytes of a piece, unless one parameter has more."""
LEAST_SHARE: Final = 0.02
"""Of the state in a piece, so that a join does not last for ever."""
LEAST_WAIT: Final = 1.0
"""Seconds that the steps may wait together for what is sent, at least..."""
MAX_WAIT: Final = 0.5
"""...and as a share of the time to send the state. After that the state is sent as a whole."""

WORD, ROW = 8, 8192
"""Bytes of a word, and of a row of words, of a checksum."""

_LENGTH = struct.Struct("<Q")
Key = tuple[str | int, ...]
"""Which tensor: (number of a parameter,), (number of a parameter, name in the optimizer's state), or (place
in the state,)."""


@dataclass(frozen=True)
class _Parameter:
    """A parameter of one of several optimizers, with what that keeps for it."""

    number: int  # among those of all optimizers
    owner: int  # the number of its optimizer
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    tensor: Tensor

    @property
    def state(self) -> dict[str, Any]:
        """What is kept for it."""
        kept: dict[str, Any] = self.optimizer.state.get(self.tensor, {})
        return kept

    @property
    def large(self) -> dict[Key, Tensor]:
        """It, and the tensors of its size."""
        found: dict[Key, Tensor] = {(self.number,): self.tensor}
        found |= {(self.number, name): value for name, value in self.state.items() if _is_large(value)}
        return found

    @property
    def small(self) -> dict[str, Any]:
        """The other values that are kept for it."""
        return {name: value for name, value in self.state.items() if not _is_large(value)}


def _parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[_Parameter]:
    places = [
        (owner, optimizer, group, parameter)
        for owner, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return [_Parameter(number, *place) for number, place in enumerate(places)]


def _all_large(parameters: Iterable[_Parameter]) -> dict[Key, Tensor]:
    return {key: tensor for each in parameters for key, tensor in each.large.items()}


class StateSource:
    """Sends the state to replicas that join, in hooks of the optimizers' steps, and in a thread."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        make_state: Callable[[], Tree],
        connections: Sequence[socket.socket],
    ) -> None:
        self._optimizers = optimizers
        self._parameters = _parameters_of(optimizers)
        self._make_state = make_state
        self._connections = connections
        self._sent = 0
        """Parameters that are sent, the first ones."""
        self._others: dict[str, Tensor] = {}
        """Large tensors that are no parameters, by name: those that are frozen, or averages of weights."""
        self._waiting: deque[str] = deque()
        self._checksums: dict[str, str] = {}
        """Those of the other tensors, as they were sent."""
        self._step, self._pieces = Snapshot(), Snapshot()
        self._idle = threading.Event()
        self._idle.set()
        self._total_bytes = sum(each.nbytes for each in _all_large(self._parameters).values())
        self._stepped: tuple[int, float] | None = None
        """Which optimizer has made the last step, and when."""
        self._pauses: dict[int, float] = {}
        """Seconds from the last step of each optimizer to the next step of any, in which it can be sent."""
        self._waited = self._sending_time = 0.0
        self._sent_bytes = 0
        self.problem = ""
        """Why the state has to be sent as a whole; empty while it has not."""
        self._hooks: list[RemovableHandle] = []
        self._attempt(self._begin)

    def _begin(self) -> None:
        for connection in self._connections:
            connection.settimeout(TIMEOUT)
        self._others = dict(_large_tensors(self._make_state(), self._parameters))
        self._waiting.extend(self._others)
        for number, optimizer in enumerate(self._optimizers):
            before, after = partial(self._before_step, number), partial(self._after_step, number)
            self._hooks += [
                optimizer.register_step_pre_hook(lambda *_, before=before: self._attempt(before)),
                optimizer.register_step_post_hook(lambda *_, after=after: self._attempt(after)),
            ]

    @property
    def is_complete(self) -> bool:
        """Whether only a small rest remains to be sent, or the whole state has to be sent."""
        return bool(self.problem) or (self._sent == len(self._parameters) and not self._waiting)

    def send_rest(self, number: StateNumber, check: Callable[[], None]) -> None:
        """Send the rest between two steps, if all but the rest was sent. `check` may raise an error."""
        if self.is_complete:
            self._attempt(lambda: self._send_rest(number, check))

    def close(self) -> None:
        """Send nothing any more."""
        if self.problem:
            print(f"adascale: replicas that join wait for the state: {self.problem}", flush=True)
        for hook in self._hooks:
            hook.remove()
        self._disconnect()
        self._idle.wait(TIMEOUT)
        for connection in self._connections:
            connection.close()

    # -- each step ----------------------------------------------------------------------------------------

    def _attempt(self, send: Callable[[], None]) -> None:
        if self.problem:
            return
        try:
            send()
        except Exception as error:  # noqa: BLE001 (training does not need it)
            known = isinstance(error, AdaScaleError | OSError)
            self.problem = str(error) if known else f"{type(error).__name__}: {error}"
            self._disconnect()

    def _disconnect(self) -> None:
        """End what the thread sends."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _wait(self, seconds: float) -> None:
        """Wait until what was handed over is sent."""
        begun = time.monotonic()
        is_sent = self._idle.wait(seconds)
        self._waited += time.monotonic() - begun
        if self.problem:
            raise OSError(self.problem)
        if not is_sent:
            raise OSError("the connection is too slow to send gradients during the steps")

    @property
    def _bandwidth(self) -> float:
        return self._sent_bytes / self._sending_time if self._sending_time else float("inf")

    def _wait_for_rest(self, check: Callable[[], None]) -> None:
        while not self._idle.wait(POLL):
            check()
        self._wait(0.0)

    def _before_step(self, number: int) -> None:
        if self._stepped is not None:
            last, ended_at = self._stepped
            self._pauses[last] = time.monotonic() - ended_at
        limit = max(MAX_WAIT * self._total_bytes / self._bandwidth, LEAST_WAIT)
        self._wait(max(limit - self._waited, 0.0))
        optimizer = self._optimizers[number]
        if getattr(optimizer, "grad_scale", None) is not None:
            raise OSError("the optimizer divides gradients by the scale of the loss")
        sent = [each for each in self._parameters[: self._sent] if each.owner == number]
        step = {
            "optimizer": number,
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ],
            "values": [each.small for each in sent],
            "gradients": [each.tensor.grad for each in sent],
        }
        self._step.copy(step)

    def _after_step(self, number: int) -> None:
        self._stepped = number, time.monotonic()
        pause, budget = self._pauses.get(number), 0.0
        if pause is not None and self._sending_time:
            budget = self._bandwidth * SHARE_OF_STEP * pause - self._step.data_bytes
            budget = min(budget, LARGEST_PIECE)
        if pause is None or pause == max(self._pauses.values()):
            budget = max(budget, CHUNK, LEAST_SHARE * self._total_bytes)
        parameters, others, size = [], {}, 0
        while self._sent < len(self._parameters) and size < budget:
            parameter = self._parameters[self._sent]
            size += sum(tensor.nbytes for tensor in parameter.large.values())
            parameters.append([parameter.tensor.detach(), dict(parameter.state)])
            self._sent += 1
        while self._waiting and size < budget:
            name = self._waiting.popleft()
            others[name] = self._others[name]
            self._checksums[name] = checksum(others[name])
            size += others[name].nbytes
        self._pieces.copy({"parameters": parameters, "others": others})
        self._hand_over(self._step, self._pieces)

    def _send_rest(self, number: StateNumber, check: Callable[[], None]) -> None:
        spec, tensors = flatten(self._make_state())
        sent = _all_large(self._parameters[: self._sent])
        places = {_address(tensor): key for key, tensor in sent.items()}
        known: dict[int, Key] = {}
        for index, (name, tensor) in enumerate(zip(TensorIndex(spec).names(), tensors, strict=True)):
            if tensor.numel() and _address(tensor) in places:
                known[index] = places[_address(tensor)]
            elif name in self._checksums and checksum(tensor) == self._checksums[name]:
                known[index] = (name,)
        checksums = {key: checksum(tensor) for key, tensor in sent.items()}
        self._wait_for_rest(check)
        rest = {
            "spec": spec,
            "known": known,
            "tensors": [each for index, each in enumerate(tensors) if index not in known],
            "checksums": checksums,
            "number": number,
        }
        self._pieces.copy(rest)
        self._hand_over(self._pieces)
        self._wait_for_rest(check)

    def _hand_over(self, *snapshots: Snapshot) -> None:
        self._idle.clear()
        threading.Thread(target=self._send, args=(snapshots,), name="adascale-state", daemon=True).start()

    def _send(self, snapshots: Sequence[Snapshot]) -> None:
        begun = time.monotonic()
        try:
            for snapshot in snapshots:
                snapshot.wait()
                for connection in self._connections:
                    connection.sendall(_LENGTH.pack(len(snapshot.spec)) + snapshot.spec)
                    for part in snapshot.parts(CHUNK):
                        connection.sendall(part)
                self._sent_bytes += snapshot.data_bytes
            self._sending_time += time.monotonic() - begun
        except (OSError, RuntimeError) as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
        finally:
            self._idle.set()


class StateFollower:
    """Receives the state of a `StateSource`, and makes its steps."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], memory: ReceiveMemory) -> None:
        self._optimizers = optimizers
        self._parameters = _parameters_of(optimizers)
        self._memory = memory
        self.count = 0
        """Parameters that this replica has received, the first ones."""
        self._others: dict[str, Tensor] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.number: StateNumber | None = None
        """That of the state; None until it is complete."""
        self.state: Tree = {}

    def follow(self, connection: socket.socket, check: Callable[[], None]) -> None:
        """Receive the state until it is complete, or has to be received as a whole.

        `check` is called again and again, and may raise an error.
        """
        connection.settimeout(POLL)
        try:
            while self.number is None:
                message = self._receive(connection, check)
                if "number" in message:
                    self.state, self.number = self._complete(message), message["number"]
                elif "groups" in message:
                    self._step(**message)
                else:
                    self._keep(**message)
        except OSError:
            pass  # The other one says why, if it can.
        except (RuntimeError, ValueError, LookupError, TypeError, AdaScaleError) as error:
            print(
                f"adascale: the state cannot be received during the steps of the others: {error}", flush=True
            )
        finally:
            if self.number is None:
                # The whole state needs this memory.
                for optimizer in self._optimizers:
                    optimizer.state.clear()
                self._others.clear()
                self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _receive(self, connection: socket.socket, check: Callable[[], None]) -> Any:
        """Return a message, whose tensors are in the buffer."""
        length = bytearray(_LENGTH.size)
        _read(connection, memoryview(length), check)
        spec = bytearray(*_LENGTH.unpack(length))
        _read(connection, memoryview(spec), check)
        found = layouts(bytes(spec))
        size = data_bytes(found)
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        _read(connection, self._buffer[:size].numpy().data, check)
        return unflatten(bytes(spec), divide(self._buffer, found))

    def _step(
        self,
        optimizer: int,
        groups: list[dict[str, Any]],
        values: list[dict[str, Any]],
        gradients: list[Tensor | None],
    ) -> None:
        """Make a step of an optimizer for the parameters that this replica has."""
        stepping = self._optimizers[optimizer]
        own = [each for each in self._parameters[: self.count] if each.owner == optimizer]
        for group, settings in zip(stepping.param_groups, groups, strict=True):
            for name, value in settings.items():
                group[name] = _on_device_of(group[name], value) if name in group else value
        for parameter, kept, gradient in zip(own, values, gradients, strict=True):
            self._set_values(parameter, kept)
            tensor = parameter.tensor
            tensor.grad = None if gradient is None else gradient.to(tensor.device)
        # Not `optimizer.step`, which schedulers count.
        type(stepping).step(stepping)
        for parameter in own:
            parameter.tensor.grad = None

    @torch.no_grad()
    def _keep(self, parameters: list[tuple[Tensor, dict[str, Any]]], others: dict[str, Tensor]) -> None:
        """Keep what follows the steps from now on."""
        for value, kept in parameters:
            parameter = self._parameters[self.count]
            parameter.tensor.copy_(value)
            self._set_values(parameter, kept)
            self.count += 1
        self._others.update({name: self._kept(value) for name, value in others.items()})

    def _kept(self, value: Tensor) -> Tensor:
        """Return a tensor in memory of its own."""
        spec, (content,) = flatten(value)
        copy: Tensor = unflatten(spec, [self._memory.tensor(layout_of(content)).copy_(content)])
        return copy

    def _set_values(self, parameter: _Parameter, kept: dict[str, Any]) -> None:
        counts_on_device = parameter.group.get("capturable") or parameter.group.get("fused")
        state = parameter.optimizer.state[parameter.tensor]
        for name, value in kept.items():
            before = state.get(name)
            if isinstance(before, Tensor) and isinstance(value, Tensor):
                before.copy_(value)
            elif isinstance(value, Tensor):
                # As torch decides when it loads a state.
                is_beside = name != "step" or counts_on_device
                state[name] = self._kept(value).to(parameter.tensor.device if is_beside else "cpu")
            else:
                state[name] = value

    def _complete(self, rest: Any) -> Tree:
        """Return the state, if what this replica has is equal to what the other one has."""
        own, expected = _all_large(self._parameters[: self.count]), rest["checksums"]
        if differing := [key for key in expected if key not in own or checksum(own[key]) != expected[key]]:
            raise ValueError(
                f"{len(differing)} of {len(expected)} tensors differ, such as that of parameter "
                f"{differing[0][0]} of the optimizer. The program changes weights beside optimizer.step(), "
                "or the optimizer makes its step for all parameters together: the others wait for the state"
            )
        received = iter(rest["tensors"])
        tensors = []
        for index in range(len(layouts(rest["spec"]))):
            key = rest["known"].get(index)
            if key is None:
                tensors.append(next(received).clone())
            else:
                found = own[key] if key in own else self._others[key[0]]
                tensors += flatten(found)[1]
        state: Tree = unflatten(rest["spec"], tensors)
        return state


def checksum(tensor: Tensor) -> str:
    """Return what is the same for the same bytes, and differs for others, also in another order.

    Of tables of words, the sums of rows and of columns are hashed.
    """
    content = bytes_of(flatten(tensor)[1][0])
    if content.data_ptr() % WORD:
        content = content.clone()
    table = content[: content.numel() // ROW * ROW].view(torch.int64).view(-1, ROW // WORD)
    parts = [table.sum(0), table.sum(1), content[table.numel() * WORD :]]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(memory_of(part))
    return digest.hexdigest()


def _large_tensors(state: Tree, own: Iterable[_Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Yield the large tensors of a state by name, without those that follow the steps of an optimizer."""
    spec, tensors = flatten(state)
    followed = {_address(each) for each in _all_large(own).values()}
    for name, tensor in zip(TensorIndex(spec).names(), tensors, strict=True):
        if tensor.nbytes > SMALL and _address(tensor) not in followed:
            yield name, tensor


def _is_large(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def _address(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


def _on_device_of(before: Any, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(before.device if isinstance(before, Tensor) else value.device, copy=True)


def _read(connection: socket.socket, memory: memoryview, check: Callable[[], None]) -> None:
    while memory.nbytes:
        check()
        with contextlib.suppress(TimeoutError):
            count = connection.recv_into(memory)
            if not count:
                raise ConnectionResetError("the other end has closed the connection")
            memory = memory[count:]
