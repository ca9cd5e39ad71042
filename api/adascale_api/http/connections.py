"""The connections of the server, with limits that uvicorn does not have, and TLS beside plain HTTP.

This module alone uses what uvicorn and uvloop do not document; `pyproject.toml` has an upper bound for both
because of it. Without it one client could take the places of all others: uvicorn counts all connections
together and waits for a head without end, and asyncio counts a connection after its handshake only.

A connection is closed if its request is incomplete for too long, if the request line and headers are too
large, if a request follows before the answer to the one before, if its client does not read the answer, or if
all connections together need too much; see `connection_limits`.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # its stubs leave it out

from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.renewed import Renewed

MAX_HEAD = 32 * 1024
"""Bytes of a request line with its headers, with `HEADER_OVERHEAD` for each; a token may have 16 KiB."""
SMALL_HEAD = 8 * 1024
"""Bytes of a request line with its headers that are not counted once they are complete."""
SMALL_BODY = 8 * 1024
"""Bytes of a body that is not counted, such as that of a heartbeat or a single report."""
HEADER_OVERHEAD = 200
"""Bytes that a header takes besides its text."""
CLOSED = "closed"
"""The name, in the state of a request, of a future that is done once its connection is closed."""
METHODS_WITH_BODY = frozenset({b"POST", b"PUT"})
"""The methods whose bodies are kept, for the application to read."""


HANDSHAKE = 0x16
"""The first byte of a TLS connection: the type of a record with a message of the handshake."""


class LimitedProtocol(HttpToolsProtocol):
    """A connection with the limits of `limits`, which a subclass sets; see `limited_protocol`."""

    limits: ConnectionLimits
    certificate: Renewed[ssl.SSLContext] | None
    encrypted: asyncio.Transport | None = None
    """With TLS, the transport below that of `transport`, with what is encrypted and not sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_size = 0
        """Bytes of the head that is kept, but for a small one that is complete."""
        self._body_size = 0
        self._framing = 0
        """Bytes since the last of the body: of chunk headers and trailers."""
        self._in_head = True
        self._is_silent = True
        self._closed: asyncio.Future[None] = self.loop.create_future()
        """Is done once the connection is closed, so that a request that waits for a change can end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Count the connection, or start the time of its first request after the handshake of TLS."""
        super().connection_made(transport)
        if self.encrypted is None:
            self.limits.opened(self)
        else:
            self.limits.expect_request(self)

    @property
    def address(self) -> str:
        """The address of the client."""
        return self.client[0] if self.client else ""

    @property
    def _unread_size(self) -> int:
        """Bytes of answers that the client has not read."""
        encrypted = self.encrypted.get_write_buffer_size() if self.encrypted is not None else 0
        return self.transport.get_write_buffer_size() + encrypted

    def abort(self) -> None:
        """Close the connection at once."""
        self._head_size = 0
        self.disconnect()
        self._end_waits()
        self.transport.abort()

    def _end_waits(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._end_waits()
        self.limits.lost(self)

    def data_received(self, data: bytes) -> None:
        """Parse data, unless the head or what frames the body is too large, or it begins TLS."""
        if self._is_silent:
            self._is_silent = False
            if data[0] == HANDSHAKE and self.certificate is not None:
                self._begin_tls(data, self.certificate)
                return
        if self._in_head:
            self._head_size += len(data)
        else:
            self._framing += len(data)
        super().data_received(data)
        self.limits.keep(self.limits.heads, self, self._head_size)
        if self._in_head and self._head_size > MAX_HEAD:
            self.send_400_response(f"The request line and headers exceed {MAX_HEAD} bytes.")
        elif self._framing > MAX_HEAD:
            self.send_400_response(f"The chunk headers and trailers exceed {MAX_HEAD} bytes.")

    def _begin_tls(self, data: bytes, certificate: Renewed[ssl.SSLContext]) -> None:
        tls = _Tls(self.loop, self, certificate.current, None, server_side=True)
        self.encrypted = self.transport
        self.transport.set_protocol(tls)
        tls.connection_made(self.transport)
        tls.get_buffer(len(data))[: len(data)] = data
        tls.buffer_updated(len(data))

    def send_400_response(self, msg: str) -> None:
        """Answer with 400 and close the connection, unless it is closed already."""
        if not self.transport.is_closing():
            self.disconnect()
            super().send_400_response(msg)

    def disconnect(self) -> None:
        """Let the application send nothing more, and release the headers, before the connection is closed."""
        if self._has_unanswered_request:
            self.headers.clear()
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    @property
    def _has_unanswered_request(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def on_message_begin(self) -> None:
        """Start the time of the request, unless the one before has no answer: each takes memory."""
        if self._has_unanswered_request:
            self.send_400_response("Wait for the answer to a request before sending the next one.")
            raise PipelineError
        super().on_message_begin()
        self.scope["state"][CLOSED] = self._closed
        self._in_head = True
        self._body_size = 0
        if not self.transport.is_closing():
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
        if self._head_size <= SMALL_HEAD:
            self._head_size = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, if the application may read it."""
        self._framing = 0
        if self.parser.get_method() in METHODS_WITH_BODY:
            super().on_body(body)
            self._body_size += len(body)
            is_kept = self._body_size > SMALL_BODY and self._has_unanswered_request
            if is_kept and not self.transport.is_closing():
                self.limits.keep(self.limits.bodies, self, self._body_size)

    def on_message_complete(self) -> None:
        """End the time of the request."""
        self._in_head = True
        self._framing = 0
        if not self.transport.is_closing():
            self.limits.request_complete(self, waits=self._has_unanswered_request)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Release the request, and regard the connection as idle."""
        self._head_size = 0
        self.limits.keep(self.limits.heads, self, 0)
        self.limits.keep(self.limits.bodies, self, 0)
        self.url, self.headers, self.scope = b"", [], {}  # type: ignore[typeddict-item]
        self.cycle.scope, self.cycle.body = self.scope, bytearray()
        super().on_response_complete()
        self.limits.response_complete(self)

    def shutdown(self) -> None:
        """Close the connection when the server stops: at once if there is nothing to send.

        With TLS, an orderly end would wait for that of the client, which reads nothing between two requests.
        """
        if self._has_unanswered_request or self._unread_size:
            super().shutdown()
        else:
            self.abort()

    def pause_writing(self) -> None:
        """Start the time in which the client must read."""
        super().pause_writing()
        self.limits.unread(self, self._unread_size)

    def resume_writing(self) -> None:
        """End the time in which the client must read."""
        super().resume_writing()
        self.limits.read(self)


class PipelineError(Exception):
    """A client does not wait for the answer to a request; ends the parsing of what it has sent."""


def limited_protocol(
    limits: ConnectionLimits, certificate: Renewed[ssl.SSLContext] | None
) -> type[LimitedProtocol]:
    """Return a class of connections that share `limits`, for uvicorn's `http` option."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "certificate": certificate})


class _Tls(SSLProtocol):  # type: ignore[misc]  # of a type that the stubs leave out
    """The TLS of a connection, which lets the protocol of the connection know what the client does not read.

    The base class encrypts an answer at once, and hands all of it to the transport of the socket. It knows
    how much waits there, and tells the protocol above it nothing.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the protocol above, also if the handshake is incomplete."""
        app = self._app
        super().connection_lost(exc)
        if app.scheme == "http":
            app.connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop the answers."""
        self._is_paused = True
        super().pause_writing()
        self._app.pause_writing()

    def resume_writing(self) -> None:
        """Continue the answers, unless the transport is full again by what has waited here."""
        self._is_paused = False
        super().resume_writing()
        if not self._is_paused:
            self._app.resume_writing()

    @property
    def _app(self) -> LimitedProtocol:
        """The protocol of the connection, until it is closed."""
        app: LimitedProtocol = self._get_app_transport().get_protocol()
        return app


class Server(uvicorn.Server):
    """Calls `on_listening` once it listens, and `on_stopping` when it begins to stop."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_listening: Callable[[], None],
        on_stopping: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._on_stopping = on_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 (of the base class)
        """Begin to stop."""
        # The base class raises the signal again after the shutdown; a requested stop exits with 0.
        self.should_exit = True
        self._on_stopping()
