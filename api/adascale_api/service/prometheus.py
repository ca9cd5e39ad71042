"""Metrics for Prometheus: the jobs in the database, and the requests of this process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from adascale_api.data.database import Database
from adascale_api.data.sql import Transaction
from adascale_api.data.store import replica_seconds
from adascale_api.data.store.reports import latest_gauges
from adascale_api.http.connection_limits import ConnectionLimits

_GAUGES = (
    ("gain", "Worth of one step, in steps at the initial batch size."),
    ("efficiency_ratio", "Gain divided by scale."),
    ("progress_steps", "Progress so far, in steps at the initial batch size."),
    ("replicas", "Replicas of the job."),
    ("local_batch_size_samples", "Samples in a micro-batch of one replica."),
)
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"}
_FULL = "1 while nothing can be stored because there is no room on the disk."
_DAMAGED = "1 if the database was deleted, replaced or damaged."


class Metrics:
    """The counters of this process."""

    def __init__(self, database: Database, connections: ConnectionLimits) -> None:
        self.registry = CollectorRegistry()
        self.reports = Counter(
            "adascale_reports",
            "Reports received, by result: stored, or repeated if it was stored before.",
            ["result"],
            registry=self.registry,
        )
        self._stored = self.reports.labels("stored")
        self._repeated = self.reports.labels("repeated")
        self.requests = Histogram(
            "adascale_request_duration_seconds",
            "Seconds from the arrival of a request to the end of its answer, including a requested wait.",
            ["method", "route", "status"],
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
        )
        full = Gauge("adascale_database_full", _FULL, registry=self.registry)
        full.set_function(lambda: database.is_full)
        damaged = Gauge("adascale_database_damaged", _DAMAGED, registry=self.registry)
        damaged.set_function(lambda: bool(database.damage))
        for counter in (database.failures, connections.closed):
            self.registry.register(counter)

    def count_reports(self, stored: int, repeated: int) -> None:
        """Count the reports of a request."""
        self._stored.inc(stored)
        if repeated:
            self._repeated.inc(repeated)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request and its time."""
        method = method if method in _METHODS else "other"
        self.requests.labels(method, route, status).observe(seconds)

    def text(self, transaction: Transaction) -> bytes:
        """Return all metrics in Prometheus' text format."""
        lines: list[str] = []
        rows = latest_gauges(transaction)
        # Formatted here, because the client library takes ten times as long for thousands of jobs.
        for number, (name, description) in enumerate(_GAUGES, 1):
            lines += [f"# HELP adascale_job_{name} {description}", f"# TYPE adascale_job_{name} gauge"]
            # Ids of jobs have no character that must be escaped.
            # `job` and `namespace` are labels that Prometheus sets itself.
            lines += [f'adascale_job_{name}{{adascale_job="{row[0]}"}} {float(row[number])}' for row in rows]
        name = "adascale_replica_seconds_total"
        lines += [f"# HELP {name} Seconds of replicas by cause, of all jobs.", f"# TYPE {name} counter"]
        lines += [
            f'{name}{{cause="{cause}"}} {seconds}'
            for cause, seconds in replica_seconds.totals(transaction).items()
        ]
        return "\n".join([*lines, ""]).encode() + self.process_text()

    def process_text(self) -> bytes:
        """Return the metrics of this process, without the metrics of jobs."""
        return generate_latest(self.registry)
