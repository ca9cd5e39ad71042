"""Sends the copies of the state in the memory of this agent to other agents, and gets theirs.

An agent whose trainer waits gets those of the only replica that trains. If that replica is lost, with its
agent or its node, the waiting trainer continues from the copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from adascale_core.messages.allocation import Member
from adascale_worker.process.environment import listen, package_version
from adascale_worker.process.resource_limits import unused_memory
from adascale_worker.process.snapshot_place import (
    Condition,
    SnapshotPlace,
    StateNumber,
    lack_of_memory,
    newest,
    parse_document,
    state_number,
)

CHUNK_BYTES: Final = 1 << 20
"""Length of the parts in which a copy is read, sent and received."""
_MAX_LINE: Final = 4096


class SnapshotChannelError(OSError):
    """The other end is no agent of this job and version, or it has closed the connection."""


class SnapshotChannel:
    """One end of a connection over which one agent sends copies to another. It is not encrypted."""

    # Both ends authenticate each other by the secret of the job's members, and need the same version of this
    # package. Then the receiver requests a copy of a later state than it has, again and again:
    #
    #   server     {"challenge": ...}
    #   receiver   {"challenge": ..., "mac": ...}
    #   server     {"mac": ...}
    #   receiver   {"after": the number of its latest state, or null}
    #   server     {"bytes": ..., "document": ...}, and so many bytes: the tensors, then the document. 0 if
    #              the receiver has the latest state already
    #
    # A receiver that does not get all bytes has no copy.

    def __init__(self, connection: socket.socket, key: str) -> None:
        if not key:
            raise SnapshotChannelError("the secret of the job is not known yet")
        self._connection = connection
        self._key = key.encode()
        self._received = b""

    def accept(self) -> None:
        """Authenticate both ends, as the server."""
        challenge = secrets.token_hex(16)
        self._send(challenge=challenge)
        answer = self._receive()
        self._require(answer, "receiver", challenge)
        self._send(mac=self._mac("server", str(answer.get("challenge"))))

    def connect(self) -> None:
        """Authenticate both ends, as the receiver."""
        challenge, question = secrets.token_hex(16), self._receive()
        self._send(challenge=challenge, mac=self._mac("receiver", str(question.get("challenge"))))
        self._require(self._receive(), "server", challenge)

    def request(self, after: StateNumber | None) -> tuple[int, int]:
        """Request the copy of a later state, and return its bytes and those of its document; 0 if none."""
        self._send(after=after)
        answer = self._receive()
        length, document_bytes = _count(answer.get("bytes")), _count(answer.get("document", 0))
        if document_bytes > length:
            raise SnapshotChannelError("the answer to a request is invalid")
        return length, document_bytes

    def receive_request(self) -> StateNumber | None:
        """Wait for a request, and return the number of the latest state of the receiver; None if none."""
        after = self._receive().get("after")
        if after is None:
            return None
        if not isinstance(after, list) or len(after) != 3:
            raise SnapshotChannelError("a request is invalid")
        incarnation, generation, step = map(_count, after)
        return incarnation, generation, step

    def announce(self, length: int, document_bytes: int) -> None:
        """Answer a request."""
        self._send(bytes=length, document=document_bytes)

    def send_content(self, content: memoryview) -> None:
        """Send a part of a copy."""
        self._connection.sendall(content)

    def receive_content(self, length: int) -> Iterator[memoryview]:
        """Return so many bytes of a copy, in parts."""
        while length:
            part = self._received[:length] or self._connection.recv(min(length, CHUNK_BYTES))
            self._received = self._received[len(part) :]
            if not part:
                raise SnapshotChannelError("the connection was closed")
            length -= len(part)
            yield memoryview(part)

    def _send(self, **message: object) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            part = self._connection.recv(_MAX_LINE)
            if not part or len(self._received) > _MAX_LINE:
                raise SnapshotChannelError("the connection was closed" if not part else "a line is too long")
            self._received += part
        line, self._received = self._received.split(b"\n", 1)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise SnapshotChannelError("a line is not a JSON object")
        return message

    def _require(self, message: dict[str, Any], role: str, challenge: str) -> None:
        if not hmac.compare_digest(str(message.get("mac")).encode(), self._mac(role, challenge).encode()):
            raise SnapshotChannelError(
                "the other end does not know the secret of the job, or has another version of this package"
            )

    def _mac(self, role: str, challenge: str) -> str:
        # The name keeps these values apart from those by which trainers authenticate each other.
        text = f"snapshot-{role}|{challenge}|{package_version()}"
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise SnapshotChannelError(f"a message has {value!r} where a count is required")
    return value


IDLE_TIMEOUT: Final = 900.0
"""Seconds without a request after which a connection is closed."""
MAX_CONNECTIONS: Final = 32


class SnapshotServer:
    """Answers requests for copies, in threads of its own. The trainer does not notice it."""

    def __init__(self, paths: Sequence[str], address: str, key: Callable[[], str]) -> None:
        self._places = [SnapshotPlace(path) for path in paths]
        self._key = key
        self._sending = threading.Lock()
        """Held while a copy is sent: the trainer needs the other place."""
        self._known: tuple[SnapshotPlace, int, StateNumber] | None = None
        """A place, the number of its copy, and the number of the state in that copy."""
        self._connections = threading.Semaphore(MAX_CONNECTIONS)
        self._listener = listen(address)
        self._listener.setblocking(True)
        self.port: int = self._listener.getsockname()[1]
        """Where it listens."""
        threading.Thread(target=self._accept, name="adascale-snapshots", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                if not self._connections.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(
                    target=self._serve, args=[connection], name="adascale-snapshot", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(TIMEOUT)
                channel = SnapshotChannel(connection, self._key())
                channel.accept()
                while True:
                    connection.settimeout(IDLE_TIMEOUT)
                    after = channel.receive_request()
                    connection.settimeout(TIMEOUT)
                    self._answer(channel, after)
        finally:
            self._connections.release()

    def _answer(self, channel: SnapshotChannel, after: StateNumber | None) -> None:
        """Send the newest copy if its state is later than `after` and no other connection gets a copy now."""
        if not self._sending.acquire(blocking=False):
            channel.announce(0, 0)
            return
        try:
            place = newest(self._places)
            number = place.number
            with place.locked(exclusively=False) as is_complete:
                found = self._state_number(place, number) if is_complete else None
                if found is None or (after is not None and found <= after):
                    channel.announce(0, 0)
                else:
                    _send(channel, place)
        finally:
            self._sending.release()

    def _state_number(self, place: SnapshotPlace, number: int) -> StateNumber | None:
        """Return the number of the state in a locked place; None if it is not usable, or was replaced."""
        if place.condition is not Condition.VALID or place.number != number:
            return None
        if self._known is None or self._known[:2] != (place, number):
            described, _ = parse_document(place.read_document())
            if described["version"] != package_version():
                return None
            self._known = place, number, state_number(described["info"])
        return self._known[2]


def _send(channel: SnapshotChannel, place: SnapshotPlace) -> None:
    """Send the copy in a locked place.

    Each part is copied first, because the place may be written again before the other end has received it.
    """
    length, document_bytes = sum(place.lengths), place.lengths[1]
    channel.announce(length, document_bytes)
    memory, position = memoryview(bytearray(min(length, CHUNK_BYTES))), 0
    while position < length:
        count = place.read_into(memory[: length - position], position)
        if not count:
            raise SnapshotChannelError("the copy was deleted")
        channel.send_content(memory[:count])
        position += count


SHARE: Final = 0.1
"""The largest share of the time in which copies are transferred. Training goes on meanwhile."""
POLL: Final = 0.1
"""Minimum seconds between two requests."""
CONNECT_TIMEOUT: Final = 1.0
"""Seconds for one connection."""
TIMEOUT: Final = 5.0
"""Seconds without a byte after which a connection is given up."""
RECONNECT: Final = 1.0
"""Seconds between two connections."""
FAILURES: Final = 10
"""Connections that fail before this is reported."""
MEMORY_PAUSE: Final = 60.0
"""Seconds until memory is looked for again after a lack of it."""


class _MemoryLackError(Exception):
    """There is not enough memory for copies."""


class SnapshotReceiver:
    """Copies the state of one member after another into the memory of this agent.

    Nothing is written after `stop`, or after `finish` has returned True, so the trainer can use the copy.
    """

    def __init__(
        self,
        paths: Sequence[str],
        key: Callable[[], str],
        on_change: Callable[[], None],
        available: Callable[[], float] = unused_memory,
    ) -> None:
        self._places = [SnapshotPlace(path) for path in paths]
        self._key = key
        self._on_change = on_change
        self._available = available
        self._transfers: _Transfers | None = None

    def follow(self, source: Member | None) -> None:
        """Copy the state of this member from now on; None to stop."""
        if self._transfers is not None and self._transfers.source == source:
            return
        self.stop()
        if source is not None:
            self._transfers = _Transfers(source, self._places, self._key, self._on_change, self._available)

    def finish(self) -> bool:
        """Copy the latest state of the last member if its agent remains, and return whether that has ended.

        Does not wait. An agent that is gone is given up after `TIMEOUT` seconds without a byte.
        """
        if self._transfers is None:
            return True
        self._transfers.finish()
        return self._transfers.has_ended

    def stop(self) -> None:
        """Stop at once. A copy that is not complete is given up."""
        if self._transfers is not None:
            self._transfers.stop()
            self._transfers = None

    def release(self) -> None:
        """Stop, and return the memory to the system."""
        self.stop()
        for place in self._places:
            with place.locked(exclusively=True) as is_free:
                if is_free and place.used:
                    place.release()


class _Transfers:
    """The transfers from one member, in a thread."""

    def __init__(
        self,
        source: Member,
        places: Sequence[SnapshotPlace],
        key: Callable[[], str],
        on_change: Callable[[], None],
        available: Callable[[], float],
    ) -> None:
        self.source = source
        self.has_ended = False
        """Whether nothing is copied any more."""
        self._places = places
        self._key = key
        self._on_change = on_change
        self._available = available
        self._last = threading.Event()
        """Set when the next transfer is the last one."""
        self._stopped = False
        self._writing = threading.Lock()
        """Held while a copy is received."""
        self._connection: socket.socket | None = None
        self._failures = 0
        """Number of connections that have failed before one succeeded."""
        self._is_known = False
        """Whether a connection has succeeded."""
        self._has_reported = False
        threading.Thread(target=self._run, name="adascale-snapshots", daemon=True).start()

    def finish(self) -> None:
        """Make one more transfer without a pause, which is the last one."""
        self._last.set()

    def stop(self) -> None:
        """Give up the present transfer, if any. Nothing is written afterwards."""
        self._stopped = True
        self._last.set()
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._writing:
            pass

    def _run(self) -> None:
        try:
            while not self._stopped:
                is_last, has_timed_out, pause = self._last.is_set(), False, RECONNECT
                try:
                    self._transfer_until_last()
                    break
                except OSError as error:
                    has_timed_out = isinstance(error, TimeoutError)
                    self._failures += 1
                    if self._failures == FAILURES and not self._is_known:
                        self._report(error.strerror or str(error))
                except _MemoryLackError as lack:
                    pause = MEMORY_PAUSE
                    self._report(str(lack))
                if is_last or (self._last.is_set() and has_timed_out):
                    break
                self._last.wait(pause)
        finally:
            self.has_ended = True
            self._on_change()

    def _transfer_until_last(self) -> None:
        """Connect, and copy the state again and again, until the last time."""
        address = self.source.address, self.source.snapshot_port
        with socket.create_connection(address, CONNECT_TIMEOUT) as connection:
            connection.settimeout(TIMEOUT)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = connection
            channel = SnapshotChannel(connection, self._key())
            channel.connect()
            while not self._stopped:
                is_last, begun = self._last.is_set(), time.monotonic()
                self._transfer(channel)
                self._is_known = True
                if is_last:
                    return
                seconds = time.monotonic() - begun
                self._last.wait(max(POLL, seconds / SHARE - seconds))

    def _transfer(self, channel: SnapshotChannel) -> None:
        """Copy the state once, in place of the older copy, if there is a later one.

        Without enough memory, the earlier copies are deleted, unless the trainer needs them now.
        """
        length, document_bytes = channel.request(self._latest())
        if not length:
            return
        with self._writing:
            if self._stopped:
                return
            if lack := lack_of_memory(self._places, length, self._available()):
                if not self._last.is_set():
                    for place in self._places:
                        place.release()
                # What was announced is on the connection, which ends with this.
                raise _MemoryLackError(lack)
            place = min(self._places, key=lambda place: place.number)
            with place.locked(exclusively=True) as is_free:
                if not is_free:
                    raise SnapshotChannelError("the memory of this agent is in use")
                number = newest(self._places).number + 1
                place.write(number, channel.receive_content(length), document_bytes)

    def _latest(self) -> StateNumber | None:
        """Return the number of the latest state in the memory of this agent; None if there is none."""
        place = newest(self._places)
        if place.condition is Condition.INVALID:
            return None
        described, _ = parse_document(place.read_document())
        return state_number(described["info"])

    def _report(self, reason: str) -> None:
        """Report why no copies are kept, once."""
        if not self._has_reported:
            self._has_reported = True
            print(
                f"adascale-agent: no copies of the state of replica {self.source.replica} are kept: "
                f"{reason}. If it is lost, training continues from the last checkpoint",
                flush=True,
            )
