"""The HTTP connections of the service, with limits that uvicorn does not have.

A connection is closed if its request is incomplete for too long, if the request line and headers are too
large, if a request follows before the answer to the one before, or if its client does not read the answer. At
the maximum number of connections, a new one replaces the one whose request has been incomplete longest, or
else the one that has been idle longest. Times are measured by one sweep per second rather than by a timer for
each request. What a request has sent is released with its answer, as an idle connection may stay open for
long.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

REQUEST_TIMEOUT = 15.0
"""Seconds for a request to arrive, by default."""
RESPONSE_TIMEOUT = 30.0
"""Seconds for which a client may leave a full answer unread."""
MAX_HEAD = 32 * 1024
"""Bytes of a request line with its headers, with `HEADER_OVERHEAD` for each; a token may have 16 KiB."""
SMALL_HEAD = 8 * 1024
"""Bytes of a request line with its headers that are not counted once they are complete."""
MAX_HEADS = 32 * 1024 * 1024
"""Bytes of the request lines and headers of all connections that are incomplete, or larger than `SMALL_HEAD`
and not answered yet."""
HEADER_OVERHEAD = 200
"""Bytes that a header takes besides its text."""
METHODS_WITH_BODY = frozenset({b"POST", b"PUT"})
"""The methods whose bodies are kept, for the application to read."""
MAX_UNREAD = 64 * 1024 * 1024
"""Bytes of the answers of all connections whose clients do not read them as fast as they are sent."""
SWEEP_INTERVAL = 1.0
"""Seconds between two searches for overdue connections."""


class ConnectionLimits:
    """The connections of a server, and which of them may be closed.

    Args:
        max_connections: connections that may be open.
        request_timeout: seconds from the first byte of a request, or from the connection, to the last byte of
            its body.
        clock: returns seconds from an arbitrary start.
    """

    def __init__(
        self,
        max_connections: int,
        request_timeout: float = REQUEST_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_connections = max_connections
        self._request_timeout = request_timeout
        self._clock = clock
        self._open = 0
        # By the time of insertion, so the first one is the oldest.
        self._incomplete: OrderedDict[LimitedProtocol, float] = OrderedDict()
        self._unread: OrderedDict[LimitedProtocol, float] = OrderedDict()
        self._idle: OrderedDict[LimitedProtocol, None] = OrderedDict()
        self._large_heads: OrderedDict[LimitedProtocol, None] = OrderedDict()
        self._heads = 0
        self.closed = 0

    def opened(self, connection: "LimitedProtocol") -> None:
        """Count a connection, and close another one if there are too many."""
        self._open += 1
        if self._open > self._max_connections:
            candidates = self._incomplete or self._idle
            self._abort(next(iter(candidates), connection))
        self.expect_request(connection)

    def lost(self, connection: "LimitedProtocol") -> None:
        """Forget a connection."""
        self._open -= 1
        self._forget(connection)

    def expect_request(self, connection: "LimitedProtocol") -> None:
        """Start the time of a request."""
        self._idle.pop(connection, None)
        self._incomplete[connection] = self._clock() + self._request_timeout

    def request_complete(self, connection: "LimitedProtocol") -> None:
        """End the time of a request."""
        self._incomplete.pop(connection, None)

    def response_complete(self, connection: "LimitedProtocol") -> None:
        """Regard a connection as idle, unless its next request has begun."""
        if connection not in self._incomplete:
            self._idle[connection] = None

    def head_grows(self, size: int) -> None:
        """Count bytes of a head.

        While there are too many, the oldest request with a large head is closed, or else the oldest that is
        incomplete.

        Args:
            size: how many; negative if they are no longer kept.
        """
        self._heads += size
        while size > 0 and self._heads > MAX_HEADS and (self._large_heads or self._incomplete):
            self._abort(next(iter(self._large_heads or self._incomplete)))

    def head_is_large(self, connection: "LimitedProtocol") -> None:
        """Note that a request with a large head waits for its answer."""
        self._large_heads[connection] = None

    def head_is_released(self, connection: "LimitedProtocol") -> None:
        """Note that the head of a request is no longer kept."""
        self._large_heads.pop(connection, None)

    def unread(self, connection: "LimitedProtocol") -> None:
        """Start the time in which the client must read, and close the oldest if too much is unread."""
        self._unread[connection] = self._clock() + RESPONSE_TIMEOUT
        while sum(each.transport.get_write_buffer_size() for each in self._unread) > MAX_UNREAD:
            self._abort(next(iter(self._unread)))

    def read(self, connection: "LimitedProtocol") -> None:
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
                self._abort(connection)

    def _abort(self, connection: "LimitedProtocol") -> None:
        self._forget(connection)
        self.closed += 1
        connection.forget_head()
        connection.disconnect()
        connection.transport.abort()

    def _forget(self, connection: "LimitedProtocol") -> None:
        for connections in (self._incomplete, self._unread, self._idle, self._large_heads):
            connections.pop(connection, None)


class LimitedProtocol(HttpToolsProtocol):
    """A connection with the limits of `limits`, which a subclass sets; see `limited_protocol`."""

    limits: ConnectionLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_size = 0
        """Bytes of the head that is kept."""
        self._counted = 0
        """Of these, how many `limits` counts."""
        self._framing = 0
        """Bytes since the last of the body: of chunk headers and trailers."""
        self._in_head = True
        self._made = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Count the connection."""
        super().connection_made(transport)
        self._made = True
        self.limits.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self.forget_head()
        if self._made:
            self.limits.lost(self)

    def data_received(self, data: bytes) -> None:
        """Parse data, unless the head or what frames the body is too large."""
        if self._in_head:
            self._head_size += len(data)
        else:
            self._framing += len(data)
        super().data_received(data)
        self._count_head()
        if self._in_head and self._head_size > MAX_HEAD:
            self.send_400_response(f"The request line and headers exceed {MAX_HEAD} bytes.")
        elif self._framing > MAX_HEAD:
            self.send_400_response(f"The chunk headers and trailers exceed {MAX_HEAD} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Answer with 400 and close the connection, unless it is closed already."""
        if not self.transport.is_closing():
            self.disconnect()
            super().send_400_response(msg)

    def disconnect(self) -> None:
        """Let the application send nothing more, and release the headers, before the connection is closed.

        A request that waits for a change is kept until its wait ends.
        """
        if self._has_unanswered_request:
            self.headers.clear()
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    @property
    def _has_unanswered_request(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def on_message_begin(self) -> None:
        """Start the time of the request.

        Raises:
            PipelineError: the request before has no answer yet. Each that waits would take memory.
        """
        if self._has_unanswered_request:
            self.send_400_response("Wait for the answer to a request before sending the next one.")
            raise PipelineError
        super().on_message_begin()
        self._in_head = True
        self.limits.expect_request(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; a trailer is dropped."""
        if self._in_head:
            self._head_size += HEADER_OVERHEAD
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Count only the head itself, and only if it is large."""
        self._in_head = False
        self._framing = 0
        if self._head_size > SMALL_HEAD:
            headers = sum(len(name) + len(value) + HEADER_OVERHEAD for name, value in self.headers)
            self._head_size = len(self.url) + headers
        if self._head_size > SMALL_HEAD:
            self.limits.head_is_large(self)
        else:
            self._head_size = 0
        self._count_head()
        super().on_headers_complete()

    def _count_head(self) -> None:
        size, self._counted = self._head_size - self._counted, self._head_size
        if size:
            self.limits.head_grows(size)

    def forget_head(self) -> None:
        """Count the bytes of the head no longer."""
        self._head_size = 0
        self._count_head()
        self.limits.head_is_released(self)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, if the application may read it."""
        self._framing = 0
        if self.parser.get_method() in METHODS_WITH_BODY:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the time of the request."""
        self._in_head = True
        self._framing = 0
        self.limits.request_complete(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Release the request, and regard the connection as idle."""
        self.forget_head()
        self.url, self.headers, self.scope = b"", [], {}  # type: ignore[typeddict-item]
        self.cycle.scope, self.cycle.body = self.scope, bytearray()
        super().on_response_complete()
        self.limits.response_complete(self)

    def pause_writing(self) -> None:
        """Start the time in which the client must read."""
        super().pause_writing()
        self.limits.unread(self)

    def resume_writing(self) -> None:
        """End the time in which the client must read."""
        super().resume_writing()
        self.limits.read(self)


class PipelineError(Exception):
    """A client does not wait for the answer to a request; ends the parsing of what it has sent."""


def limited_protocol(limits: ConnectionLimits) -> type[LimitedProtocol]:
    """Return a class of connections that share `limits`, for uvicorn's `http` option."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})
