"""The connections of a trainer: with its agent, and with the other members, whose loss they show.

The members connect to the member of rank 0. A connection that is closed without `leave`, or silence for the
peer timeout, means that the member at its other end is lost. Both ends authenticate each other by a secret of
the job, and need the same version of this package. Then each line is a JSON object of what is new:

- `arrived`: the member has left its previous generation, with this state. Rank 0 sends it too.
- `follow`: the member has no state, and listens on this port for that of rank 0, which still trains.
- `form`: from rank 0, when all have arrived: the port of the store, and the states of all members.
- `lost`: the generation cannot continue, and these replicas are lost.
- `leave`: the member closes the connection on purpose.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from adascale_core.messages.channel import (
    AgentMessage,
    Assignment,
    Limited,
    Terminate,
    TrainerMessage,
    agent_message,
    encode,
)
from adascale_core.names import LIMIT_FILE_SUFFIX
from adascale_worker.process.environment import package_version

MIN_ARRIVAL_TIMEOUT: Final = 10.0
"""Seconds for a member to connect while a generation is formed; more if the peer timeout is long."""
RECONNECT_INTERVAL: Final = 0.02
"""Seconds between two attempts to connect to rank 0, which may get the assignment a little later."""
PATIENT_RECONNECT_INTERVAL: Final = 0.2
"""The same, after a second of attempts."""
BROKEN_RECONNECT_INTERVAL: Final = 1.0
"""The same, in a broken generation, whose members wait for the next one; at random from half of this on."""
MAX_LINE: Final = 1 << 20
"""Bytes of a message."""
MAX_HANDSHAKE_LINE: Final = 4096
"""Bytes of a message of a connection that is not authenticated."""
MAX_PENDING: Final = 256
"""Maximum number of connections that are not authenticated, in addition to one of each member."""


class AgentChannel:
    """Receives messages of the agent in a thread, and sends messages to it.

    Only the first process of a replica has a connection, and without an agent none. The others leave a limit
    of the batch size in a file beside that in which they find each other; the agent reads it at the end.
    """

    def __init__(self, channel: socket.socket | None, replica_store: str | None = None) -> None:
        self._socket = channel
        self._limit = None if replica_store is None else Path(f"{replica_store}{LIMIT_FILE_SUFFIX}")
        self._changed = threading.Event()
        self.is_closed = False
        """Whether the agent has closed the connection."""
        self._sending = threading.Lock()

    def start(self, handle: Callable[[AgentMessage], None]) -> None:
        """Start to call `handle` with each message, in a thread, and with `Terminate` when the agent is gone.

        The end of an agent ends its child process, which may be a shell that has started this one.
        """
        if self._socket is not None:
            arguments = self._socket, handle
            threading.Thread(
                target=self._receive, args=arguments, name="adascale-agent-channel", daemon=True
            ).start()

    def wait(self, timeout: float) -> None:
        """Wait for a message or a call of `notify` since the last `wait`, at most `timeout` seconds.

        Only one thread may wait.
        """
        self._changed.wait(timeout)
        self._changed.clear()

    def notify(self) -> None:
        """End `wait`, also a later one if none waits now."""
        self._changed.set()

    def send(self, message: TrainerMessage) -> None:
        """Send a message. Does nothing if that fails: this process ends if the agent is gone."""
        with self._sending, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(encode(message))
            elif self._limit is not None and isinstance(message, Limited):
                # Another process may write its own at the same time.
                draft = self._limit.with_name(f"{self._limit.name}-{os.getpid()}")
                draft.write_bytes(encode(message))
                draft.replace(self._limit)

    def _receive(self, channel: socket.socket, handle: Callable[[AgentMessage], None]) -> None:
        with contextlib.suppress(OSError), channel.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                if (message := agent_message(line)) is not None:
                    handle(message)
                    self.notify()
        self.is_closed = True
        handle(Terminate())
        self.notify()


StateNumber = tuple[int, int, int]
"""Which state a member has: the generation in which it was last equal on all members, the step, and the
samples consumed. A greater one is later."""


class PeersLostError(Exception):
    """The generation cannot continue, because members are lost or the members cannot communicate."""


@dataclass(frozen=True)
class Formation:
    """What all members know when they form the group of a generation."""

    store_port: int  # port of torch's store, at the address of rank 0
    # the state that each member has, in the order of ranks; None for a member without state
    states: tuple[StateNumber | None, ...]

    @classmethod
    def of(cls, store_port: int, states: Sequence[Sequence[int] | None]) -> Formation:
        """Return what was sent as JSON."""
        return cls(int(store_port), tuple(map(_state_number, states)))

    @property
    def sources(self) -> list[int]:
        """The ranks with the latest state, which the others get. Empty if no member has a state."""
        latest = max((state for state in self.states if state is not None), default=None)
        return [rank for rank, state in enumerate(self.states) if latest is not None and state == latest]


@dataclass
class _Link:
    """One connection."""

    connection: socket.socket
    challenge: str = ""
    rank: int | None = None
    """Rank of the member at the other end, once it is authenticated."""
    received: bytes = b""
    unsent: bytes = b""
    heard_at: float = field(default_factory=time.monotonic)
    """When something was received last; of a connection that is not authenticated, when it was made."""


class MembershipLinks:
    """The connections of this member in one generation."""

    def __init__(
        self,
        assignment: Assignment,
        listener: socket.socket,
        secret: str,
        peer_timeout: float,
        on_change: Callable[[MembershipLinks], None],
    ) -> None:
        self.assignment = assignment
        self.broken = False
        """Whether the generation cannot continue."""
        self.lost: frozenset[int] = frozenset()
        """Indices of the replicas that are lost."""
        self.formation: Formation | None = None
        """Set when all members have arrived."""
        self.refusal: str | None = None
        """Why this member was refused."""
        self._listener = listener
        self._secret = secret.encode()
        self._peer_timeout = peer_timeout
        self._on_change = on_change
        self._is_coordinator = assignment.rank == 0
        self._links: dict[int, _Link] = {}
        self._pending: list[_Link] = []
        self._departed: set[int] = set()
        self._arrived: dict[int, StateNumber | None] = {}
        self._waits_since: float | None = None
        """When this member has arrived, or has begun to wait for the state."""
        self.followers: dict[int, tuple[int, str]] = {}
        """On rank 0: the port and the challenge of each member that waits for the state, by rank."""
        self._news: dict[str, Any] = {}
        """All that this member has sent to the others."""
        self._closing = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._retry_at = 0.0
        self._began = time.monotonic()
        self._random = random.Random()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="adascale-links", daemon=True)
        self._thread.start()

    # -- called by other threads --------------------------------------------------------------------------

    def arrive(self, state: StateNumber | None) -> None:
        """Report to the others that this member has left its previous generation, and what state it has."""

        def command() -> None:
            self._waits_since = time.monotonic()
            self._arrived[self.assignment.rank] = state
            self._publish(arrived=state)

        self._submit(command)

    def follow(self, port: int) -> str:
        """Let rank 0 send its state to this port while it trains. Returns what it proves itself with."""
        challenge = secrets.token_hex(16)

        def command() -> None:
            self._waits_since = time.monotonic()
            self._publish(follow=[port, challenge])

        self._submit(command)
        return self._mac("state", challenge, self.assignment.rank, package_version())

    def connect_to_followers(self) -> list[socket.socket]:
        """On rank 0: return a connection to each member that waits for the state."""
        with contextlib.ExitStack() as opened:
            connections = []
            for rank, (port, challenge) in self.followers.items():
                address = self.assignment.members[rank].address
                connection = opened.enter_context(socket.create_connection((address, port), timeout=1.0))
                connection.sendall(self._mac("state", challenge, rank, package_version()).encode())
                connections.append(connection)
            opened.pop_all()
        return connections

    def has_arrived(self, rank: int) -> bool:
        """Whether a member has left its previous generation, as far as rank 0 and the member itself know."""
        return rank in self._arrived

    @property
    def all_arrived(self) -> bool:
        """Whether all members have arrived, as only rank 0 knows."""
        return self._is_coordinator and len(self._arrived) == len(self.assignment.members)

    def announce_store(self, port: int) -> None:
        """On rank 0: let all members form the group."""

        def command() -> None:
            # All members are connected, and the links of the next generation use the same listener.
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._listener)
            states = tuple(self._arrived[rank] for rank in range(len(self.assignment.members)))
            self.formation = Formation(port, states)
            self._publish(form=[port, states])

        self._submit(command)

    def break_up(self) -> None:
        """Let all members know that this member cannot continue in the generation."""
        self._submit(self._break)

    def close(self) -> None:
        """Send `leave` to the other members, and stop."""
        if os.getpid() == self._pid:
            self._submit(lambda: setattr(self, "_closing", True))

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"!")

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        interval = self._peer_timeout / 5
        last = time.monotonic()
        beat_at = last + interval
        if self._is_coordinator:
            self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        while True:
            now = time.monotonic()
            if now - last > self._peer_timeout / 2:
                # This process was suspended itself, so the silence of the others means nothing.
                for link in self._links.values():
                    link.heard_at = now
            last = now
            if now >= beat_at:
                beat_at = now + interval
                for link in self._links.values():
                    self._send(link)
            wake_at = beat_at
            if not self._is_coordinator and 0 not in self._links and not self._pending:
                self._connect(now)
                wake_at = min(wake_at, self._retry_at)
            for key, _ in self._selector.select(max(0.0, wake_at - now)):
                self._on_ready(key.data)
            while not self._commands.empty():
                self._commands.get()()
            if self._closing:
                self._end()
                return
            checked_at = time.monotonic()
            if checked_at - now <= self._peer_timeout / 2:
                # Otherwise this process was suspended while it waited, and messages may be unread.
                self._check_silence(checked_at)

    def _on_ready(self, data: Any) -> None:
        if data is None:
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(4096)
        elif data is self._listener:
            self._accept()
        elif isinstance(data, _Link):
            self._read(data)

    def _end(self) -> None:
        for link in [*self._links.values(), *self._pending]:
            if link.rank is not None:
                self._send(link, leave=True)
            link.connection.close()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _check_silence(self, now: float) -> None:
        for rank, link in list(self._links.items()):
            if now - link.heard_at > self._peer_timeout:
                self._drop(link)
                self._lose(rank)
        for link in list(self._pending):
            if self._is_coordinator and now - link.heard_at > self._peer_timeout:
                self._drop(link)
        since = self._waits_since
        if since is None or self.broken or self.formation is not None:
            return
        timeout = max(MIN_ARRIVAL_TIMEOUT, 2 * self._peer_timeout)
        if self._arrived.get(self.assignment.rank) is None:
            # A member without state waits longer, because no step is lost by that.
            timeout *= 6
        if now - since > timeout:
            others = range(1, len(self.assignment.members)) if self._is_coordinator else [0]
            missing = {self.assignment.members[rank].replica for rank in others if rank not in self._links}
            if missing:
                self._break(missing)

    # -- connections --------------------------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        if now < self._retry_at:
            return
        interval = RECONNECT_INTERVAL if now - self._began < 1.0 else PATIENT_RECONNECT_INTERVAL
        if self.broken:
            interval = BROKEN_RECONNECT_INTERVAL * self._random.uniform(0.5, 1.0)
        self._retry_at = now + interval
        coordinator = self.assignment.members[0]
        if 0 not in self._departed:
            with contextlib.suppress(OSError):
                self._add(socket.create_connection((coordinator.address, coordinator.port), timeout=1.0))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._pending) >= len(self.assignment.members) + MAX_PENDING:
            self._drop(self._pending[0])
        link = self._add(connection)
        link.challenge = secrets.token_hex(16)
        self._send(link, challenge=link.challenge)

    def _add(self, connection: socket.socket) -> _Link:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(connection)
        self._pending.append(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        return link

    def _drop(self, link: _Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.connection)
        link.connection.close()
        if link in self._pending:
            self._pending.remove(link)
        if link.rank is not None and self._links.get(link.rank) is link:
            del self._links[link.rank]

    def _read(self, link: _Link) -> None:
        if link not in self._pending and (link.rank is None or self._links.get(link.rank) is not link):
            return
        try:
            data = link.connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if link.rank is not None:
            link.heard_at = time.monotonic()
        link.received += data
        *lines, link.received = link.received.split(b"\n")
        try:
            for line in [*lines, link.received]:
                if len(line) > (MAX_HANDSHAKE_LINE if link.rank is None else MAX_LINE):
                    raise ValueError("a message is too long")
            for line in lines:
                self._handle(link, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            data = b""
        if not data:
            rank = link.rank
            self._drop(link)
            if rank is not None and rank not in self._departed:
                self._lose(rank)

    def _send(self, link: _Link, **message: Any) -> None:
        link.unsent += json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            # Messages are much smaller than the buffer of a socket. What remains is sent with the next one.
            sent = link.connection.send(link.unsent)
            link.unsent = link.unsent[sent:]

    # -- messages -----------------------------------------------------------------------------------------

    def _handle(self, link: _Link, message: dict[str, Any]) -> None:
        if link.rank is None:
            if self._is_coordinator:
                self._authenticate_member(link, message)
            else:
                self._authenticate_coordinator(link, message)
            return
        for kind, value in message.items():
            match kind:
                case "arrived":
                    self._arrived[link.rank] = _state_number(value)
                    self._on_change(self)
                case "follow":
                    self.followers[link.rank] = int(value[0]), str(value[1])
                case "form":
                    self.formation = Formation.of(*value)
                    self._on_change(self)
                case "lost":
                    self._break(map(int, value))
                case "leave":
                    self._departed.add(link.rank)
                    self._drop(link)
                    if self.formation is None:
                        # It has left for a newer generation, or ends.
                        self._break()

    def _authenticate_member(self, link: _Link, message: dict[str, Any]) -> None:
        rank = int(message["rank"])
        members = self.assignment.members
        is_member = (
            message["generation"] == self.assignment.generation
            and 0 < rank < len(members)
            and message["instance"] == members[rank].instance
            and hmac.compare_digest(
                str(message["mac"]), self._mac("member", link.challenge, rank, message["version"])
            )
        )
        if not is_member:
            # It is in another generation, and connects again when its agent has the assignment.
            self._drop(link)
            return
        if message["version"] != package_version():
            self._send(
                link,
                refused=f"this replica has version {message['version']} of adascale-operator, the other "
                f"members of the job have version {package_version()}: use the same image for all replicas",
            )
            self._drop(link)
            return
        self._send(link, mac=self._mac("coordinator", str(message["challenge"]), rank, package_version()))
        self._admit(link, rank)

    def _authenticate_coordinator(self, link: _Link, message: dict[str, Any]) -> None:
        rank = self.assignment.rank
        if "refused" in message:
            self.refusal = str(message["refused"])
            self._drop(link)
            self._break()
        elif "mac" in message:
            expected = self._mac("coordinator", link.challenge, rank, package_version())
            if not hmac.compare_digest(str(message["mac"]), expected):
                raise ValueError("the coordinator does not know the secret of the job")
            self._admit(link, 0)
        else:
            link.challenge = secrets.token_hex(16)
            self._send(
                link,
                generation=self.assignment.generation,
                rank=rank,
                instance=self.assignment.members[rank].instance,
                version=package_version(),
                challenge=link.challenge,
                mac=self._mac("member", str(message["challenge"]), rank, package_version()),
            )

    def _admit(self, link: _Link, rank: int) -> None:
        link.rank = rank
        link.heard_at = time.monotonic()
        self._pending.remove(link)
        self._links[rank] = link
        self._send(link, **self._news)

    def _publish(self, **news: Any) -> None:
        """Send what is new to the others, and to those that connect later."""
        self._news |= news
        for link in self._links.values():
            self._send(link, **news)
        self._on_change(self)

    def _mac(self, role: str, challenge: str, rank: int, its_version: str) -> str:
        text = f"{role}|{challenge}|{self.assignment.generation}|{rank}|{its_version}"
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    # -- losses -------------------------------------------------------------------------------------------

    def _lose(self, rank: int) -> None:
        self._break([self.assignment.members[rank].replica])

    def _break(self, lost: Iterable[int] = ()) -> None:
        news = frozenset(lost) - self.lost - {self.assignment.replica}
        if news or not self.broken:
            self.broken = True
            self.lost |= news
            self._publish(lost=sorted(self.lost))


def _state_number(numbers: Sequence[int] | None) -> StateNumber | None:
    """Return the number of a state, which was sent as a list."""
    if numbers is None:
        return None
    generation, step, consumed = map(int, numbers)
    return generation, step, consumed
