"""A limit to the size of a request's body, whether the client announces its size or not."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adascale_api.errors import BodyTooLargeError

MAX_BODY = 1024 * 1024
"""Bytes of a request's body, at most."""


class BodyLimit:
    """ASGI middleware: reading a body beyond the limit raises `BodyTooLargeError`."""

    def __init__(self, app: ASGIApp, largest: int = MAX_BODY) -> None:
        self._app = app
        self._largest = largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, its body counted as it is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"")
        size = 0

        async def receive_within_limit() -> Message:
            nonlocal size
            if announced.isdigit() and int(announced) > self._largest:
                self._refuse(f"{int(announced)} bytes")
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._largest:
                self._refuse(f"more than {self._largest} bytes")
            return message

        await self._app(scope, receive_within_limit, send)

    def _refuse(self, got: str) -> None:
        raise BodyTooLargeError(
            f"body: got {got}, allowed are at most {self._largest}; nothing was stored: send fewer at a time"
        )
