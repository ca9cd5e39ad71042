"""The liveness probe and the metrics of the operator's pod."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from adascale_controller.operator.runtime.metrics import OperatorMetrics
from adascale_core.errors import AdaScaleError
from adascale_core.names import METRICS_MEDIA_TYPE

MAX_SILENCE = 120.0
"""Seconds without progress after which the probe fails."""


class ProbeAddressError(AdaScaleError):
    """The address of the liveness probe is invalid or in use."""

    exit_code = 2


class Health:
    """Records the progress of the operator, once it has its lease."""

    def __init__(self, metrics: OperatorMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._progress_at: float | None = None

    def record_progress(self) -> None:
        """Record that the operator has its lease, that a cycle has ended, or a part of it."""
        self._progress_at = self._clock()

    @property
    def silence(self) -> float:
        """Seconds without progress. 0 while it waits for the lease."""
        return 0.0 if self._progress_at is None else self._clock() - self._progress_at

    @asynccontextmanager
    async def serve(self, address: str | None) -> AsyncIterator[None]:
        """Answer `GET /healthz` and `GET /metrics` at an address (HOST:PORT). None serves nothing."""
        if address is None:
            yield
            return
        app = web.Application()
        app.router.add_get("/healthz", self._answer)
        app.router.add_get("/metrics", self._answer_metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            host, _, port = address.rpartition(":")
            try:
                # asyncio listens on IPv4 and IPv6 without a host, and with `::` on IPv6 only.
                await web.TCPSite(runner, _host(host), int(port)).start()
            except (ValueError, OSError, OverflowError) as error:
                raise ProbeAddressError(
                    f"can't listen on {address}: {error}; give HOST:PORT, for example 127.0.0.1:8080, or "
                    ":8080 for all addresses"
                ) from None
            yield
        finally:
            await runner.cleanup()

    async def _answer_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": METRICS_MEDIA_TYPE})

    async def _answer(self, _request: web.Request) -> web.Response:
        if self.silence > MAX_SILENCE:
            return web.Response(status=503, text=f"no progress for {self.silence:.0f} s\n")
        return web.Response(text="ok\n")


def _host(text: str) -> str | None:
    """Return the host to listen on. None for all addresses of IPv4 and IPv6, as far as there are any."""
    host = text.strip("[]")
    return None if host in ("", "::") else host
