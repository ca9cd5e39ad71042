"""ASGI middleware that limits the size of request bodies."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adascale_api.errors import BodyTooLargeError

MAX_BODY = 1024 * 1024
"""Bytes of a request body."""


class BodyLimit:
    """Raises `BodyTooLargeError` when a body of more than `MAX_BODY` bytes is read, announced or not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and count the bytes of its body as they are read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = dict(scope["headers"]).get(b"content-length", b"")
        size = 0

        async def receive_within_limit() -> Message:
            nonlocal size
            if content_length.isdigit() and int(content_length) > MAX_BODY:
                _refuse(f"{int(content_length)} bytes")
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                _refuse(f"more than {MAX_BODY} bytes")
            return message

        await self._app(scope, receive_within_limit, send)


def _refuse(got: str) -> None:
    raise BodyTooLargeError(
        f"body: got {got}, expected at most {MAX_BODY}; nothing was stored: send fewer reports at a time"
    )
