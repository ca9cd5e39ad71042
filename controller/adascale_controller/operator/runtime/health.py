"""The liveness probe of the operator's pod, and its metrics for Prometheus."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from adascale_controller.job.phase import JobPhase
from adascale_core.errors import UsageError
from adascale_core.names import METRICS_MEDIA_TYPE

M = TypeVar("M", Counter, Gauge, Histogram)


class OperatorMetrics:
    """What the operator has done since its start. No label has the name of a job: their number is bounded."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        seconds = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

        def made(kind: type[M], name: str, text: str, *labels: str, **settings: Any) -> M:
            return kind(f"adascale_operator_{name}", text, labels, registry=self._registry, **settings)

        self.leader = made(
            Gauge, "leader", "1 while this operator runs the control loop, 0 while it waits for the lease."
        )
        self.cycle_duration = made(
            Histogram,
            "cycle_duration_seconds",
            "Seconds of a cycle of the control loop, beside which decisions and most writes are made.",
            buckets=seconds,
        )
        self.cycle_cpu = made(
            Counter, "cycle_cpu_seconds", "Processor time of the operator's process during cycles."
        )
        self.decision_duration = made(
            Histogram,
            "decision_duration_seconds",
            "Seconds from the begin of a decision about all jobs until it is used.",
            buckets=seconds,
        )
        self.pending = made(Gauge, "pending_jobs", "Jobs whose actions are not carried out yet.")
        self._jobs = made(Gauge, "jobs", "Jobs in the last cycle, by phase.", "phase")
        self.waiting = made(
            Gauge, "waiting_jobs", "Jobs that may run and were given no replicas in the last cycle."
        )
        self._allocations = made(
            Counter,
            "allocations",
            "Allocations requested, by what they do to the replica count.",
            "change",
        )
        self._api_requests = made(
            Counter,
            "api_requests",
            "Requests to the API server, without watches, by status; `none` without an answer.",
            *("method", "status"),
        )
        self.job_errors = made(Counter, "job_errors", "Errors because of which a job was skipped in a cycle.")
        for change in ("grow", "shrink", "stop", "restart"):
            self._allocations.labels(change)
        self.set_jobs(())

    def set_jobs(self, phases: Iterable[JobPhase]) -> None:
        """Record the phases of all jobs."""
        counts = Counts(phases)
        for phase in JobPhase:
            self._jobs.labels(phase.name.lower()).set(counts[phase])

    def count_allocation(self, before: int, after: int) -> None:
        """Count a requested allocation, by the replica counts before and after."""
        if after == 0:
            change = "stop"
        elif after == before:
            change = "restart"
        else:
            change = "grow" if after > before else "shrink"
        self._allocations.labels(change).inc()

    def count_api_request(self, method: str, status: int | None) -> None:
        """Count a request to the API server; status None if it did not answer."""
        self._api_requests.labels(method, "none" if status is None else str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


MAX_SILENCE = 120.0
"""Seconds without progress after which the probe fails."""


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
                raise UsageError(
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
