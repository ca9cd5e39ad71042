"""Sends, by OpenTelemetry, a span for each generation and loss of jobs, and the seconds of replicas by cause.

Variables of OpenTelemetry's SDK, such as OTEL_EXPORTER_OTLP_ENDPOINT, configure it. It sends in threads of
its own, and drops what no collector takes.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import set_span_in_context

from adascale_api.data.database import Database
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs, replica_seconds
from adascale_api.errors import UnavailableError
from adascale_core.views.jobs import GenerationCause, GenerationView

LAST_EXPORT = 3.0
"""Seconds that a service which stops waits for a collector."""
_LOSSES = {GenerationCause.DISRUPTION: "loss", GenerationCause.FAILURE: "failure"}


class OpenTelemetryExport:
    """Follows the database. Of several services that share one, let one export."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._since = clock()
        self._seconds: dict[str, float] = {}
        resource = Resource.create({"service.name": "adascale-api"})
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._traces.get_tracer("adascale")
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._metrics = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._metrics.get_meter("adascale").create_observable_counter(
            "adascale.replica.seconds", [self._observe], "s", "Seconds of replicas by cause, of all jobs."
        )

    async def update(self) -> None:
        """Read the seconds, and add spans of the generations that have ended since the last call."""
        until = self._clock()
        since, self._since = self._since, until

        def read(transaction: Transaction) -> list[tuple[str, list[GenerationView]]]:
            self._seconds = replica_seconds.totals(transaction)
            ids = jobs.ids_of_ended_generations(transaction, since, until)
            return [(each, jobs.generations(transaction, jobs.find_job(transaction, each))) for each in ids]

        for job_id, generations in await self._database.read_long(read):
            for before, view in zip([None, *generations], generations, strict=False):
                if view.ended_at is not None and since <= view.ended_at < until:
                    self._add_spans(job_id, before, view, view.ended_at)

    async def close(self) -> None:
        """Send what is left, for a limited time."""
        flushes = [provider.force_flush for provider in (self._traces, self._metrics)]
        with suppress(UnavailableError, TimeoutError):
            await self.update()
            async with asyncio.timeout(LAST_EXPORT):
                await asyncio.gather(*map(asyncio.to_thread, flushes))

    def _add_spans(
        self, job_id: str, before: GenerationView | None, view: GenerationView, end: float
    ) -> None:
        of_job: dict[str, str | int] = {"adascale.job": job_id, "adascale.generation": view.generation}
        attributes = {**of_job, "adascale.replicas": view.replicas, "adascale.cause": str(view.cause)}
        span = self._tracer.start_span(
            "generation", attributes=attributes, start_time=_nanoseconds(view.started_at)
        )
        if before is not None and before.ended_at is not None and view.cause in _LOSSES:
            loss = self._tracer.start_span(
                _LOSSES[view.cause],
                set_span_in_context(span),
                attributes=of_job,
                start_time=_nanoseconds(before.ended_at),
            )
            loss.end(_nanoseconds(view.started_at))
        span.end(_nanoseconds(end))

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(seconds, {"cause": cause}) for cause, seconds in self._seconds.items()]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
