"""The copies of the state in the memory of an agent: of its own trainer, or of the only one that trains.

A trainer that is the only member writes them itself. While the trainer waits for a generation, the agent
gets the copies of the only member from its agent. If that replica is lost, with its agent or its node, the
waiting trainer continues from the copy. So there is one writer at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Self

from adascale_core.messages.allocation import ActiveAllocation, AllocationView, Member
from adascale_core.names import SNAPSHOT_FILE
from adascale_core.rendezvous.instruction import others_keep_state, snapshot_source
from adascale_worker.process.environment import listen, package_version
from adascale_worker.process.resource_limits import unused_memory
from adascale_worker.process.snapshot_place import Condition, SnapshotPlaces, StateNumber

CHUNK_BYTES: Final = 1 << 20
"""Length of the parts in which a copy is read, sent and received."""
TIMEOUT: Final = 5.0
"""Seconds without a byte after which a connection is given up."""
_MAX_LINE: Final = 4096


class SnapshotChannel:
    """One end of a connection over which one agent sends a copy to another. It is not encrypted."""

    # Both ends authenticate each other by the secret of the job's members, and need the same version of this
    # package:
    #
    #   server     {"challenge": ...}
    #   receiver   {"challenge": ..., "mac": ..., "after": the number of its latest state, or null}
    #   server     {"mac": ..., "copy": [bytes of the tensors, bytes of the document, number of the state]}
    #              and so many bytes; null if the receiver has the latest state already
    #
    # A receiver that does not get all bytes has no copy.

    def __init__(self, connection: socket.socket, key: str) -> None:
        if not key:
            raise ConnectionError("the secret of the job is not known yet")
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._key = key.encode()
        self._question = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def accept(self) -> StateNumber | None:
        """Authenticate the receiver, and return the number of its latest state; None if it has none."""
        challenge = secrets.token_hex(16)
        self._send(challenge=challenge)
        request = self._receive()
        self._require(request, "receiver", challenge)
        self._question = str(request.get("challenge"))
        return None if request["after"] is None else _number(request["after"])

    def answer(self, copy: tuple[int, int, StateNumber] | None) -> None:
        """Announce a copy, whose bytes follow; None if there is no later one."""
        self._send(mac=self._mac("server", self._question), copy=copy)

    def send_content(self, content: memoryview) -> None:
        """Send a part of a copy."""
        self._connection.sendall(content)

    def request(self, after: StateNumber | None) -> tuple[int, int, StateNumber] | None:
        """Return the bytes of the tensors and the document of a later copy, and its number; None if none."""
        challenge, question = secrets.token_hex(16), self._receive()
        mac = self._mac("receiver", str(question.get("challenge")))
        self._send(challenge=challenge, mac=mac, after=after)
        answer = self._receive()
        self._require(answer, "server", challenge)
        if answer["copy"] is None:
            return None
        data_bytes, document_bytes, number = answer["copy"]
        return data_bytes, document_bytes, _number(number)

    def receive_content(self, length: int) -> Iterator[memoryview]:
        """Return so many bytes of a copy, in parts."""
        while length:
            part = self._reader.read1(min(length, CHUNK_BYTES))
            if not part:
                raise ConnectionError("the connection was closed")
            length -= len(part)
            yield memoryview(part)

    def _send(self, **message: object) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any]:
        line = self._reader.readline(_MAX_LINE)
        try:
            message = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("the connection was closed" if not line else "a line is invalid")
        return message

    def _require(self, message: dict[str, Any], role: str, challenge: str) -> None:
        if not hmac.compare_digest(str(message.get("mac")).encode(), self._mac(role, challenge).encode()):
            raise ConnectionError(
                "the other end does not know the secret of the job, or has another version of this package"
            )

    def _mac(self, role: str, challenge: str) -> str:
        # The name keeps these values apart from those by which trainers authenticate each other.
        text = f"snapshot-{role}|{challenge}|{package_version()}"
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _number(value: Sequence[int]) -> StateNumber:
    incarnation, generation, step = value
    return incarnation, generation, step


SHARE: Final = 0.1
"""The largest share of the time in which copies are transferred. Training goes on meanwhile."""
POLL: Final = 0.1
"""Minimum seconds between two requests."""
CONNECT_TIMEOUT: Final = 1.0
"""Seconds for one connection."""
RECONNECT: Final = 1.0
"""Seconds until the next connection after one that has failed."""
FAILURES: Final = 10
"""Connections that fail one after the other before this is reported."""
MEMORY_PAUSE: Final = 60.0
"""Seconds until memory is looked for again after a lack of it."""


class SnapshotTransfers:
    """Copies the state of one member into the memory of this agent, again and again, in a thread.

    Nothing is written after `stop`, or after `finish` has returned True, so the trainer can use the copy.
    """

    def __init__(
        self,
        source: Member,
        places: SnapshotPlaces,
        key: Callable[[], str],
        on_change: Callable[[], None],  # called in the thread when nothing is copied any more
    ) -> None:
        self.source = source
        self._places = places
        self._key = key
        self._on_change = on_change
        self._has_ended = False
        self._last = threading.Event()
        """Set when the next transfer is the last one."""
        self._stopped = False
        self._writing = threading.Lock()
        """Held while a copy is received."""
        self._connection: socket.socket | None = None
        self._has_reported = False
        threading.Thread(target=self._run, name="adascale-snapshots", daemon=True).start()

    def finish(self) -> bool:
        """Copy the latest state if its agent remains, and return whether that has ended.

        Does not wait. An agent that is gone is given up after `TIMEOUT` seconds without a byte.
        """
        self._last.set()
        return self._has_ended

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
        failures = 0
        try:
            while not self._stopped:
                is_last, begun, has_timed_out = self._last.is_set(), time.monotonic(), False
                try:
                    lack = self._transfer()
                    seconds = time.monotonic() - begun
                    failures, pause = 0, max(POLL, seconds / SHARE - seconds)
                    if lack:
                        pause = MEMORY_PAUSE
                        self._report(lack)
                except OSError as error:
                    failures, pause = failures + 1, RECONNECT
                    has_timed_out = isinstance(error, TimeoutError)
                    if failures == FAILURES:
                        self._report(error.strerror or str(error))
                if is_last or (self._last.is_set() and has_timed_out):
                    break
                self._last.wait(pause)
        finally:
            self._has_ended = True
            self._on_change()

    def _transfer(self) -> str:
        """Copy the state once, in place of the older copy, if there is a later one.

        Without enough memory, the earlier copies are deleted, unless the trainer needs them now. Returns how
        much is missing then.
        """
        address = self.source.address, self.source.snapshot_port
        with socket.create_connection(address, CONNECT_TIMEOUT) as connection:
            self._connection = connection
            with SnapshotChannel(connection, self._key()) as channel:
                copy = channel.request(self._places.newest_place.state)
                with self._writing:
                    if copy is None or self._stopped:
                        return ""
                    data_bytes, document_bytes, state = copy
                    length = data_bytes + document_bytes
                    if lack := self._places.lack_of_memory(length):
                        if not self._last.is_set():
                            self._places.release()
                        return lack
                    if not self._places.write(state, channel.receive_content(length), document_bytes):
                        raise ConnectionError("the memory of this agent is in use")
        return ""

    def _report(self, reason: str) -> None:
        """Report why no copies are kept, once."""
        if not self._has_reported:
            self._has_reported = True
            print(
                f"adascale-agent: no copies of the state of replica {self.source.replica} are kept: "
                f"{reason}. If it is lost, training continues from the last checkpoint",
                flush=True,
            )


_COUNT = 2
"""Number of files: a copy replaces the older one of two."""
_MFD_NOEXEC_SEAL: Final = 0x8
"""Of linux/memfd.h, since Linux 6.3: the file can never be executed."""


def make_snapshot_files() -> str:
    """Make files without a name, in memory, and return their paths, separated by colons; empty on failure.

    This process keeps them open. Unlike files in /dev/shm, only the memory of the container limits them.
    """
    try:
        descriptors = [_make_file() for _ in range(_COUNT)]
    except (OSError, AttributeError) as error:
        print(
            f"adascale-agent: this system has no files in memory ({error}), so no copy of the state is "
            "kept: if the only replica is lost, training continues from the last checkpoint",
            flush=True,
        )
        return ""
    return ":".join(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors)


def _make_file() -> int:
    try:
        return os.memfd_create(SNAPSHOT_FILE, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        # An older kernel does not know the flag.
        return os.memfd_create(SNAPSHOT_FILE)


class Snapshots:
    """Keeps the copies, and exchanges them with the agents of other replicas."""

    def __init__(
        self,
        replica: int,
        address: str,
        key: Callable[[], str],  # returns the secret of the job's members; empty if it is not known yet
        on_change: Callable[[], None],  # called in a thread when `is_ready` may return another value
        available: Callable[[], float] = unused_memory,
    ) -> None:
        self._replica = replica
        self._key = key
        self._on_change = on_change
        self.files = make_snapshot_files()
        """The paths of the files with the copies, separated by colons; empty without files."""
        paths = self.files.split(":") if self.files else []
        self._places = SnapshotPlaces(paths, available)
        self.port = 0
        """The port at which the agents of other replicas get copies; 0 without copies."""
        self._transfers: SnapshotTransfers | None = None
        if paths:
            self._listener = listen(address)
            self._listener.setblocking(True)
            self.port = self._listener.getsockname()[1]
            self._sent = SnapshotPlaces(paths)  # with locks of their own
            threading.Thread(target=self._serve, name="adascale-snapshots", daemon=True).start()

    def follow(self, view: AllocationView) -> None:
        """Copy the state of the only member from now on, while the own trainer waits for a generation."""
        if not self.files or (view.active is not None and self._replica in view.active.indices):
            return
        if others_keep_state(view, self._replica):
            self._stop()
            self._places.release_unlocked()
            return
        source = snapshot_source(view, self._replica)
        if self._transfers is None or self._transfers.source != source:
            self._stop()
            if source is not None:
                self._transfers = SnapshotTransfers(source, self._places, self._key, self._on_change)

    def is_ready(self, active: ActiveAllocation) -> bool:
        """Whether the own trainer can be assigned to this generation: nothing is written from then on.

        If it is to continue alone, the agent of the member before may remain, and have a later copy.
        """
        if self._transfers is None:
            return True
        if len(active.members) == 1 and not active.has_state and not self._transfers.finish():
            return False
        self._stop()
        return True

    def _stop(self) -> None:
        if self._transfers is not None:
            self._transfers.stop()
            self._transfers = None

    # -- what other agents get ----------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer requests for copies, one after the other, because the trainer needs the other place."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # too many open files, for example
                time.sleep(RECONNECT)
                continue
            # What another process sends ends its connection only.
            with (
                contextlib.suppress(OSError, ValueError, TypeError, KeyError, EOFError),
                connection,
                SnapshotChannel(connection, self._key()) as channel,
            ):
                self._answer(channel, channel.accept())

    def _answer(self, channel: SnapshotChannel, after: StateNumber | None) -> None:
        """Send the newest copy if its state is later than `after`.

        Each part is copied first, because the place may be written again before the other end has received
        it.
        """
        place = self._sent.newest_place
        number = place.number
        with place.locked(exclusively=False) as is_complete:
            state, is_valid = place.state, place.condition is Condition.VALID and place.number == number
            if not (is_complete and is_valid and state is not None) or (after is not None and state <= after):
                channel.answer(None)
                return
            length = sum(place.lengths)
            channel.answer((*place.lengths, state))
            memory = memoryview(bytearray(min(length, CHUNK_BYTES)))
            for position in range(0, length, CHUNK_BYTES):
                part = memory[: length - position]
                place.read_into(part, position)
                channel.send_content(part)
