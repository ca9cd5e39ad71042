"""Says over HTTP whether the operator is well: for the probes of its pod."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from adascale_core.errors import AdaScaleError

MAX_SILENCE = 120.0
"""Seconds without a sign of life after which the operator counts as stuck."""


class NoListenerError(AdaScaleError):
    """Nothing can listen there."""

    exit_code = 2


class Health:
    """The signs of life of an operator that is at work, or waits to be."""

    def __init__(self) -> None:
        self._alive_at: float | None = None

    def beat(self) -> None:
        """Give a sign of life. From the first one on, others have to follow."""
        self._alive_at = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life."""
        return 0.0 if self._alive_at is None else time.monotonic() - self._alive_at

    @asynccontextmanager
    async def served(self, place: str | None) -> AsyncIterator[None]:
        """Answer `GET /healthz` at `place` (HOST:PORT); nowhere if none.

        Raises:
            NoListenerError: that is no place, or is taken.
        """
        if place is None:
            yield
            return
        app = web.Application()
        app.router.add_get("/healthz", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            host, _, port = place.rpartition(":")
            try:
                await web.TCPSite(runner, host.strip("[]") or None, int(port)).start()
            except (ValueError, OSError, OverflowError) as error:
                raise NoListenerError(
                    f"can't listen on {place}: {error}; give HOST:PORT, as 0.0.0.0:8080"
                ) from None
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, _request: web.Request) -> web.Response:
        if self.silence > MAX_SILENCE:
            return web.Response(status=503, text=f"no cycle in {self.silence:.0f} s\n")
        return web.Response(text="ok\n")
