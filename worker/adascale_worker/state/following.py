"""How a replica that waits gets the state of rank 0 while that trains, over a connection of its own.

**Copies**, while only one replica trains: each that it makes for its own agent is sent, in a thread, and kept
in the memory of the other agent.

**In pieces**, if several train, or this one joins. Rank 0 sends at the end of a step some parameters, each
with what the optimizer keeps for it, and from then on their mean gradients and its hyperparameters: the
replica that waits makes the same steps. What it lacks, or what differs, is sent between two steps, see
`transfer`.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adascale_core.errors import AdaScaleError
from adascale_storage import Part
from adascale_worker.membership.links import Follower
from adascale_worker.process.resource_limits import unused_memory
from adascale_worker.process.snapshot_place import Condition, CopyNumber, SnapshotPlaces
from adascale_worker.scaling.statistics.norms import batches, local_shard
from adascale_worker.state.file import Snapshot, data_bytes, divide, with_local
from adascale_worker.state.transfer import CHUNK, SMALL, named_tensors
from adascale_worker.state.tree import Tree, flatten, layout_of, layouts, unflatten

TIMEOUT: Final = 10.0
"""Seconds in which a replica that waits takes a part of what it is sent, at most `CHUNK` bytes."""
POLL: Final = 0.1
"""Seconds after which a wait looks for news of the others."""
SHARE_OF_STEP: Final = 0.9
"""The share of the time of a step in which its message is to be sent."""
STEP_PART: Final = 32 << 20
"""Bytes of gradients in a message, unless one parameter or the share below has more: a replica that waits
makes a part of the step with each."""
MAX_PARTS: Final = 64
"""Messages into which the gradients of a step are divided, about, if there are many."""
LARGEST_PIECE: Final = 512 << 20
"""Bytes of a piece, unless one parameter has more."""
LEAST_SHARE: Final = 0.02
"""Of the state in a piece, so that a join does not last for ever."""
LEAST_WAIT: Final = 1.0
"""Seconds that the steps may wait together for what is sent, at least..."""
MAX_WAIT: Final = 0.5
"""...and as a share of the time to send the state. After that the state is sent as a whole."""

COPY_SHARE: Final = 0.1
"""The largest share of the time in which copies are sent. Training goes on meanwhile."""
FOLLOW_SHARE: Final = 0.05
"""The largest share of the time for which training waits for a replica that follows and has everything..."""
FOLLOW_SLACK: Final = 0.1
"""...besides so many seconds."""

MAX_ATTEMPTS: Final = 5
"""How often replicas that do not join begin to follow in a generation."""
COPY_CHUNK: Final = 1 << 20
"""Bytes of the parts in which a copy is read and sent."""

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class _Parameter:
    """A parameter of one of several optimizers, with what that keeps for it."""

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
    def own(self) -> Tensor:
        """The part of it that this process has."""
        return local_shard(self.tensor)

    @property
    def large(self) -> list[Tensor]:
        """That, and those of the tensors of its size."""
        return [self.own, *map(local_shard, filter(_is_large, self.state.values()))]

    @property
    def gradient(self) -> Tensor | None:
        """Its gradient."""
        return None if self.tensor.grad is None else local_shard(self.tensor.grad)

    @property
    def kept(self) -> dict[str, Any]:
        """What is kept for it, with the parts of this process."""
        return {
            name: local_shard(value) if isinstance(value, Tensor) else value
            for name, value in self.state.items()
        }

    def like(self, value: Tensor) -> Tensor:
        """Return a tensor on its device, as a part of a sharded one if it is a part of its size."""
        value, own = value.to(self.tensor.device), self.own
        is_sharded = hasattr(self.tensor, "device_mesh") and value.shape == own.shape
        return with_local(self.tensor, value) if is_sharded else value

    @property
    def small(self) -> dict[str, Any]:
        """The other values that are kept for it."""
        return {name: value for name, value in self.kept.items() if not _is_large(self.state[name])}


def _parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[_Parameter]:
    return [
        _Parameter(owner, optimizer, group, parameter)
        for owner, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _all_large(parameters: Iterable[_Parameter]) -> list[Tensor]:
    return [tensor for each in parameters for tensor in each.large]


class CopySender:
    """Sends each new copy in the memory of the agent to a replica that waits, in a thread."""

    def __init__(self, follower: Follower, paths: Sequence[str]) -> None:
        self._connection = follower.connection
        self._sent = follower.copied
        self._paths = paths
        self._stopped = threading.Event()
        self.news = threading.Event()
        """Set when there is a new copy."""
        self._connection.settimeout(TIMEOUT)
        self._thread = threading.Thread(target=self._send_all, name="adascale-copies", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Send nothing more, and return whether something else can be sent, after no part of a copy."""
        self._stopped.set()
        self.news.set()
        self._thread.join(POLL)
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        return self._connection.fileno() >= 0

    def _send_all(self) -> None:
        try:
            places = SnapshotPlaces(self._paths)  # with locks of their own
            try:
                while True:
                    self.news.clear()
                    if self._stopped.is_set():
                        return
                    begun = time.monotonic()
                    self._send_newest(places)
                    self._stopped.wait((time.monotonic() - begun) * (1 / COPY_SHARE - 1))
                    self.news.wait()
            finally:
                places.close()
        except (OSError, EOFError):
            # The other end connects again.
            self._connection.close()

    def _send_newest(self, places: SnapshotPlaces) -> None:
        """Send the newest copy if its state is later than the last.

        Each part is copied first, because the place may be written again before the other end has it.
        """
        place = places.newest_place
        number = place.number
        with place.locked(exclusively=False) as is_complete:
            state, is_valid = place.state, place.condition is Condition.VALID and place.number == number
            if state is None or not (is_complete and is_valid):
                return
            if self._sent is not None and state <= self._sent:
                return
            data, document = place.lengths
            _send_message(self._connection, flatten({"copy": [data, document, *state]})[0])
            memory = memoryview(bytearray(min(data + document, COPY_CHUNK)))
            for position in range(0, data + document, COPY_CHUNK):
                part = memory[: data + document - position]
                place.read_into(part, position)
                self._connection.sendall(part)
            self._sent = state


class StateSource:
    """Sends the state to replicas that wait, in hooks of the optimizers' steps, and in a thread."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        make_state: Callable[[], Tree],
        connections: Mapping[str, socket.socket],  # by the id of the trainer
        processes: int = 1,  # of this replica, which send at the same time
    ) -> None:
        self._optimizers = optimizers
        self._parameters = _parameters_of(optimizers)
        self._make_state = make_state
        self._processes = processes
        self.instances = frozenset(connections)
        self.connections = dict(connections)
        """To those that have not been lost."""
        self._sending_to = ""
        """Which of them is sent something now."""
        self._completed_at: float | None = None
        """When all but the gradients of the next steps was sent."""
        self._cost = 0.0
        """Seconds since then for which training has waited."""
        self._sent = 0
        """Parameters that are sent, the first ones."""
        self._others: dict[str, Tensor] = {}
        """Large tensors that no optimizer has, by name, such as those that are frozen."""
        self._waiting: deque[tuple[str, int]] = deque()
        """Their names, each with the number of the first element that is not sent."""
        self._step: list[Snapshot] = []
        """The messages of the last step."""
        self._snapshots: list[Snapshot] = []
        """Those and more, whose memory is used again."""
        self._pieces = Snapshot()
        self._copied = threading.Event()
        """Whether the last gradients may change."""
        self._copied.set()
        self._sending: threading.Thread | None = None
        """The thread that sends what was handed over last, after all before."""
        self._total_bytes = sum(each.nbytes for each in _all_large(self._parameters))
        self._is_stepping = False
        """Whether an optimizer has begun a step and not ended it."""
        self._begun_at = 0.0
        """When the last step of an optimizer began."""
        self._stepped: tuple[int, float] | None = None
        """Which optimizer has made the last step, and when it ended."""
        self._pauses: dict[int, float] = {}
        """Seconds from the last step of each optimizer to the next step of any, in which it can be sent."""
        self._waited = self._sending_time = 0.0
        self._sent_bytes = 0
        self.problem = ""
        """Why the state has to be sent as a whole; empty while it has not."""
        self.is_slow = False
        """Whether that is because training has waited for too long."""
        self._hooks: list[RemovableHandle] = []
        self._attempt(self._begin)

    def _begin(self) -> None:
        needed = sum(each.own.nbytes for each in self._parameters) + min(LARGEST_PIECE, self._total_bytes)
        if unused_memory() < needed * self._processes:
            raise OSError(f"gradients and pieces need {needed >> 20:,} MiB of memory beside")
        for each in self._parameters:
            if hasattr(each.tensor, "device_mesh") and not _is_of_torch(each.optimizer):
                kind = type(each.optimizer).__name__
                raise OSError(f"a step of {kind} for some of the sharded parameters may wait for ever")
        for connection in self.connections.values():
            connection.settimeout(TIMEOUT)
        self._others = dict(_other_tensors(self._make_state(), self._parameters))
        self._waiting.extend((name, 0) for name in self._others)
        self._total_bytes += sum(each.nbytes for each in self._others.values())
        for number, optimizer in enumerate(self._optimizers):
            before, after = partial(self._before_step, number), partial(self._after_step, number)
            self._hooks += [
                optimizer.register_step_pre_hook(lambda *_, before=before: self._in_step(before)),
                optimizer.register_step_post_hook(lambda *_, after=after: self._in_step(after)),
            ]

    @property
    def is_complete(self) -> bool:
        """Whether only a small rest remains to be sent, or the whole state has to be sent."""
        return bool(self.problem) or (self._sent == len(self._parameters) and not self._waiting)

    @property
    def lacks_only_steps(self) -> bool:
        """Whether only the gradients of the last step are to be sent before a change, or the whole state."""
        return bool(self.problem) or self._completed_at is not None

    def flush(self, check: Callable[[], None]) -> None:
        """Wait until all is sent, if it is complete, for not much longer than usual.

        `check` may raise an error.
        """
        pieces = self._pieces.data_bytes if self._completed_at is None else 0
        usual = (self._step_bytes + pieces) / self._bandwidth
        deadline = time.monotonic() + max(2.0 * usual, LEAST_WAIT)
        while self.is_complete and time.monotonic() < deadline and not self._is_sent(POLL):
            check()

    def close(self) -> None:
        """Send nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._disconnect()
        self._is_sent(TIMEOUT)
        for connection in [*self.connections.values()]:
            connection.close()

    # -- each step ----------------------------------------------------------------------------------------

    def _attempt(self, send: Callable[[], object]) -> None:
        if self.problem:
            return
        try:
            send()
        except Exception as error:  # noqa: BLE001 (training does not need it)
            known = isinstance(error, AdaScaleError | OSError)
            self.problem = str(error) if known else f"{type(error).__name__}: {error}"
            self._disconnect()

    def _in_step(self, send: Callable[[], object]) -> None:
        """Send something in a step of the program, as long as its cost is small."""
        begun, counts = time.monotonic(), self._completed_at is not None
        self._attempt(self._require_cheap)
        self._attempt(send)
        if counts:
            self._cost += time.monotonic() - begun

    @property
    def _allowance(self) -> float:
        """Seconds for which training may wait now."""
        if self._completed_at is None:
            return float("inf")
        return FOLLOW_SLACK + FOLLOW_SHARE * (time.monotonic() - self._completed_at) - self._cost

    def wait_for_copy(self) -> None:
        """Wait until gradients may change, after a step."""
        if not self._copied.is_set():
            self._in_step(self._copied.wait)

    def _require_cheap(self) -> None:
        if self._allowance < 0.0:
            self.is_slow = True
            raise OSError("it takes too long to send gradients in each step")

    def _disconnect(self) -> None:
        """End what the thread sends."""
        for connection in [*self.connections.values()]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _wait(self, seconds: float) -> None:
        """Wait until what was handed over is sent, without one that takes nothing."""
        begun = time.monotonic()
        while not self._is_sent(seconds):
            late = self.connections.get(self._sending_to)
            if late is None or len(self.connections) == 1:
                self.is_slow = True
                raise OSError("the connection is too slow to send gradients during the steps")
            with contextlib.suppress(OSError):
                late.shutdown(socket.SHUT_RDWR)
            seconds, begun = LEAST_WAIT, time.monotonic()
        self._waited += time.monotonic() - begun
        if self.problem:
            raise OSError(self.problem)

    def _is_sent(self, seconds: float) -> bool:
        """Wait, and return whether all that was handed over is sent, or cannot be."""
        if self._sending is not None:
            self._sending.join(seconds)
        return self._sending is None or not self._sending.is_alive()

    @property
    def _step_bytes(self) -> int:
        return sum(message.data_bytes for message in self._step)

    @property
    def _bandwidth(self) -> float:
        return self._sent_bytes / self._sending_time if self._sending_time else float("inf")

    def _before_step(self, number: int) -> None:
        if self._stepped is not None:
            last, ended_at = self._stepped
            self._pauses[last] = time.monotonic() - ended_at
        limit = max(MAX_WAIT * self._total_bytes / self._bandwidth, LEAST_WAIT) - self._waited
        if self._completed_at is not None:
            limit = min(self._allowance, max(self._pauses.get(number, 0.0), FOLLOW_SLACK))
        self._wait(max(limit, 0.0))
        if self._completed_at is None and self.is_complete:
            self._completed_at = time.monotonic()
        if self._is_stepping:
            raise OSError("a step has failed whose gradients were sent")
        self._is_stepping = True
        self._copy_gradients(number)
        self._begun_at = time.monotonic()
        if self._step:
            self._copied.clear()
            self._hand_over(self._step)

    def _copy_gradients(self, number: int) -> None:
        """Begin to copy the gradients of an optimizer as the messages of its step."""
        optimizer = self._optimizers[number]
        if getattr(optimizer, "grad_scale", None) is not None:
            raise OSError("the optimizer divides gradients by the scale of the loss")
        # Others, and some that compute with many tensors at once, change gradients.
        is_foreach = any(group.get("foreach") for group in optimizer.param_groups)
        is_of_torch = _is_of_torch(optimizer)
        keeps_gradients = is_of_torch and not is_foreach
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        sent = [n for n, each in enumerate(self._parameters[: self._sent]) if each.owner == number]
        sizes = [self._parameters[n].own.nbytes for n in sent]
        # Another optimizer may need all gradients together.
        largest = max(STEP_PART, sum(sizes) // (MAX_PARTS if is_of_torch else 1))
        parts = [[sent[n] for n in part] for part in batches(sizes, [None] * len(sent), largest)]
        self._snapshots += [Snapshot() for _ in parts[len(self._snapshots) :]]
        self._step = self._snapshots[: len(parts)]
        for snapshot, part in zip(self._step, parts, strict=True):
            step = {
                "optimizer": number,
                "groups": groups,
                "values": [(n, self._parameters[n].small, self._parameters[n].gradient) for n in part],
            }
            snapshot.copy(step, least_later=SMALL if keeps_gradients else math.inf)

    def _after_step(self, number: int) -> None:
        now = time.monotonic()
        self._stepped, self._is_stepping = (number, now), False
        pause, budget = self._pauses.get(number), 0.0
        if pause is not None and self._sending_time:
            left = max(self._step_bytes - self._bandwidth * (now - self._begun_at), 0.0)
            budget = min(self._bandwidth * SHARE_OF_STEP * pause - left, LARGEST_PIECE)
        if pause is None or pause == max(self._pauses.values()):
            budget = max(budget, CHUNK, LEAST_SHARE * self._total_bytes)
        parameters, others, size = [], [], 0
        while self._sent < len(self._parameters) and size < budget:
            parameter = self._parameters[self._sent]
            size += sum(tensor.nbytes for tensor in parameter.large)
            parameters.append([parameter.own, parameter.kept])
            self._sent += 1
        while self._waiting and size < budget:
            name, start = self._waiting.popleft()
            whole = self._others[name].reshape(-1)
            part = whole[start : start + max(int(budget - size) // whole.element_size(), 1)]
            others.append([name, start, part])
            size += part.nbytes
            if start + len(part) < len(whole):
                self._waiting.appendleft((name, start + len(part)))
        if parameters or others:
            self._pieces.copy({"parameters": parameters, "others": others}, least_later=SMALL)
            self._hand_over([self._pieces])

    def _hand_over(self, snapshots: Sequence[Snapshot]) -> None:
        thread = threading.Thread(
            target=self._send, args=(snapshots, self._sending), name="adascale-state", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            self._copied.set()
            raise
        self._sending = thread

    def _send(self, snapshots: Sequence[Snapshot], earlier: threading.Thread | None) -> None:
        lost = ""
        try:
            if earlier is not None:
                earlier.join()
            begun = time.monotonic()
            for snapshot in snapshots:
                snapshot.wait()
            self._copied.set()
            if any(snapshot.is_torn for snapshot in self._step):
                raise OSError("the program has changed gradients after the step")
            for snapshot in snapshots:
                for instance, connection in [*self.connections.items()]:
                    self._sending_to = instance
                    try:
                        _send_message(connection, snapshot.spec, snapshot.parts(CHUNK))
                    except OSError as error:
                        # Others are not disturbed by its end.
                        connection.close()
                        del self.connections[instance]
                        lost = f"{type(error).__name__}: {error}"
                self._sent_bytes += snapshot.data_bytes
            self._sending_time += time.monotonic() - begun
            if not self.connections:
                self.problem = self.problem or lost
        except Exception as error:  # noqa: BLE001 (training does not need it)
            self.problem = self.problem or f"{type(error).__name__}: {error}"
        finally:
            self._copied.set()


def _send_message(connection: socket.socket, spec: bytes, parts: Iterable[Part] = ()) -> None:
    connection.sendall(_LENGTH.pack(len(spec)) + spec)
    for part in parts:
        connection.sendall(part)


class Followers:
    """The replicas that wait and are connected, which get copies or pieces of the state."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        make_state: Callable[[], Tree],
        paths: Sequence[str],  # of the memory of the agent; none without copies
        processes: int = 1,  # of this replica
    ) -> None:
        self._optimizers = optimizers
        self._make_state = make_state
        self._paths = paths
        self._processes = processes
        self._waiting: dict[str, Follower] = {}
        """Those that get copies, or nothing yet, by the id of the trainer."""
        self._copies: dict[str, CopySender] = {}
        self._sources: list[StateSource] = []
        self._is_slow = False
        """Whether training has waited for too long since the last `close`."""
        self._attempts = 0
        """How often some have begun to follow since then."""

    @property
    def instances(self) -> set[str]:
        """The ids of their trainers."""
        return {*self._waiting}.union(*(source.instances for source in self._sources))

    def add(self, follower: Follower, *, gets_copies: bool) -> None:
        """Use a new connection, in place of an earlier one."""
        if (copies := self._copies.pop(follower.instance, None)) is not None:
            copies.stop()
        if (before := self._waiting.pop(follower.instance, None)) is not None:
            before.connection.close()
        self._waiting[follower.instance] = follower
        if gets_copies and self._paths:
            self._copies[follower.instance] = CopySender(follower, self._paths)

    def wait_for_copies(self) -> None:
        """Wait until gradients may change, after a step."""
        for source in self._sources:
            source.wait_for_copy()

    def send_to_all(self) -> None:
        """Send the state to all, and then gradients, unless that has taken too long in this generation."""
        self._is_slow = self._is_slow or any(source.is_slow for source in self._sources)
        for source in [each for each in self._sources if each.problem]:
            self._sources.remove(source)
            source.close()
        if self._waiting and not self._is_slow and self._attempts < MAX_ATTEMPTS:
            self._attempts += 1
            self.send_pieces(self._waiting)

    def copied(self) -> None:
        """Send the new copy in the memory of the agent."""
        for copies in self._copies.values():
            copies.news.set()

    def send_pieces(self, instances: Collection[str]) -> bool:
        """Send the state to these, if they get no pieces yet, and return whether some begin to get them."""
        connections = {}
        for instance in self._waiting.keys() & {*instances}:
            follower, copies = self._waiting.pop(instance), self._copies.pop(instance, None)
            if copies is None or copies.stop():
                connections[instance] = follower.connection
            else:
                follower.connection.close()
        if connections:
            source = StateSource(self._optimizers, self._make_state, connections, self._processes)
            self._sources.append(source)
            return not source.problem
        return False

    def have_all(self, instances: Collection[str]) -> bool:
        """Whether these need only a rest between two steps, or have to wait for the whole state."""
        return all(each.lacks_only_steps for each in self._sources if each.instances & {*instances})

    def finish(self, instances: Collection[str], check: Callable[[], None]) -> None:
        """Send nothing any more, after what was handed over. `check` may raise an error.

        `instances` join, and wait for what they have not got.
        """
        waiting = {*instances}.difference(*(each.instances for each in self._sources if not each.problem))
        try:
            for source in self._sources:
                if source.instances & {*instances}:
                    source.flush(check)
                if source.problem and source.instances & waiting:
                    print(f"adascale: replicas that join wait for the state: {source.problem}", flush=True)
        finally:
            self.close()

    def close(self) -> None:
        """Send nothing any more."""
        for source in self._sources:
            source.close()
        for copies in self._copies.values():
            copies.stop()
        for follower in self._waiting.values():
            follower.connection.close()
        self._sources, self._copies, self._waiting = [], {}, {}
        self._is_slow, self._attempts = False, 0


class StateFollower:
    """Receives what `Followers` of another replica send: copies, or pieces, with which it makes its steps."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        make_state: Callable[[], Tree],
        copies: SnapshotPlaces | None,  # of the agent
    ) -> None:
        self._optimizers = optimizers
        self._parameters = _parameters_of(optimizers)
        self._make_state = make_state
        self._copies = copies
        self.count = 0
        """Parameters that this replica has received, the first ones."""
        self.has_changed = False
        """Whether the program may have something of the other replica."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.heard_at: float | None = None
        """When something was received last."""
        self.lack = ""
        """How much memory is missing for copies."""

    @property
    def has_all(self) -> bool:
        """Whether all parameters were received, with what the optimizers keep for them."""
        return self.count == len(self._parameters) > 0

    def follow(self, connection: socket.socket, check: Callable[[], None]) -> None:
        """Receive until nothing more is sent. `check` is called again and again, and may raise an error."""
        connection.settimeout(POLL)
        try:
            while not self.lack:
                self._handle(self._receive(connection, check), connection, check)
        except OSError:
            pass  # The other one says why, if it can.
        except (RuntimeError, ValueError, LookupError, TypeError, AdaScaleError) as error:
            print(
                f"adascale: the state cannot be received during the steps of the others: {error}", flush=True
            )
        finally:
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
            if self.has_changed and not self.has_all:
                self._forget()

    def _forget(self) -> None:
        """Delete what the optimizers keep: the whole state needs this memory."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _handle(self, message: Any, connection: socket.socket, check: Callable[[], None]) -> None:
        if "copy" in message:
            data, document, *state = message["copy"]
            self._keep_copy(connection, (state[0], state[1], state[2]), data + document, document, check)
        elif "groups" in message:
            self._step(**message)
        else:
            self._keep(**message)

    def _keep_copy(
        self,
        connection: socket.socket,
        state: CopyNumber,
        length: int,
        document_bytes: int,
        check: Callable[[], None],
    ) -> None:
        """Receive a copy in place of the older one. Without enough memory, none is kept."""
        places = self._copies

        def content() -> Iterator[memoryview]:
            memory, left = memoryview(bytearray(min(length, COPY_CHUNK))), length
            while left:
                part = memory[:left]
                self._read(connection, part, check)
                left -= part.nbytes
                yield part

        if places is None:
            self.lack = "its own agent keeps none"
        elif lack := places.lack_of_memory(length):
            places.release()
            self.lack = lack
        elif not places.write(state, content(), document_bytes):
            raise ConnectionError("the memory of the agent is in use")

    def _receive(self, connection: socket.socket, check: Callable[[], None]) -> Any:
        """Return a message, whose tensors are in the buffer."""
        length = bytearray(_LENGTH.size)
        self._read(connection, memoryview(length), check)
        spec = bytearray(*_LENGTH.unpack(length))
        self._read(connection, memoryview(spec), check)
        found = layouts(bytes(spec))
        size = data_bytes(found)
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._read(connection, self._buffer[:size].numpy().data, check)
        return unflatten(bytes(spec), divide(self._buffer, found))

    def _read(self, connection: socket.socket, memory: memoryview, check: Callable[[], None]) -> None:
        while memory.nbytes:
            check()
            with contextlib.suppress(TimeoutError):
                count = connection.recv_into(memory)
                if not count:
                    raise ConnectionResetError("the other end has closed the connection")
                self.heard_at = time.monotonic()
                memory = memory[count:]

    def _step(
        self,
        optimizer: int,
        groups: list[dict[str, Any]],
        values: list[tuple[int, dict[str, Any], Tensor | None]],  # by the number of the parameter
    ) -> None:
        """Make a step of an optimizer for some of the parameters that this replica has."""
        stepping = self._optimizers[optimizer]
        for group, settings in zip(stepping.param_groups, groups, strict=True):
            for name, value in settings.items():
                group[name] = _on_device_of(group[name], value) if name in group else value
        for number, kept, gradient in values:
            parameter = self._parameters[number]
            self._set_values(parameter, kept)
            parameter.tensor.grad = None if gradient is None else parameter.like(gradient)
        # Not `optimizer.step`, which schedulers count, and without the hooks of the program.
        step: Any = type(stepping).step
        (step.__wrapped__ if hasattr(step, "hooked") else step)(stepping)
        for number, *_ in values:
            self._parameters[number].tensor.grad = None

    @torch.no_grad()
    def _keep(
        self, parameters: list[tuple[Tensor, dict[str, Any]]], others: list[tuple[str, int, Tensor]]
    ) -> None:
        """Keep what follows the steps from now on."""
        if not self.has_changed:
            self.has_changed = True
            self._forget()
            for parameter in self._parameters:
                parameter.tensor.grad = None
            if self._copies is not None:
                self._copies.release()
        for value, kept in parameters:
            parameter = self._parameters[self.count]
            parameter.own.copy_(value)
            self._set_values(parameter, kept)
            self.count += 1
        own = named_tensors(self._make_state(), SMALL) if others else {}
        for name, start, value in others:
            part = own.get(name, value[:0]).reshape(-1)[start : start + len(value)]
            if layout_of(part) == layout_of(value):
                part.copy_(value)

    def _set_values(self, parameter: _Parameter, kept: dict[str, Any]) -> None:
        counts_on_device = parameter.group.get("capturable") or parameter.group.get("fused")
        state = parameter.optimizer.state[parameter.tensor]
        for name, value in kept.items():
            before = state.get(name)
            if isinstance(before, Tensor) and isinstance(value, Tensor):
                local_shard(before).copy_(value)
            elif isinstance(value, Tensor):
                # As torch decides when it loads a state.
                is_beside = name != "step" or counts_on_device
                state[name] = parameter.like(value.clone()) if is_beside else value.clone()
            else:
                state[name] = value


def _other_tensors(state: Tree, own: Iterable[_Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Yield the large tensors of a state by name, without those that follow the steps of an optimizer."""
    followed = {_address(each) for each in _all_large(own)}
    for name, tensor in named_tensors(state, SMALL).items():
        if _address(tensor) not in followed:
            yield name, tensor


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _is_large(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def _address(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


def _on_device_of(before: Any, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(before.device if isinstance(before, Tensor) else value.device, copy=True)
