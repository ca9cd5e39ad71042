"""The Kubernetes API, by calls with paths and JSON.

The client's documented methods return typed objects, which drop unknown fields, cost much time to build, and
don't support all content types. So `_call` uses `ApiClient.param_serialize` and `ApiClient.call_api`, the
base of these methods, which take and return bytes and are not documented. Nothing else uses undocumented
parts of the client. Tried with kubernetes 37.0.2 (`kubernetes.aio`), the version in `requirements.lock`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.pods import END_DEADLINE, Cached, cached_fields
from adascale_controller.operator.types.actions import Event, Stop, StoppedPod
from adascale_controller.operator.types.kubernetes import ApiObject, Resource, timestamp
from adascale_controller.operator.types.settings import KUEUE_GROUP, POD_GROUP_VERSION
from adascale_core import names
from adascale_core.errors import AdaScaleError

logger = logging.getLogger(__name__)

TIMEOUT = 10.0
"""Seconds until a call fails."""
TOO_MANY_REQUESTS = 429
MAX_TRIES = 3
"""How often a call is made that the API server rejects because of too many requests."""
MAX_RETRY_AFTER = 10.0
"""Seconds that all calls wait after such an answer, at most, whatever it requests."""
MAX_RETRY_AFTER_OF_LEASE = 1.0
"""The same for the calls that renew the lease, which has a deadline."""
PAGE_SIZE = 500
"""Objects per page of a list."""

_GROUPS = {
    names.PLURAL: f"/apis/{names.GROUP_VERSION}",
    "leases": "/apis/coordination.k8s.io/v1",
    "podgroups": f"/apis/{POD_GROUP_VERSION}",
}
"""The groups of resources that are not of the core."""
_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"


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


class KubernetesCluster:
    """The Kubernetes API. Each call may raise `ApiServerError`."""

    def __init__(
        self,
        api: ApiClient,
        namespace: str | None,
        on_request: Callable[[str, int | None], None] = lambda _method, _status: None,
        max_retry_after: float = MAX_RETRY_AFTER,
    ) -> None:
        self._max_retry_after = max_retry_after
        self._api = api
        self._on_request = on_request
        self._namespace = namespace
        self._paused_until = 0.0

    # -- reading --------------------------------------------------------------------------------------------

    async def list(self, resource: Resource) -> tuple[Sequence[Cached], int]:
        """Return all objects of a resource, as they are cached, and the version of the list."""
        items: list[Cached] = []
        version = ""
        async for page in self._pages(self._list_path(resource)):
            for raw in page["items"]:
                try:
                    # Whole, all pods of a large cluster would take more memory than everything else.
                    items.append(cached_fields(resource, raw))
                except Exception:
                    # Broad on purpose: an object that no schema rules out must not stop all jobs.
                    logger.exception("%s %s can't be read, and is left out", resource, raw.get("metadata"))
            version = page["metadata"]["resourceVersion"]
        return items, int(version)

    async def _pages(self, path: str) -> AsyncIterator[ApiObject]:
        query = {"limit": str(PAGE_SIZE)}
        while True:
            page = await self._call("GET", path, query)
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def may_list_nodes(self) -> bool:
        """Whether the operator may list and watch nodes."""
        return await self._may("list", Resource.NODES) and await self._may("watch", Resource.NODES)

    async def admit_pod(self, manifest: ApiObject) -> ApiObject:
        """Return a pod as admission makes it, by a dry run: nothing is created.

        `ApiServerError.status` is 400 if a webhook does not support dry runs, 403 if a quota or a policy
        rejects the pod.
        """
        path = _path("pods", manifest["metadata"]["namespace"])
        query = {**_FIELD_MANAGER, "dryRun": "All"}
        admitted: ApiObject = await self._call("POST", path, query, manifest)
        return admitted

    async def get(self, plural: str, namespace: str, name: str) -> ApiObject | None:
        """Return an object of a resource. None if it does not exist."""
        return await self._object({404}, "GET", _path(plural, namespace, name))

    async def list_events(self, namespace: str, field_selector: str) -> Sequence[ApiObject]:
        """Return the Events of a namespace that match a selector."""
        page = await self._call("GET", _path("events", namespace), {"fieldSelector": field_selector})
        events: Sequence[ApiObject] = page["items"]
        return events

    async def list_kueue(self, plural: str, namespace: str | None = None) -> Sequence[ApiObject] | None:
        """Return all objects of a resource of Kueue, in the version that the API server prefers.

        None if the cluster has no Kueue, or if the operator may not list them.
        """
        try:
            version = await self._kueue_version()
            scope = f"/namespaces/{namespace}" if namespace is not None else ""
            path = f"/apis/{KUEUE_GROUP}/{version}{scope}/{plural}"
            pages = [page async for page in self._pages(path)]
        except ApiServerError as error:
            if error.status in {403, 404}:
                return None
            raise
        return [raw for page in pages for raw in page["items"]]

    # -- writing --------------------------------------------------------------------------------------------

    async def apply_status(self, job: AdaScaleJob, status: ApiObject) -> ApiObject:
        """Write the status of an AdaScaleJob by server-side apply, and return the AdaScaleJob.

        `ApiServerError.status` is 404 or 409 if there is no AdaScaleJob with this uid.
        """
        body = {
            "apiVersion": names.GROUP_VERSION,
            "kind": names.KIND,
            "metadata": {"name": job.name, "namespace": job.namespace, "uid": job.uid},
            "status": status,
        }
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        path = f"{_path(names.PLURAL, *job.key)}/status"
        written: ApiObject = await self._call("PATCH", path, query, body, _APPLY_PATCH)
        return written

    async def create(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        """Create an object and return it. None if one of this name exists."""
        # Unknown fields of a template are rejected. The API server would drop them.
        query = {**_FIELD_MANAGER, "fieldValidation": "Strict"}
        path = _path(plural, manifest["metadata"]["namespace"])
        return await self._object({409}, "POST", path, query, manifest)

    async def replace(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        """Replace an object and return it. None if it has another version than the manifest, or is gone."""
        path = _path(plural, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        return await self._object({404, 409}, "PUT", path, _FIELD_MANAGER, manifest)

    async def apply_config_map(self, manifest: ApiObject) -> None:
        """Create or change a ConfigMap by server-side apply."""
        path = _path("configmaps", manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        await self._call("PATCH", path, {**_FIELD_MANAGER, "force": "true"}, manifest, _APPLY_PATCH)

    async def stop_pod(self, namespace: str, pod: StoppedPod) -> bool:
        """Delete or end a pod. Returns whether it exists, and not another one of its name."""
        path = _path("pods", namespace, pod.name)
        if pod.how is Stop.END:
            patch = {"metadata": {"uid": pod.uid}, "spec": {"activeDeadlineSeconds": END_DEADLINE}}
            calls = self._call("PATCH", path, _FIELD_MANAGER, patch, _MERGE_PATCH)
        else:
            grace = {"gracePeriodSeconds": 0} if pod.how is Stop.FORCE else {}
            calls = self._call("DELETE", path, body={"preconditions": {"uid": pod.uid}, **grace})
        with _ignore_missing():
            await calls
            return True
        return False

    async def delete_workload(self, namespace: str, name: str) -> None:
        """Delete a Workload of Kueue."""
        with _ignore_missing():
            version = await self._kueue_version()
            path = f"/apis/{KUEUE_GROUP}/{version}/namespaces/{namespace}/workloads/{name}"
            await self._call("DELETE", path, body={})

    async def delete_job(self, job: AdaScaleJob) -> None:
        """Delete an AdaScaleJob and all objects that it owns."""
        path = _path(names.PLURAL, *job.key)
        body = {"propagationPolicy": "Background", "preconditions": {"uid": job.uid}}
        with _ignore_missing():
            await self._call("DELETE", path, body=body)

    async def record_event(self, job: AdaScaleJob, event: Event, now: float, reporter: str) -> None:
        """Create an Event about an AdaScaleJob."""
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{job.name}.", "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": names.GROUP_VERSION,
                "kind": names.KIND,
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
            },
            "reason": event.reason,
            "message": event.message,
            "type": "Warning" if event.warning else "Normal",
            "firstTimestamp": timestamp(now),
            "lastTimestamp": timestamp(now),
            "count": 1,
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": reporter,
        }
        await self._call("POST", _path("events", job.namespace), _FIELD_MANAGER, body)

    # -- calls ----------------------------------------------------------------------------------------------

    async def _may(self, verb: str, resource: Resource) -> bool:
        attributes = {"verb": verb, "resource": str(resource), "group": ""}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = await self._call("POST", path, body=review)
        return bool(answer["status"].get("allowed"))

    def _list_path(self, resource: Resource) -> str:
        return _path(resource, self._namespace if resource is not Resource.NODES else None)

    async def _kueue_version(self) -> str:
        return str((await self._call("GET", f"/apis/{KUEUE_GROUP}"))["preferredVersion"]["version"])

    async def _object(self, absent: Collection[int], *call: Any) -> ApiObject | None:
        """Return the object in an answer. None for an HTTP status in `absent`."""
        try:
            found: ApiObject = await self._call(*call)
        except ApiServerError as error:
            if error.status not in absent:
                raise
            return None
        return found

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: ApiObject | None = None,
        content_type: str = "application/json",
    ) -> Any:
        for _ in range(MAX_TRIES):
            while (pause := self._paused_until - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            try:
                request = await self._api.param_serialize(
                    method,
                    path,
                    query_params=list((query or {}).items()),
                    header_params={"Accept": "application/json", "Content-Type": content_type},
                    body=body,
                    auth_settings=["BearerToken"],
                )
                answer = await self._api.call_api(*request, _request_timeout=TIMEOUT)
                content: bytes = await answer.read()
            except (TimeoutError, aiohttp.ClientError, OSError, ApiException) as error:
                self._on_request(method, None)
                # The message of a TimeoutError is empty.
                reason = str(error) or f"no answer within {TIMEOUT:.0f} s"
                raise ApiServerError(f"the API server does not answer: {reason}") from error
            self._on_request(method, answer.status)
            if answer.status != TOO_MANY_REQUESTS:
                break
            # For all calls: the API server limits the operator's share of its work.
            retry_after = answer.headers.get("Retry-After", "")
            pause = min(float(retry_after) if retry_after.isdecimal() else 1.0, self._max_retry_after)
            self._paused_until = max(self._paused_until, time.monotonic() + pause)
        if answer.status >= 300:
            reply = _message(content)
            raise ApiServerError(f"the API server rejects {method} {path}: {reply}", answer.status, reply)
        try:
            return json.loads(content) if content else None
        except ValueError as error:
            # A proxy between here and the API server has answered.
            raise ApiServerError(f"{method} {path}: unexpected answer {content[:200]!r}") from error


_FIELD_MANAGER = {"fieldManager": names.FIELD_MANAGER}


def _path(plural: str, namespace: str | None, name: str = "") -> str:
    """Return the path of a resource, in a namespace or in all, or of an object of it."""
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"{_GROUPS.get(plural, '/api/v1')}{scope}/{plural}" + (f"/{quote(name)}" if name else "")


@contextmanager
def _ignore_missing() -> Iterator[None]:
    """Ignore that an object is deleted, changed or replaced: the next cycle observes it."""
    try:
        yield
    except ApiServerError as error:
        if error.status not in {404, 409}:
            raise


def _message(content: bytes) -> str:
    """Return the message of an API server's Status object, or the beginning of any other content."""
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
