"""The calls of the metrics service that the operator makes, as a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from adascale_core.messages import Allocation, AllocationView, JobSpec
from adascale_core.views import DecisionView, JobView


class AllocationService(Protocol):
    """The metrics service. Each call blocks, and may raise the `ServiceError`s of `adascale_client`."""

    def list_jobs(self) -> Sequence[JobView]:
        """Return all jobs."""

    def declare_job(self, job_id: str, spec: JobSpec) -> None:
        """Declare a job, or change its spec."""

    def delete_job(self, job_id: str) -> None:
        """Delete a job."""

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        """Request an allocation for a job."""

    def put_decision(self, decision: DecisionView) -> None:
        """Store the explained decision about a job."""
