"""Limits of the size of request bodies, of each and of all together."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adascale_api.errors import BodyTooLargeError, UnavailableError

MAX_BODY = 1024 * 1024
"""Bytes of a request body."""
MAX_BODIES = 48 * 1024 * 1024
"""Bytes of all bodies that are larger than `SMALL_BODY`, while their requests last."""
SMALL_BODY = 8 * 1024
"""Bytes of a body that is not counted: heartbeats and single reports are never refused for others' bodies."""


class BodyBudget:
    """The bytes of the bodies of all requests."""

    def __init__(self) -> None:
        self.used = 0

    @contextmanager
    def request(self, scope: Scope) -> Iterator["_Body"]:
        """Count the body of a request until it is answered."""
        body = _Body(self, scope)
        try:
            yield body
        finally:
            self.used -= body.counted


class _Body:
    """The body of a request."""

    def __init__(self, budget: BodyBudget, scope: Scope) -> None:
        self._budget = budget
        self._scope = scope
        self._size = 0
        self.counted = 0

    def limited(self, receive: Receive) -> Receive:
        """Return a `receive` that raises an error when the body exceeds a limit, announced or not.

        `BodyTooLargeError` for a body of more than `MAX_BODY` bytes, `UnavailableError` while the bodies of
        all requests have more than `MAX_BODIES` bytes.
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
                self._budget.used += self._size - self.counted
                self.counted = self._size
                if self._budget.used > MAX_BODIES:
                    raise UnavailableError(
                        "too many large requests at the same time; nothing was stored, try again"
                    )
            return message

        return receive_within_limit


class BodyLimit:
    """ASGI middleware that limits bodies."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and count the bytes of its body as they are read."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        with self._budget.request(scope) as body:
            await self._app(scope, body.limited(receive), send)


def _refuse(got: str) -> None:
    raise BodyTooLargeError(
        f"body: got {got}, expected at most {MAX_BODY}; nothing was stored: send fewer reports at a time"
    )
