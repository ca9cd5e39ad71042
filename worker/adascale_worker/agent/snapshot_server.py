"""Sends the copies of the state in the memory of this agent to the agents of replicas that wait."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from adascale_worker.agent.snapshot_channel import CHUNK_BYTES, SnapshotChannel, SnapshotChannelError
from adascale_worker.process.listener import listen
from adascale_worker.process.package_version import package_version
from adascale_worker.process.snapshot_place import (
    Condition,
    SnapshotPlace,
    StateNumber,
    newest,
    parse_document,
    state_number,
)

TIMEOUT: Final = 5.0
"""Seconds that the other end has to authenticate itself, and to receive a part of a copy."""
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
        """The number of the state in a place, at the number of its copy."""
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
        """Send the newest copy if its state is later than `after`, and nobody else gets one."""
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

    It is copied first, since what a connection refers to can change until the other end has it.
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
