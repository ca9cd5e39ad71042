"""Keeps a copy of the state of the only replica in the memory of this agent, while its own trainer waits.

If that replica is lost, with its agent or its node, the trainer of this agent continues from the copy.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from adascale_core.messages.allocation import Member
from adascale_worker.agent.snapshot_channel import SnapshotChannel, SnapshotChannelError
from adascale_worker.process.available_memory import unused_memory
from adascale_worker.process.snapshot_place import (
    Condition,
    SnapshotPlace,
    StateNumber,
    lack_of_memory,
    newest,
    parse_document,
    state_number,
)

SHARE: Final = 0.1
"""The largest share of the time in which copies are transferred. Training goes on meanwhile."""
POLL: Final = 0.1
"""Seconds between two requests, at least."""
CONNECT_TIMEOUT: Final = 1.0
"""Seconds for one connection."""
TIMEOUT: Final = 5.0
"""Seconds in which nothing arrives after which a connection is given up."""
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
        """Connections that have failed, before the first one that has not."""
        self._is_known = False
        """Whether a connection has not failed."""
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
