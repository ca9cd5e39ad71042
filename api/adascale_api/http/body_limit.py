"""Limits of the size of request bodies, of each and of all together."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adascale_api.errors import BodyTooLargeError, UnavailableError
from adascale_api.http.connection_limits import ConnectionLimits

MAX_BODY = 1024 * 1024
"""Bytes of a request body."""
SMALL_BODY = 8 * 1024
"""Bytes of a body that is not counted: heartbeats and single reports are never refused for others' bodies."""


@contextmanager
def limited_body(scope: Scope, connections: ConnectionLimits) -> Iterator["LimitedBody"]:
    """Count the body of a request until it is answered."""
    body = LimitedBody(scope, connections)
    try:
        yield body
    finally:
        connections.body_grows(-body.counted)


class LimitedBody:
    """The body of a request."""

    def __init__(self, scope: Scope, connections: ConnectionLimits) -> None:
        self._scope = scope
        self._connections = connections
        self._size = 0
        self.counted = 0

    def limited(self, receive: Receive) -> Receive:
        """Return a `receive` that raises an error when the body exceeds a limit, announced or not.

        `BodyTooLargeError` for a body of more than `MAX_BODY` bytes, `UnavailableError` while there is no
        room because of other bodies.
        """

        async def receive_within_limit() -> Message:
            if self._size == 0:
                # The server has checked that it is a number, of which Python converts 4300 digits at most.
                announced = dict(self._scope["headers"]).get(b"content-length", b"").lstrip(b"0") or b"0"
                if int(announced) > MAX_BODY:
                    _refuse(f"{int(announced)} bytes")
            message = await receive()
            self._size += len(message.get("body", b""))
            if self._size > MAX_BODY:
                _refuse(f"more than {MAX_BODY} bytes")
            if self._size > SMALL_BODY:
                has_room = self._connections.body_grows(self._size - self.counted)
                self.counted = self._size
                if not has_room:
                    raise UnavailableError(
                        "too many large requests at the same time; nothing was stored, try again"
                    )
            return message

        return receive_within_limit


class BodyLimit:
    """ASGI middleware that limits bodies."""

    def __init__(self, app: ASGIApp, connections: ConnectionLimits) -> None:
        self._app = app
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and count the bytes of its body as they are read."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        with limited_body(scope, self._connections) as body:
            await self._app(scope, body.limited(receive), send)


def _refuse(got: str) -> None:
    raise BodyTooLargeError(
        f"body: got {got}, expected at most {MAX_BODY}; nothing was stored: send fewer reports at a time"
    )
