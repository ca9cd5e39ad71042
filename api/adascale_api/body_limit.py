"""ASGI middleware that limits the size of request bodies, of each and of all together."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adascale_api.errors import BodyTooLargeError, UnavailableError

MAX_BODY = 1024 * 1024
"""Bytes of a request body."""
MAX_BODIES = 48 * 1024 * 1024
"""Bytes of all bodies that are larger than `SMALL_BODY`, while their requests last."""
SMALL_BODY = 8 * 1024
"""Bytes of a body that is not counted: heartbeats and single reports are never refused for others' bodies."""


class BodyLimit:
    """Raises an error when a body is read that exceeds a limit, announced or not.

    `BodyTooLargeError` for a body of more than `MAX_BODY` bytes, `UnavailableError` while the bodies of all
    requests have more than `MAX_BODIES` bytes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._total = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and count the bytes of its body as they are read."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        content_length = dict(scope["headers"]).get(b"content-length", b"")
        size = counted = 0

        async def receive_within_limit() -> Message:
            nonlocal size, counted
            if content_length.isdigit() and int(content_length) > MAX_BODY:
                _refuse(f"{int(content_length)} bytes")
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                _refuse(f"more than {MAX_BODY} bytes")
            if size > SMALL_BODY:
                self._total += size - counted
                counted = size
                if self._total > MAX_BODIES:
                    raise UnavailableError(
                        "too many large requests at the same time; nothing was stored, try again"
                    )
            return message

        try:
            await self._app(scope, receive_within_limit, send)
        finally:
            self._total -= counted


def _refuse(got: str) -> None:
    raise BodyTooLargeError(
        f"body: got {got}, expected at most {MAX_BODY}; nothing was stored: send fewer reports at a time"
    )
