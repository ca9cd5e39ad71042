"""The calls of the API server and of the metrics service that the operator makes, as protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observer import Cached
from adascale_controller.operator.types.actions import Event, StoppedPod
from adascale_controller.operator.types.kubernetes import ApiObject, Resource
from adascale_core.errors import AdaScaleError
from adascale_core.messages.allocation import Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.views.decision import DecisionView
from adascale_core.views.jobs import JobChanges, JobList


class ApiServerError(AdaScaleError):
    """The API server does not answer, or rejects a call.

    Args:
        status: the HTTP status. 0 if there was no answer.
        reply: the message of the API server.
    """

    def __init__(self, message: str, status: int = 0, reply: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reply = reply


class PodRefusedError(ApiServerError):
    """The API server does not create a pod now: for a quota, a policy, or a webhook that is down."""


class Objects(Protocol):
    """Objects of the API server. Each call may raise `ApiServerError`."""

    async def get(self, plural: str, namespace: str, name: str) -> ApiObject | None:
        """Return an object of a resource. None if it does not exist."""

    async def create(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        """Create an object and return it. None if one of this name exists."""

    async def replace(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        """Replace an object and return it. None if it has another version than the manifest, or is gone."""


class Cluster(Objects, Protocol):
    """The API server. Each call may raise `ApiServerError`."""

    async def list(self, resource: Resource) -> tuple[Sequence[Cached], int]:
        """Return all objects of a resource, as they are cached, and the version of the list."""

    async def may_list_nodes(self) -> bool:
        """Whether the operator may list and watch nodes."""

    async def admit_pod(self, manifest: ApiObject) -> ApiObject:
        """Return a pod as admission makes it, by a dry run: nothing is created.

        `ApiServerError.status` is 400 if a webhook does not support dry runs, 403 if a quota or a policy
        rejects the pod.
        """

    async def list_events(self, namespace: str, field_selector: str) -> Sequence[ApiObject]:
        """Return the Events of a namespace that match a selector."""

    async def list_kueue(self, plural: str, namespace: str | None = None) -> Sequence[ApiObject] | None:
        """Return all objects of a resource of Kueue, in the version that the API server prefers.

        None if the cluster has no Kueue, or if the operator may not list them.
        """

    async def apply_status(self, job: AdaScaleJob, status: ApiObject) -> ApiObject:
        """Write the status of an AdaScaleJob by server-side apply, and return the AdaScaleJob.

        `ApiServerError.status` is 404 or 409 if there is no AdaScaleJob with this uid.
        """

    async def apply_config_map(self, manifest: ApiObject) -> None:
        """Create or change a ConfigMap by server-side apply."""

    async def stop_pod(self, namespace: str, pod: StoppedPod) -> bool:
        """Delete or end a pod. Returns whether it exists, and not another one of its name."""

    async def delete_workload(self, namespace: str, name: str) -> None:
        """Delete a Workload of Kueue."""

    async def delete_job(self, job: AdaScaleJob) -> None:
        """Delete an AdaScaleJob and all objects that it owns."""

    async def record_event(self, job: AdaScaleJob, event: Event, now: float, reporter: str) -> None:
        """Create an Event about an AdaScaleJob."""


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
