"""The operator's own metrics, for Prometheus. No label has the name of a job: their number is bounded."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from adascale_controller.operator.reconcile.job_phase import JobPhase


class OperatorMetrics:
    """What the operator has done since its start."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.leader = Gauge(
            "adascale_operator_leader",
            "1 while this operator runs the control loop, 0 while it waits for the lease.",
            registry=registry,
        )
        self.cycle_duration = Histogram(
            "adascale_operator_cycle_duration_seconds",
            "Seconds of a cycle of the control loop, beside which decisions and most writes are made.",
            registry=registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
        )
        self.cycle_cpu = Counter(
            "adascale_operator_cycle_cpu_seconds",
            "Processor time of the operator's process during cycles.",
            registry=registry,
        )
        self.decision_duration = Histogram(
            "adascale_operator_decision_duration_seconds",
            "Seconds from the begin of a decision about all jobs until it is used.",
            registry=registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
        )
        self.pending = Gauge(
            "adascale_operator_pending_jobs",
            "Jobs whose actions are not carried out yet.",
            registry=registry,
        )
        self._jobs = Gauge(
            "adascale_operator_jobs", "Jobs in the last cycle, by phase.", ["phase"], registry=registry
        )
        self.waiting = Gauge(
            "adascale_operator_waiting_jobs",
            "Jobs that may run and were given no replicas in the last cycle.",
            registry=registry,
        )
        self._allocations = Counter(
            "adascale_operator_allocations",
            "Allocations requested, by what they do to the replica count.",
            ["change"],
            registry=registry,
        )
        self._api_requests = Counter(
            "adascale_operator_api_requests",
            "Requests to the API server, without watches, by status; `none` without an answer.",
            ["method", "status"],
            registry=registry,
        )
        self.job_errors = Counter(
            "adascale_operator_job_errors",
            "Errors because of which a job was skipped in a cycle.",
            registry=registry,
        )
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
