"""Metrics for Prometheus: the jobs in the database, and the requests of this process."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import Connection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adascale_api.store.reports import latest_reports
from adascale_core.messages import GainReport

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES: dict[str, tuple[str, Callable[[GainReport], float]]] = {
    "gain": ("Worth of one step, in steps at the initial batch size.", lambda report: report.gain),
    "efficiency": ("Gain divided by scale.", lambda report: report.efficiency),
    "progress": ("Progress so far, in steps at the initial batch size.", lambda report: report.progress),
    "replicas": ("Replicas of the job.", lambda report: report.replicas),
    "local_batch_size": ("Samples in a micro-batch of one replica.", lambda report: report.local_bsz),
}


class Metrics:
    """The counters of this process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reports = Counter(
            "adascale_reports",
            "Reports received, by result: stored, or repeated if it was stored before.",
            ["result"],
            registry=self.registry,
        )
        self.requests = Histogram(
            "adascale_request_seconds",
            "Seconds from the arrival of a request to the end of its answer, including a requested wait.",
            ["method", "route", "status"],
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
        )

    def text(self, connection: Connection) -> bytes:
        """Return all metrics in Prometheus' text format."""
        jobs = CollectorRegistry()
        jobs.register(_Jobs(latest_reports(connection)))
        return generate_latest(jobs) + generate_latest(self.registry)


class RequestMetrics:
    """ASGI middleware: counts and times the requests by their route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._requests = metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and measure its time."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def send_and_record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.perf_counter()
        try:
            await self._app(scope, receive, send_and_record_status)
        finally:
            # Labelled with the route's template: labels with full paths would create a series per path.
            route = getattr(scope.get("route"), "path", "none")
            seconds = time.perf_counter() - started
            self._requests.labels(_method(scope["method"]), route, status).observe(seconds)


class _Jobs(Collector):
    def __init__(self, latest: dict[str, GainReport]) -> None:
        self._latest = latest

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (description, value) in _GAUGES.items():
            family = GaugeMetricFamily(f"adascale_job_{name}", description, labels=["job"])
            for job_id, report in self._latest.items():
                family.add_metric([job_id], value(report))
            yield family


def _method(method: str) -> str:
    return method if method in {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"} else "other"
