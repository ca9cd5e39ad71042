"""What Prometheus may scrape: the jobs as the database has them, and the requests of this process."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import Connection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adascale_api import store
from adascale_core.messages import GainReport

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES: dict[str, tuple[str, Callable[[GainReport], float]]] = {
    "gain": ("Steps at the initial batch size that one step is worth.", lambda report: report.gain),
    "efficiency": ("Gain divided by scale.", lambda report: report.efficiency),
    "progress": ("Steps at the initial batch size done so far.", lambda report: report.progress),
    "replicas": ("Replicas that the job trains on.", lambda report: report.replicas),
    "local_batch_size": ("Samples in a micro-batch of one replica.", lambda report: report.local_bsz),
}


class Metrics:
    """The counters of this process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reports = Counter(
            "adascale_reports",
            "Reports received, by whether they were new or known already.",
            ["result"],
            registry=self.registry,
        )
        self.requests = Histogram(
            "adascale_request_seconds",
            "Time from a request's arrival to the end of its answer; waiting that was asked for included.",
            ["method", "route", "status"],
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
        )

    def text(self, connection: Connection) -> bytes:
        """Everything, as Prometheus reads it."""
        jobs = CollectorRegistry()
        jobs.register(_Jobs(store.latest_reports(connection)))
        return generate_latest(jobs) + generate_latest(self.registry)


class RequestMetrics:
    """ASGI middleware: counts and times the requests by their route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._requests = metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and time it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = time.perf_counter()
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            # By the route's template: a path may hold anything, and each would be a series of its own.
            route = getattr(scope.get("route"), "path", "none")
            seconds = time.perf_counter() - began
            self._requests.labels(_method(scope["method"]), route, status).observe(seconds)


class _Jobs(Collector):
    def __init__(self, latest: dict[str, GainReport]) -> None:
        self._latest = latest

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (meaning, value) in _GAUGES.items():
            family = GaugeMetricFamily(f"adascale_job_{name}", meaning, labels=["job"])
            for job_id, report in self._latest.items():
                family.add_metric([job_id], value(report))
            yield family


def _method(method: str) -> str:
    return method if method in {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"} else "other"
