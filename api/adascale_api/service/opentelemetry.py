"""Sends, by OpenTelemetry, a span for each generation and loss of jobs, and the seconds of replicas by cause.

Variables of OpenTelemetry's SDK, such as OTEL_EXPORTER_OTLP_ENDPOINT, configure it. It sends in threads of
its own, and drops what no collector takes.
"""

import asyncio
import threading
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

LATEST = 86_400.0
"""Seconds in which a generation has ended that is looked for: its end may be noticed later."""
LAST_EXPORT = 1.5
"""Seconds that a service which stops waits for each of spans and counters to be sent."""
_Generations = dict[str, list[GenerationView]]
"""Those of jobs, by id."""
_LOSSES = {GenerationCause.DISRUPTION: "loss", GenerationCause.FAILURE: "failure"}


class OpenTelemetryExport:
    """Follows the database. Of several services that share one, let one export."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._first: dict[str, float] | None = None
        """The seconds at the first read: the counter has what comes later."""
        self._sent: dict[str, int] | None = None
        """The last generation of each job that had ended at the last read."""
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
        """Read the seconds, and add spans of generations whose end was stored since the last call."""

        def read(transaction: Transaction) -> tuple[dict[str, float], dict[str, int], _Generations]:
            last = jobs.last_ended_generations(transaction, self._clock() - LATEST)
            # Of what has ended before the start, earlier services have sent it.
            sent = last if self._sent is None else self._sent
            new = [each for each, generation in last.items() if generation > sent.get(each, 0)]
            found = {each: jobs.generations(transaction, jobs.find_job(transaction, each)) for each in new}
            return replica_seconds.totals(transaction), last, found

        seconds, last, found = await self._database.read_long(read)
        sent, self._sent = self._sent or {}, last
        self._first = self._first or seconds
        self._seconds = seconds
        for job_id, generations in found.items():
            for before, view in zip([None, *generations], generations, strict=False):
                if view.generation > sent.get(job_id, 0) and view.ended_at is not None:
                    self._add_spans(job_id, before, view, view.ended_at)

    async def close(self) -> None:
        """Send what is left, for a limited time."""
        with suppress(UnavailableError):
            await self.update()
        for provider in (self._traces, self._metrics):
            # Daemons, because an exporter that gets no answer tries again for longer.
            flush = threading.Thread(target=provider.force_flush, daemon=True)
            flush.start()
            await asyncio.to_thread(flush.join, LAST_EXPORT)

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
        first = self._first or {}
        return [Observation(each - first[cause], {"cause": cause}) for cause, each in self._seconds.items()]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
