"""All calls of the Kubernetes API that the operator makes, besides watching."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from adascale_controller.operator.conditions import Reason
from adascale_controller.operator.pods import TRACKING, Problem
from adascale_controller.operator.resource import seconds, timestamp
from adascale_controller.operator.steering import Event
from adascale_controller.operator.store import Kind
from adascale_core import names
from adascale_core.errors import AdaScaleError

TIMEOUT = 10.0
"""Seconds to wait for an answer."""
PAGE = 500
"""Objects to ask for at a time."""

_JOBS = f"/apis/{names.GROUP_VERSION}"
_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"


class ClusterError(AdaScaleError):
    """The API server does not answer, or refuses.

    Args:
        status: the HTTP status; 0: no answer.
        told: what the API server itself says.
    """

    def __init__(self, message: str, status: int = 0, told: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.told = told


class Cluster:
    """The Kubernetes API.

    Args:
        api: the client.
        namespace: the only namespace to look at; none: all.
    """

    def __init__(self, api: client.ApiClient, namespace: str | None) -> None:
        self._api = api
        self._namespace = namespace
        self.calls = 0
        """How many calls were made."""

    # -- reading --------------------------------------------------------------------------------------------

    async def list(self, kind: Kind) -> tuple[list[Mapping[str, Any]], int]:
        """All objects of a kind, and the version that they are all of.

        Raises:
            ClusterError: it can't be done.
        """
        items: list[Mapping[str, Any]] = []
        query = {"limit": str(PAGE)}
        while True:
            page = await self._call("GET", self._path_of(kind), query)
            items += page["items"]
            rest = page["metadata"].get("continue")
            if not rest:
                return items, int(page["metadata"]["resourceVersion"])
            query["continue"] = rest

    async def may_list(self, kind: Kind) -> bool:
        """Whether the operator may list and watch a kind.

        Raises:
            ClusterError: it can't be found out.
        """
        for verb in ("list", "watch"):
            asked = {"verb": verb, "resource": str(kind), "group": ""}
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": asked},
            }
            path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            answer = await self._call("POST", path, body=review)
            if not answer["status"].get("allowed"):
                return False
        return True

    async def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """A PersistentVolumeClaim; none if there is none.

        Raises:
            ClusterError: it can't be read.
        """
        try:
            path = f"{_core(namespace)}/persistentvolumeclaims/{quote(name)}"
            found: Mapping[str, Any] = await self._call("GET", path)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise
        return found

    async def refusal(self, namespace: str, job_uid: str, since: float) -> Problem | None:
        """Why the Job controller could not make a pod since a time, as its events tell.

        Raises:
            ClusterError: they can't be read.
        """
        selector = f"involvedObject.uid={job_uid},reason=FailedCreate"
        found = await self._call("GET", f"{_core(namespace)}/events", {"fieldSelector": selector})
        told = [(_moment(one), one.get("message", "")) for one in found["items"]]
        recent = [(moment, message) for moment, message in told if moment >= since]
        if not recent:
            return None
        message = max(recent)[1]
        return Problem(_refused(message), message)

    async def hindrance(self, namespace: str, pod_uid: str) -> Problem | None:
        """Why a node can't start a pod that it has taken, as its events tell.

        Raises:
            ClusterError: they can't be read.
        """
        selector = f"involvedObject.uid={pod_uid},type=Warning"
        found = await self._call("GET", f"{_core(namespace)}/events", {"fieldSelector": selector})
        told = [
            (_moment(one), f"{one['reason']}: {one.get('message', '')}")
            for one in found["items"]
            if one["reason"] in _HINDRANCES
        ]
        return Problem(Reason.CONTAINER_NOT_CREATED, max(told)[1]) if told else None

    # -- writing --------------------------------------------------------------------------------------------

    async def apply_status(self, namespace: str, name: str, uid: str, status: Mapping[str, Any]) -> Any:
        """Write the status of an AdaScaleJob.

        Raises:
            ClusterError: it can't be written; with status 404 or 409 it is no more that one.
        """
        body = {
            "apiVersion": names.GROUP_VERSION,
            "kind": names.KIND,
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "status": status,
        }
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        path = f"{_JOBS}/namespaces/{namespace}/{names.PLURAL}/{name}/status"
        return await self._call("PATCH", path, query, body, _APPLY)

    async def create_batch(self, manifest: Mapping[str, Any]) -> Any:
        """Make a Job.

        Raises:
            ClusterError: it can't be made; with status 409 there is one already.
        """
        path = f"{_batch(manifest['metadata']['namespace'])}/jobs"
        return await self._call("POST", path, _MANAGED, manifest)

    async def patch_batch(self, namespace: str, name: str, uid: str, patch: Mapping[str, Any]) -> Any:
        """Change a Job.

        Raises:
            ClusterError: it can't be changed; with status 409 it is no more that one.
        """
        body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": uid}}
        return await self._call("PATCH", f"{_batch(namespace)}/jobs/{name}", _MANAGED, body, _MERGE)

    async def remove_batch(self, namespace: str, name: str, uid: str) -> None:
        """Delete a Job, which is gone when its pods are.

        Raises:
            ClusterError: it can't be deleted.
        """
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        await self._remove(f"{_batch(namespace)}/jobs/{name}", body)

    async def create_claim(self, manifest: Mapping[str, Any]) -> None:
        """Make a PersistentVolumeClaim, if there is none of that name.

        Raises:
            ClusterError: it can't be made.
        """
        path = f"{_core(manifest['metadata']['namespace'])}/persistentvolumeclaims"
        try:
            await self._call("POST", path, _MANAGED, manifest)
        except ClusterError as error:
            if error.status != 409:
                raise

    async def remove_pod(self, namespace: str, name: str) -> None:
        """Delete a pod by force, also where the Job controller still keeps it.

        Raises:
            ClusterError: it can't be deleted.
        """
        path = f"{_core(namespace)}/pods/{name}"
        with _unless_gone():
            await self._release(path, await self._call("DELETE", path, body={"gracePeriodSeconds": 0}))

    async def release_pod(self, namespace: str, name: str) -> None:
        """Have the Job controller keep a pod no longer.

        Raises:
            ClusterError: it can't be changed.
        """
        path = f"{_core(namespace)}/pods/{name}"
        with _unless_gone():
            await self._release(path, await self._call("GET", path))

    async def remove_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete an AdaScaleJob, and with it all that belongs to it.

        Raises:
            ClusterError: it can't be deleted.
        """
        path = f"{_JOBS}/namespaces/{namespace}/{names.PLURAL}/{name}"
        await self._remove(path, {"propagationPolicy": "Background", "preconditions": {"uid": uid}})

    async def tell(
        self, namespace: str, name: str, uid: str, event: Event, moment: float, reporter: str
    ) -> None:
        """Post an event about an AdaScaleJob.

        Raises:
            ClusterError: it can't be posted.
        """
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name}.", "namespace": namespace},
            "involvedObject": {
                "apiVersion": names.GROUP_VERSION,
                "kind": names.KIND,
                "name": name,
                "namespace": namespace,
                "uid": uid,
            },
            "reason": event.reason,
            "message": event.message,
            "type": "Warning" if event.warning else "Normal",
            "firstTimestamp": timestamp(moment),
            "lastTimestamp": timestamp(moment),
            "count": 1,
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": reporter,
        }
        await self._call("POST", f"{_core(namespace)}/events", _MANAGED, body)

    # -- underneath -----------------------------------------------------------------------------------------

    def _path_of(self, kind: Kind) -> str:
        if kind is Kind.NODES:
            return "/api/v1/nodes"
        group = {Kind.ADASCALEJOBS: _JOBS, Kind.JOBS: "/apis/batch/v1", Kind.PODS: "/api/v1"}[kind]
        scope = f"/namespaces/{self._namespace}" if self._namespace else ""
        return f"{group}{scope}/{kind}"

    async def _release(self, path: str, pod: Mapping[str, Any]) -> None:
        kept = pod["metadata"].get("finalizers") or []
        if TRACKING in kept:
            others = [one for one in kept if one != TRACKING] or None
            version = pod["metadata"]["resourceVersion"]
            patch = {"metadata": {"finalizers": others, "resourceVersion": version}}
            await self._call("PATCH", path, _MANAGED, patch, _MERGE)

    async def _remove(self, path: str, body: Mapping[str, Any]) -> None:
        with _unless_gone():
            await self._call("DELETE", path, body=body)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        self.calls += 1
        try:
            request = await self._api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._api.call_api(*request, _request_timeout=TIMEOUT)
            content = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError, ApiException) as error:
            # A timeout has no words of its own.
            reason = str(error) or f"nothing came within {TIMEOUT:.0f} s"
            raise ClusterError(f"the API server does not answer: {reason}") from error
        if answer.status >= 300:
            told = _told(content)
            raise ClusterError(f"the API server refuses {method} {path}: {told}", answer.status, told)
        return json.loads(content) if content else None


_MANAGED = {"fieldManager": names.FIELD_MANAGER}
_HINDRANCES = frozenset(
    {"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox", "NetworkNotReady"}
)
"""Reasons of events by which a node says why it has not started any container; pods' statuses don't."""


def _core(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}"


def _batch(namespace: str) -> str:
    return f"/apis/batch/v1/namespaces/{namespace}"


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Leave an object alone that is gone, changed, or another by now: the next cycle sees what is left."""
    try:
        yield
    except ClusterError as error:
        if error.status not in {404, 409}:
            raise


def _refused(message: str) -> Reason:
    return Reason.QUOTA_EXCEEDED if "exceeded quota" in message else Reason.PODS_REFUSED


def _moment(event: Mapping[str, Any]) -> float:
    """When an event was last seen; series have it elsewhere."""
    series = event.get("series") or {}
    told = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return seconds(told) or 0.0


def _told(content: bytes) -> str:
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
