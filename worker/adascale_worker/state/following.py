"""How a replica that joins gets the state of training while the others train on.

The replica that will be rank 0 sends the state in pieces: at the end of a step some parameters, each with
what the optimizer keeps for it. From then on it also sends the mean gradients of these parameters, as the
optimizer gets them, with its hyperparameters, and the replica that joins makes the same steps for what it
has. So after the last piece its parameters are equal bit for bit. What remains is small: it is sent between
two steps, with a checksum of each tensor that is not sent again.

Where a program changes weights beside the steps of its optimizer, or a step of one parameter depends on
others, the checksums differ. Then, and when the connection is lost, the others wait for the whole state.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adascale_core.errors import AdaScaleError
from adascale_worker.membership.links import StateNumber
from adascale_worker.state.exchange import CHUNK, SMALL, ReceiveMemory, bytes_of
from adascale_worker.state.file import Snapshot, data_bytes, offsets_of
from adascale_worker.state.tree import TensorIndex, Tree, flatten, layout_of, layouts, memory_of, unflatten

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


class _Tensors:
    """The parameters of optimizers, with what these keep for each."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        places = [
            (owner, group, parameter)
            for owner, optimizer in enumerate(optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self.owners = [owner for owner, _, _ in places]
        """The number of the optimizer of each parameter."""
        self.groups = [group for _, group, _ in places]
        """The group of each parameter."""
        self.parameters = [parameter for _, _, parameter in places]

    def state(self, number: int) -> dict[str, Any]:
        """Return what is kept for a parameter."""
        kept: dict[str, Any] = self.optimizers[self.owners[number]].state.get(self.parameters[number], {})
        return kept

    def of(self, optimizer: int, count: int) -> list[int]:
        """Return which of the first parameters an optimizer has."""
        return [number for number in range(count) if self.owners[number] == optimizer]

    def large(self, number: int) -> Iterator[tuple[Key, Tensor]]:
        """Yield a parameter, and the tensors of its size."""
        parameter = self.parameters[number]
        yield (number,), parameter
        for name, value in self.state(number).items():
            if _is_large(value):
                yield (number, name), value

    def all_large(self, count: int | None = None) -> dict[Key, Tensor]:
        """Return the tensors of the first parameters; without a number, of all."""
        numbers = range(len(self.parameters) if count is None else count)
        return {key: tensor for number in numbers for key, tensor in self.large(number)}

    def small(self, number: int) -> dict[str, Any]:
        """Return the other values that are kept for a parameter."""
        return {name: value for name, value in self.state(number).items() if not _is_large(value)}


class StateSource:
    """Sends the state to replicas that join, in hooks of the optimizers' steps, and in a thread."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        make_state: Callable[[], Tree],
        connections: Sequence[socket.socket],
    ) -> None:
        self._tensors = _Tensors(optimizers)
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
        self._total_bytes = sum(each.nbytes for each in self._tensors.all_large().values())
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
        self._others = dict(_large_tensors(self._make_state(), self._tensors))
        self._waiting.extend(self._others)
        for number, optimizer in enumerate(self._tensors.optimizers):
            before, after = partial(self._before_step, number), partial(self._after_step, number)
            self._hooks += [
                optimizer.register_step_pre_hook(lambda *_, before=before: self._attempt(before)),
                optimizer.register_step_post_hook(lambda *_, after=after: self._attempt(after)),
            ]

    @property
    def is_complete(self) -> bool:
        """Whether only a small rest remains to be sent, or the whole state has to be sent."""
        return bool(self.problem) or (self._sent == len(self._tensors.parameters) and not self._waiting)

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
        optimizer = self._tensors.optimizers[number]
        if getattr(optimizer, "grad_scale", None) is not None:
            raise OSError("the optimizer divides gradients by the scale of the loss")
        sent = self._tensors.of(number, self._sent)
        step = {
            "optimizer": number,
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ],
            "values": [self._tensors.small(each) for each in sent],
            "gradients": [self._tensors.parameters[each].grad for each in sent],
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
        while self._sent < len(self._tensors.parameters) and size < budget:
            size += sum(tensor.nbytes for _, tensor in self._tensors.large(self._sent))
            parameter = self._tensors.parameters[self._sent].detach()
            parameters.append([parameter, dict(self._tensors.state(self._sent))])
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
        sent = self._tensors.all_large(self._sent)
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
        self._tensors = _Tensors(optimizers)
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
                for optimizer in self._tensors.optimizers:
                    optimizer.state.clear()

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
        tensors = [
            self._buffer[offset : offset + each.bytes].view(each.dtype).view(each.shape)
            for each, offset in zip(found, offsets_of(found), strict=True)
        ]
        return unflatten(bytes(spec), tensors)

    def _step(
        self,
        optimizer: int,
        groups: list[dict[str, Any]],
        values: list[dict[str, Any]],
        gradients: list[Tensor | None],
    ) -> None:
        """Make a step of an optimizer for the parameters that this replica has."""
        stepping = self._tensors.optimizers[optimizer]
        own = self._tensors.of(optimizer, self.count)
        for group, settings in zip(stepping.param_groups, groups, strict=True):
            for name, value in settings.items():
                group[name] = _on_device_of(group[name], value) if name in group else value
        for number, kept, gradient in zip(own, values, gradients, strict=True):
            parameter = self._tensors.parameters[number]
            self._set_values(number, kept)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        # Not `optimizer.step`, which schedulers count.
        type(stepping).step(stepping)
        for number in own:
            self._tensors.parameters[number].grad = None

    @torch.no_grad()
    def _keep(self, parameters: list[tuple[Tensor, dict[str, Any]]], others: dict[str, Tensor]) -> None:
        """Keep what follows the steps from now on."""
        for value, kept in parameters:
            self._tensors.parameters[self.count].copy_(value)
            self._set_values(self.count, kept)
            self.count += 1
        self._others.update({name: self._kept(value) for name, value in others.items()})

    def _kept(self, value: Tensor) -> Tensor:
        """Return a tensor in memory of its own."""
        spec, (content,) = flatten(value)
        copy: Tensor = unflatten(spec, [self._memory.tensor(layout_of(content)).copy_(content)])
        return copy

    def _set_values(self, number: int, kept: dict[str, Any]) -> None:
        parameter = self._tensors.parameters[number]
        group = self._tensors.groups[number]
        counts_on_device = group.get("capturable") or group.get("fused")
        state = self._tensors.optimizers[self._tensors.owners[number]].state[parameter]
        for name, value in kept.items():
            before = state.get(name)
            if isinstance(before, Tensor) and isinstance(value, Tensor):
                before.copy_(value)
            elif isinstance(value, Tensor):
                # As torch decides when it loads a state.
                is_beside = name != "step" or counts_on_device
                state[name] = self._kept(value).to(parameter.device if is_beside else "cpu")
            else:
                state[name] = value

    def _complete(self, rest: Any) -> Tree:
        """Return the state, if what this replica has is equal to what the other one has."""
        own, expected = self._tensors.all_large(self.count), rest["checksums"]
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


def _large_tensors(state: Tree, own: _Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the large tensors of a state by name, without those that follow the steps of an optimizer."""
    spec, tensors = flatten(state)
    followed = {_address(each) for each in own.all_large().values()}
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
