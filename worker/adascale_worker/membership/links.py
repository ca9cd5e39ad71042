"""The connections of a trainer: with its agent, with the other members, whose loss they show, and with those
that wait and follow it meanwhile.

The members connect to the member of rank 0. A connection that is closed without `leave`, or silence for the
peer timeout, means that the member at its other end is lost. Both ends authenticate each other by a secret of
the job, and need the same version of this package. Then each line is a JSON object of what is new:

- `arrived`: the member has left its previous generation, with this state. Rank 0 sends it too.
- `form`: from rank 0, when all have arrived: the port of the store, and the states of all members.
- `lost`: the generation cannot continue, and these replicas are lost.
- `leave`: the member closes the connection on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import queue
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from adascale_core.messages.channel import (
    AgentMessage,
    Assignment,
    Follow,
    Limited,
    Terminate,
    TrainerMessage,
    agent_message,
    encode,
)
from adascale_core.names import LIMIT_FILE_SUFFIX
from adascale_worker.process.environment import listen, package_version
from adascale_worker.process.snapshot_place import CopyNumber

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
HANDSHAKE_TIMEOUT: Final = 3.0
"""Seconds for a replica that waits and the member that it follows to authenticate each other."""
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


class _Link:
    """One connection, over which both ends send lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._received = b""
        self._unsent = b""
        self.heard_at = time.monotonic()
        """When something was received last."""
        self.task = asyncio.current_task()
        """What reads the connection, and closes it at its end."""

    def send(self, **message: Any) -> None:
        """Send a message. Does not wait."""
        self._unsent += json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            # Messages are much smaller than the buffer of a socket. What remains is sent with the next one.
            sent = self._connection.send(self._unsent)
            self._unsent = self._unsent[sent:]

    async def receive(self, limit: int) -> dict[str, Any]:
        """Return the next message, of at most so many bytes."""
        while b"\n" not in self._received and len(self._received) <= limit:
            data = await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16)
            if not data:
                raise ConnectionResetError("the other end has closed the connection")
            self.heard_at = time.monotonic()
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        if len(line) > limit:
            raise ValueError("a message is too long")
        message: dict[str, Any] = json.loads(line)
        return message


@dataclass(frozen=True)
class Follower:
    """A replica that waits, and gets the state meanwhile."""

    instance: str  # its trainer
    connection: socket.socket
    copied: CopyNumber | None  # of the latest copy in the memory of its agent


class FollowerServer:
    """Accepts the connections of replicas that wait, in a thread.

    Both ends prove that they know the secret of the job, and have the same version of this package. What
    follows is not encrypted.
    """

    def __init__(self, address: str) -> None:
        self._listener = listen(address)
        self.port: int = self._listener.getsockname()[1]
        self.ports = [self.port]
        """Those of all processes of this replica, each of which sends its part of the state."""
        self.secret = ""
        """Empty until this replica is a member."""
        self._found: queue.SimpleQueue[Follower] = queue.SimpleQueue()
        self._pending: list[asyncio.Task[None]] = []
        threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="adascale-followers", daemon=True
        ).start()

    def take(self) -> Iterator[Follower]:
        """Yield those that have connected since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._found.get_nowait()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # too many open files, for example
                await asyncio.sleep(PATIENT_RECONNECT_INTERVAL)
                continue
            self._pending = [each for each in self._pending if not each.done()]
            if len(self._pending) >= MAX_PENDING:
                self._pending.pop(0).cancel()
            self._pending.append(loop.create_task(self._admit(connection)))

    async def _admit(self, connection: socket.socket) -> None:
        """Authenticate the other end. What another process sends ends its connection only."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                link, challenge = _Link(connection), secrets.token_hex(16)
                link.send(challenge=challenge)
                answer = await link.receive(MAX_HANDSHAKE_LINE)
                expected = _follower_mac(self.secret, "follower", challenge)
                if not self.secret or not hmac.compare_digest(str(answer["mac"]), expected):
                    raise ValueError("the other end does not know the secret, or has another version")
                copied = None if answer["copied"] is None else _state_number(answer["copied"])
                follower = Follower(str(answer["instance"]), connection, copied)
                mac = _follower_mac(self.secret, "source", str(answer["challenge"]))
                link.send(mac=mac, ports=self.ports)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            connection.close()
            return
        self._found.put(follower)


def connect_to(followed: Follow, copied: CopyNumber | None) -> tuple[socket.socket, list[int]]:
    """Return a connection over which a member sends its state, and the ports of all processes of its replica.

    Raises OSError if there is none.
    """
    source, secret = followed.source, followed.secret
    connection = socket.create_connection((source.address, source.state_port), timeout=1.0)
    try:
        connection.settimeout(HANDSHAKE_TIMEOUT)
        challenge, question = secrets.token_hex(16), _read_line(connection)
        mac = _follower_mac(secret, "follower", str(question.get("challenge")))
        answer = {"challenge": challenge, "mac": mac, "instance": followed.instance, "copied": copied}
        connection.sendall(json.dumps(answer).encode() + b"\n")
        expected, proof = _follower_mac(secret, "source", challenge), _read_line(connection)
        if not hmac.compare_digest(str(proof.get("mac")), expected):
            raise ConnectionError("the other end does not know the secret of the job, or has another version")
        return connection, list(map(int, proof["ports"]))
    except BaseException:
        connection.close()
        raise


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """Return a message, and read nothing of what follows it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_HANDSHAKE_LINE:
        if not (part := connection.recv(1)):
            break
        line += part
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ConnectionError("the connection was closed, or a line is invalid")
    return message


def _follower_mac(secret: str, role: str, challenge: str) -> str:
    # The role keeps these values apart from those by which members authenticate each other.
    return _mac(secret, role, challenge, package_version())


def _mac(secret: str, *parts: object) -> str:
    """Return what proves that its sender knows the secret of the job."""
    return hmac.new(secret.encode(), "|".join(map(str, parts)).encode(), hashlib.sha256).hexdigest()


class MembershipLinks:
    """The connections of this member in one generation, in a thread of their own."""

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
        self._secret = secret
        self._peer_timeout = peer_timeout
        self._on_change = on_change
        self._is_coordinator = assignment.rank == 0
        self._links: dict[int, _Link] = {}
        """Those that are authenticated, by the rank of the member at the other end."""
        self._pending: list[asyncio.Task[None]] = []
        """What authenticates the others, the oldest first."""
        self._departed: set[int] = set()
        self._arrived: dict[int, StateNumber | None] = {}
        self._waits_since: float | None = None
        """When this member has begun to wait for the others."""
        self._news: dict[str, Any] = {}
        """All that this member has sent to the others."""
        self._closing = asyncio.Event()
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="adascale-links", daemon=True)
        self._thread.start()

    # -- called by other threads --------------------------------------------------------------------------

    def arrive(self, state: StateNumber | None) -> None:
        """Report to the others that this member has left its previous generation, and what state it has."""
        self._submit(self._arrive, {"arrived": state})

    def begin_to_wait(self) -> None:
        """Take members for lost that do not connect in time from now on, before this one arrives."""
        if self._waits_since is None:
            self._waits_since = time.monotonic()

    def has_arrived(self, rank: int) -> bool:
        """Whether a member has left its previous generation, as far as rank 0 and the member itself know."""
        return rank in self._arrived

    @property
    def all_arrived(self) -> bool:
        """Whether all members have arrived, as only rank 0 knows."""
        return self._is_coordinator and len(self._arrived) == len(self.assignment.members)

    def announce_store(self, port: int) -> None:
        """On rank 0: let all members form the group."""
        states = [self._arrived[rank] for rank in range(len(self.assignment.members))]
        self._submit(self._publish, {"form": [port, states]})

    def break_up(self) -> None:
        """Let all members know that this member cannot continue in the generation."""
        self._submit(self._break)

    def close(self) -> None:
        """Send `leave` to the other members, and stop."""
        self._submit(self._closing.set)

    def _submit(self, command: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the thread, unless that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(command, *arguments)

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._communicate())

    async def _communicate(self) -> None:
        """Hold the connections until `close`. What still runs is cancelled afterwards."""
        descriptor = self._listener.fileno()  # It may be closed before the links are.
        others = [self._loop.create_task(self._watch())]
        if self._is_coordinator:
            self._loop.add_reader(self._listener, self._accept)
        else:
            others.append(self._loop.create_task(self._keep_connected()))
        await self._closing.wait()
        # A task that is cancelled before it has begun leaves its connection open, and the other end waits.
        self._loop.remove_reader(descriptor)
        await asyncio.sleep(0)
        for link in self._links.values():
            link.send(leave=True)

    async def _watch(self) -> None:
        """Let the others hear of this member again and again, and find those that are silent."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._peer_timeout / 5)
            now = time.monotonic()
            for link in self._links.values():
                link.send()
                if now - before > self._peer_timeout / 2:
                    # This process was suspended itself, so the silence of the others means nothing.
                    link.heard_at = now
                if now - link.heard_at > self._peer_timeout and link.task is not None:
                    link.task.cancel()
            self._check_arrivals(now)

    def _check_arrivals(self, now: float) -> None:
        """Take members for lost that do not connect while this one waits for them."""
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

    async def _keep_connected(self) -> None:
        """Connect to rank 0, and again when the connection has ended."""
        began, coordinator = time.monotonic(), self.assignment.members[0]
        while 0 not in self._departed:
            with contextlib.suppress(OSError):
                address = coordinator.address, coordinator.port
                connection = socket.create_connection(address, timeout=1.0)
                # A task of its own, which silence cancels.
                await asyncio.wait([self._loop.create_task(self._communicate_over(connection))])
            interval = RECONNECT_INTERVAL
            if self.broken:
                interval = BROKEN_RECONNECT_INTERVAL * random.uniform(0.5, 1.0)
            elif time.monotonic() - began > 1.0:
                interval = PATIENT_RECONNECT_INTERVAL
            await asyncio.sleep(interval)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._pending) >= len(self.assignment.members) + MAX_PENDING:
            self._pending.pop(0).cancel()
        self._pending.append(self._loop.create_task(self._communicate_over(connection)))

    async def _communicate_over(self, connection: socket.socket) -> None:
        """Authenticate the other end of a connection, and handle its messages until the connection ends."""
        rank, link = None, _Link(connection)
        try:
            with connection:
                rank = await self._authenticated_rank(link)
                while self._links.get(rank) is link and rank not in self._departed:
                    self._handle(rank, await link.receive(MAX_LINE))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # What another process sends ends its connection only.
        finally:
            if link.task in self._pending:
                self._pending.remove(link.task)
            if rank is not None and self._links.get(rank) is link:
                del self._links[rank]
                if not (rank in self._departed or self._closing.is_set()):
                    self._break([self.assignment.members[rank].replica])

    async def _authenticated_rank(self, link: _Link) -> int:
        """Return the rank of the member at the other end, once both have proven that they know the secret."""
        if self._is_coordinator:
            async with asyncio.timeout(self._peer_timeout):
                rank = await self._authenticate_member(link)
            if link.task in self._pending:
                self._pending.remove(link.task)
        else:
            # Rank 0 may answer late.
            await self._authenticate_coordinator(link)
            rank = 0
        link.heard_at = time.monotonic()
        self._links[rank] = link
        link.send(**self._news)
        return rank

    async def _authenticate_member(self, link: _Link) -> int:
        challenge = secrets.token_hex(16)
        link.send(challenge=challenge)
        message = await link.receive(MAX_HANDSHAKE_LINE)
        rank = int(message["rank"])
        members = self.assignment.members
        is_member = (
            message["generation"] == self.assignment.generation
            and 0 < rank < len(members)
            and message["instance"] == members[rank].instance
            and hmac.compare_digest(
                str(message["mac"]), self._mac("member", challenge, rank, message["version"])
            )
        )
        if not is_member:
            raise ValueError("it is in another generation, and connects again when it has the assignment")
        if message["version"] != package_version():
            link.send(
                refused=f"this replica has version {message['version']} of adascale-operator, the other "
                f"members of the job have version {package_version()}: use the same image for all replicas"
            )
            raise ValueError("it has another version")
        link.send(mac=self._mac("coordinator", str(message["challenge"]), rank, package_version()))
        return rank

    async def _authenticate_coordinator(self, link: _Link) -> None:
        rank, challenge = self.assignment.rank, secrets.token_hex(16)
        question = await link.receive(MAX_HANDSHAKE_LINE)
        link.send(
            generation=self.assignment.generation,
            rank=rank,
            instance=self.assignment.members[rank].instance,
            version=package_version(),
            challenge=challenge,
            mac=self._mac("member", str(question["challenge"]), rank, package_version()),
        )
        answer = await link.receive(MAX_HANDSHAKE_LINE)
        if "refused" in answer:
            self.refusal = str(answer["refused"])
            self._break()
        expected = self._mac("coordinator", challenge, rank, package_version())
        if not hmac.compare_digest(str(answer["mac"]), expected):
            raise ValueError("the coordinator does not know the secret of the job")

    def _mac(self, role: str, challenge: str, rank: int, its_version: str) -> str:
        return _mac(self._secret, role, challenge, self.assignment.generation, rank, its_version)

    # -- messages -----------------------------------------------------------------------------------------

    def _handle(self, rank: int, news: dict[str, Any]) -> None:
        """Handle what a member has sent to the others, which may be this one."""
        for kind, value in news.items():
            match kind:
                case "arrived":
                    self._arrived[rank] = _state_number(value)
                case "form":
                    # All members are connected, and the links of the next generation use the same listener.
                    self._loop.remove_reader(self._listener)
                    self.formation = Formation.of(*value)
                case "lost":
                    self._break(map(int, value))
                case "leave":
                    self._departed.add(rank)
                    if self.formation is None:
                        # It has left for a newer generation, or ends.
                        self._break()
        if news:
            self._on_change(self)

    def _arrive(self, news: dict[str, Any]) -> None:
        self._waits_since = time.monotonic()
        self._publish(news)

    def _publish(self, news: dict[str, Any]) -> None:
        """Send what is new to the others, and to those that connect later."""
        self._news |= news
        for link in self._links.values():
            link.send(**news)
        self._handle(self.assignment.rank, news)

    def _break(self, lost: Iterable[int] = ()) -> None:
        news = frozenset(lost) - self.lost - {self.assignment.replica}
        if news or not self.broken:
            self.broken = True
            self.lost |= news
            self._publish({"lost": sorted(self.lost)})


def _state_number(numbers: Sequence[int] | None) -> StateNumber | None:
    """Return the number of a state, which was sent as a list."""
    if numbers is None:
        return None
    generation, step, consumed = map(int, numbers)
    return generation, step, consumed
