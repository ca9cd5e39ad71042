"""The calls of the API server that the operator makes besides watching, as a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from adascale_controller.operator.types.actions import Event
from adascale_controller.operator.types.kubernetes import ApiObject, Resource
from adascale_core.errors import AdaScaleError


class ClusterError(AdaScaleError):
    """The API server does not answer, or rejects a call.

    Args:
        status: the HTTP status. 0 if there was no answer.
        reply: the message of the API server.
    """

    def __init__(self, message: str, status: int = 0, reply: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reply = reply


class Cluster(Protocol):
    """The API server. Each call may raise `ClusterError`."""

    async def list(self, resource: Resource) -> tuple[list[ApiObject], int]:
        """Return all objects of a resource, with the parts that are cached, and the version of the list."""

    async def may_list(self, resource: Resource) -> bool:
        """Whether the operator may list and watch a resource."""

    async def get_claim(self, namespace: str, name: str) -> ApiObject | None:
        """Return a PersistentVolumeClaim. None if it does not exist."""

    async def list_events(self, namespace: str, field_selector: str) -> Sequence[ApiObject]:
        """Return the Events of a namespace that match a selector."""

    async def apply_status(self, namespace: str, name: str, uid: str, status: ApiObject) -> ApiObject:
        """Write the status of an AdaScaleJob by server-side apply, and return the AdaScaleJob.

        `ClusterError.status` is 404 or 409 if there is no AdaScaleJob with this uid.
        """

    async def create_indexed_job(self, manifest: ApiObject) -> ApiObject:
        """Create an Indexed Job. `ClusterError.status` is 409 if a Job of this name exists."""

    async def patch_indexed_job(self, namespace: str, name: str, uid: str, patch: ApiObject) -> ApiObject:
        """Change an Indexed Job by a merge patch. `ClusterError.status` is 409 if it has another uid."""

    async def delete_indexed_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete an Indexed Job after its pods."""

    async def create_claim(self, manifest: ApiObject) -> None:
        """Create a PersistentVolumeClaim if none of this name exists."""

    async def delete_pod(self, namespace: str, name: str) -> None:
        """Delete a pod without a grace period, and remove the Job controller's finalizer."""

    async def release_pod(self, namespace: str, name: str) -> None:
        """Remove the Job controller's finalizer from a pod."""

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete an AdaScaleJob and all objects that it owns."""

    async def record_event(
        self, namespace: str, name: str, uid: str, event: Event, now: float, reporter: str
    ) -> None:
        """Create an Event about an AdaScaleJob.

        Args:
            namespace, name, uid: the AdaScaleJob.
            event: the Event.
            now: seconds since 1970.
            reporter: `reportingInstance`, the identity of the operator.
        """
