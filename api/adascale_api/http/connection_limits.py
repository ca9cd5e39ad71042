"""The connections of the server, and which of them are closed when they need too much.

Two things are limited: the connections themselves, and the bytes that their requests and unread answers have
in memory. Connections whose requests wait for an answer take half as much memory again as others.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from operator import attrgetter
from typing import Protocol

from prometheus_client import Counter

MAX_CONNECTIONS = 24 * 1024
"""Connections, by default: as many as fit into 512 MiB, and more than 2,000 jobs of 4 replicas have."""
MAX_DATA = 32 * 1024 * 1024
"""Bytes of all these together: heads that are incomplete, or large and of requests that wait for an answer;
bodies that are not small, until their requests are answered; and answers that clients do not read."""
REQUEST_TIMEOUT = 15.0
"""Seconds for a request to arrive, by default."""
RESPONSE_TIMEOUT = 30.0
"""Seconds for which a client may leave a full answer unread."""


class Connection(Protocol):
    """A connection of the server."""

    @property
    def address(self) -> str:
        """The address of the client."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


@dataclass
class KeptData:
    """The bytes of a kind that connections keep in memory, the oldest first."""

    total: int = 0
    sizes: OrderedDict[Connection, int] = field(default_factory=OrderedDict)

    def note(self, connection: Connection, size: int) -> None:
        """Note the bytes that a connection keeps now."""
        self.total += size - self.sizes.get(connection, 0)
        if size:
            self.sizes[connection] = size
        else:
            self.sizes.pop(connection, None)


class ConnectionLimits:
    """The connections of a server, and which of them are closed, so that no client takes those of others.

    Beyond the maximum, the address with most connections loses the one whose request is incomplete, or else
    that is silent, for longest. Beyond `MAX_DATA`, the kind of data that has most loses its oldest.
    """

    def __init__(
        self,
        max_connections: int = MAX_CONNECTIONS,
        max_open: int | None = None,
        request_timeout: float = REQUEST_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_connections = max_connections  # one whose request waits counts one and a half times
        self._max_open = max_connections if max_open is None else max_open
        self._request_timeout = request_timeout
        self._clock = clock
        self._clients: defaultdict[str, _Client] = defaultdict(_Client)
        self._open = 0
        self._waiting: set[Connection] = set()
        # By the time of insertion, so the first one is the oldest.
        self._incomplete: OrderedDict[Connection, float] = OrderedDict()
        self._unread: OrderedDict[Connection, float] = OrderedDict()
        self.heads, self.bodies, self.answers = KeptData(), KeptData(), KeptData()
        self._kept = (self.heads, self.bodies, self.answers)
        self.closed = Counter(
            "adascale_connections_closed", "Connections closed because of a limit.", registry=None
        )

    def opened(self, connection: Connection) -> None:
        """Count a connection, and close others if there are too many."""
        self.expect_request(connection)
        self._close_surplus()

    def lost(self, connection: Connection) -> None:
        """Forget a connection."""
        self._forget(connection)
        for data in self._kept:
            data.note(connection, 0)
        self._incomplete.pop(connection, None)
        self._unread.pop(connection, None)
        self._waiting.discard(connection)

    def expect_request(self, connection: Connection) -> None:
        """Start the time of a request."""
        # Removed first: an entry keeps its place otherwise, and those behind it would be closed late.
        self._incomplete.pop(connection, None)
        self._incomplete[connection] = self._clock() + self._request_timeout
        self._note(connection, is_incomplete=True)

    def request_complete(self, connection: Connection, *, waits: bool) -> None:
        """End the time of a request, which may have been answered before its end; else it `waits`."""
        self._incomplete.pop(connection, None)
        self._note(connection, is_incomplete=False)
        if waits:
            self._waiting.add(connection)
            self._close_surplus()

    def response_complete(self, connection: Connection) -> None:
        """Regard a connection as idle, unless its request is incomplete."""
        if connection in self._waiting:
            self._waiting.remove(connection)
            self._note(connection, is_incomplete=False)

    def keep(self, data: KeptData, connection: Connection, size: int) -> None:
        """Count the bytes that a connection keeps now, and close connections if more do not have room."""
        before = data.sizes.get(connection, 0)
        if size == before:
            return
        data.note(connection, size)
        while size > before and sum(kept.total for kept in self._kept) > MAX_DATA:
            largest = max(self._kept, key=attrgetter("total"))
            self._close(next(iter(largest.sizes)))

    def unread(self, connection: Connection, size: int) -> None:
        """Start the time in which the client must read, and close connections if too much is unread."""
        self._unread[connection] = self._clock() + RESPONSE_TIMEOUT
        self.keep(self.answers, connection, size)

    def read(self, connection: Connection) -> None:
        """End the time in which the client must read."""
        self._unread.pop(connection, None)
        self.keep(self.answers, connection, 0)

    async def close_overdue(self) -> None:
        """Close the connections whose time has passed."""
        now = self._clock()
        for connections in (self._incomplete, self._unread):
            while connections:
                connection, deadline = next(iter(connections.items()))
                if deadline > now:
                    break
                self._close(connection)

    def _exceeds(self, spared: int = 0) -> bool:
        """Whether more connections are open than allowed, less those that are `spared`."""
        counted = self._open + len(self._waiting) // 2
        return self._open > self._max_open - spared or counted > self._max_connections - spared

    def _close_surplus(self) -> None:
        if not self._exceeds():
            return
        # The search for the largest takes time, so it makes room for many connections.
        spared = self._max_connections // 100
        clients = [(-len(client), number, client) for number, client in enumerate(self._clients.values())]
        heapify(clients)
        while self._exceeds(spared):
            _, number, client = clients[0]
            self._close(next(iter(client.incomplete or client.others)))
            heapreplace(clients, (-len(client), number, client))

    def _close(self, connection: Connection) -> None:
        self.lost(connection)
        self.closed.inc()
        connection.abort()

    def _note(self, connection: Connection, *, is_incomplete: bool) -> None:
        """Note what a connection does, which may be new; it becomes the last of its client to be closed."""
        client = self._clients[connection.address]
        self._open += 1 - client.forget(connection)
        (client.incomplete if is_incomplete else client.others)[connection] = None

    def _forget(self, connection: Connection) -> None:
        client = self._clients.get(connection.address)
        if client is None:
            return
        self._open -= client.forget(connection)
        if not len(client):
            del self._clients[connection.address]


class _Client:
    """The connections of one address, in the order in which they are closed."""

    __slots__ = ("incomplete", "others")

    def __init__(self) -> None:
        self.incomplete: OrderedDict[Connection, None] = OrderedDict()
        self.others: OrderedDict[Connection, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.incomplete) + len(self.others)

    def forget(self, connection: Connection) -> int:
        """Forget a connection, and return how many were forgotten: 0 if it was before."""
        before = len(self)
        self.incomplete.pop(connection, None)
        self.others.pop(connection, None)
        return before - len(self)
