"""The connections of the server, and which of them are closed when they need too much.

Two things are limited: the connections themselves, and the bytes that their requests and unread answers have
in memory. Connections whose requests wait for an answer take half as much memory again as others.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
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

    @property
    def unread_size(self) -> int:
        """Bytes of answers that the client has not read."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


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
        self._clients = _Clients()
        self._waiting: set[Connection] = set()
        # By the time of insertion, so the first one is the oldest.
        self._incomplete: OrderedDict[Connection, float] = OrderedDict()
        self._unread: OrderedDict[Connection, float] = OrderedDict()
        self._head_sizes: OrderedDict[Connection, int] = OrderedDict()
        self._heads = 0
        self._bodies = 0
        self.closed = Counter(
            "adascale_connections_closed", "Connections closed because of a limit.", registry=None
        )

    def opened(self, connection: Connection) -> None:
        """Count a connection, and close others if there are too many."""
        self.expect_request(connection)
        self._close_surplus()

    def lost(self, connection: Connection) -> None:
        """Forget a connection."""
        self._clients.remove(connection)
        self.keep_head(connection, 0)
        self._incomplete.pop(connection, None)
        self._unread.pop(connection, None)
        self._waiting.discard(connection)

    def expect_request(self, connection: Connection) -> None:
        """Start the time of a request."""
        # Removed first: an entry keeps its place otherwise, and those behind it would be closed late.
        self._incomplete.pop(connection, None)
        self._incomplete[connection] = self._clock() + self._request_timeout
        self._clients.add(connection, is_incomplete=True)

    def request_complete(self, connection: Connection, *, waits: bool) -> None:
        """End the time of a request, which may have been answered before its end; else it `waits`."""
        self._incomplete.pop(connection, None)
        self._clients.add(connection, is_incomplete=False)
        if waits:
            self._waiting.add(connection)
            self._close_surplus()

    def response_complete(self, connection: Connection) -> None:
        """Regard a connection as idle, unless its request is incomplete."""
        if connection in self._waiting:
            self._waiting.remove(connection)
            self._clients.add(connection, is_incomplete=False)

    def keep_head(self, connection: Connection, size: int) -> None:
        """Count the bytes of the head that a connection keeps now, and make room for them."""
        self._heads += size - self._head_sizes.get(connection, 0)
        if size:
            self._head_sizes[connection] = size
            self._make_room()
        else:
            self._head_sizes.pop(connection, None)

    def body_grows(self, size: int) -> bool:
        """Count bytes of bodies, fewer if negative, and return whether there is room for them."""
        self._bodies += size
        return size <= 0 or self._make_room(bodies_grow=True)

    def unread(self, connection: Connection) -> None:
        """Start the time in which the client must read, and close connections if too much is unread."""
        self._unread[connection] = self._clock() + RESPONSE_TIMEOUT
        self._make_room()

    def read(self, connection: Connection) -> None:
        """End the time in which the client must read."""
        self._unread.pop(connection, None)

    async def close_overdue(self) -> None:
        """Close the connections whose time has passed."""
        now = self._clock()
        for connections in (self._incomplete, self._unread):
            while connections:
                connection, deadline = next(iter(connections.items()))
                if deadline > now:
                    break
                self._close(connection)

    def _close_surplus(self) -> None:
        while (
            len(self._clients) > self._max_open
            or len(self._clients) + len(self._waiting) // 2 > self._max_connections
        ):
            self._close(self._clients.first_to_close())

    def _make_room(self, *, bodies_grow: bool = False) -> bool:
        """Close connections until the data have no more than `MAX_DATA` bytes; False if bodies have most."""
        while self._unread or self._heads + self._bodies > MAX_DATA:
            unread = sum(each.unread_size for each in self._unread)
            if self._heads + self._bodies + unread <= MAX_DATA:
                return True
            if bodies_grow and self._bodies >= max(self._heads, unread):
                return False
            largest = self._head_sizes if self._heads >= unread else self._unread
            if not largest:
                return False
            self._close(next(iter(largest)))
        return True

    def _close(self, connection: Connection) -> None:
        self.lost(connection)
        self.closed.inc()
        connection.abort()


class _Clients:
    """The open connections by the address of their client."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        """The addresses that have a number of connections."""
        self._most = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, connection: Connection, *, is_incomplete: bool) -> None:
        """Note what a connection does, which may be new."""
        client = self._clients.setdefault(connection.address, _Client())
        before = len(client)
        client.add(connection, is_incomplete=is_incomplete)
        self._moved(connection.address, before, len(client))

    def remove(self, connection: Connection) -> None:
        """Forget a connection, which may be forgotten already."""
        client = self._clients.get(connection.address)
        if client is None:
            return
        before = len(client)
        client.remove(connection)
        self._moved(connection.address, before, len(client))
        if not len(client):
            del self._clients[connection.address]

    def first_to_close(self) -> Connection:
        """Return the connection to close first."""
        return self._clients[next(iter(self._by_count[self._most]))].first_to_close()

    def _moved(self, address: str, before: int, after: int) -> None:
        if before == after:
            return
        self._count += after - before
        if before:
            self._by_count[before].pop(address)
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, OrderedDict())[address] = None
        if after > before:
            self._most = max(self._most, after)
        elif before == self._most and before not in self._by_count:
            self._most = after


class _Client:
    """The connections of one address."""

    __slots__ = ("_incomplete", "_others")

    def __init__(self) -> None:
        # The first one has done nothing for longest.
        self._incomplete: OrderedDict[Connection, None] = OrderedDict()
        self._others: OrderedDict[Connection, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._incomplete) + len(self._others)

    def add(self, connection: Connection, *, is_incomplete: bool) -> None:
        """Note what a connection does; the connection that was noted last is closed last."""
        self.remove(connection)
        (self._incomplete if is_incomplete else self._others)[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection, which may be forgotten already."""
        self._incomplete.pop(connection, None)
        self._others.pop(connection, None)

    def first_to_close(self) -> Connection:
        """Return the connection to close first."""
        return next(iter(self._incomplete or self._others))
