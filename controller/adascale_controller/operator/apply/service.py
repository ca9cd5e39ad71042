"""The calls of the metrics service that the operator makes, as a protocol."""

from __future__ import annotations

from typing import Protocol

from adascale_core.messages.allocation import Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.views.decision import DecisionView
from adascale_core.views.jobs import JobChanges, JobList


class AllocationService(Protocol):
    """The metrics service. Each call blocks, and may raise the `ServiceError`s of `adascale_client`."""

    def read_jobs(self, share: float = 1.0) -> JobList:
        """Return all jobs, and the cursor from which their later changes are read."""

    def read_changes(self, cursor: str, wait: float = 0.0) -> JobChanges:
        """Return what has changed since a cursor, after `wait` seconds at most. Status 410 if it expired."""

    def declare_job(self, job_id: str, spec: JobSpec) -> None:
        """Declare a job, or change its spec."""

    def delete_job(self, job_id: str) -> None:
        """Delete a job."""

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        """Request an allocation for a job."""

    def put_decision(self, decision: DecisionView) -> None:
        """Store the explained decision about a job."""
