"""The cache of watched objects, and the watches of kopf that keep it up to date.

The handlers of kopf are for plain events, not for creation or updates: with those, kopf adds finalizers and
annotations to the objects, and a finalizer blocks their deletion where no operator runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import kopf

from adascale_controller.operator.apply.kubernetes_cluster import PAGE_SIZE
from adascale_controller.operator.observe.pods import Cached, Pod, cached_fields
from adascale_controller.operator.types.kubernetes import ApiObject, JobKey, Resource, object_key
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_core import names

_NO_PODS: Mapping[JobKey, Pod] = {}


@dataclass(frozen=True)
class CacheChanges:
    """What has changed in the cache."""

    jobs: Collection[JobKey]  # the jobs one of whose objects has changed, by namespace and name
    # the other jobs with an object that has changed in nothing that a reader has to look at now
    no_news: Collection[JobKey]
    resources: bool  # whether the free resources may have changed: a node, or a pod that belongs to no job


class ObjectCache:
    """The newest version of each watched object, with what the operator reads of it (`cached_fields`).

    Versions come from watches, lists and answers to writes, and may come late: only a newer one replaces an
    object. (The API server numbers the versions of a resource in order: KEP-5504.) Not thread-safe.
    """

    def __init__(self) -> None:
        self._objects: dict[Resource, dict[JobKey, Any]] = {resource: {} for resource in Resource}
        self._deleted: dict[Resource, dict[JobKey, int]] = {resource: {} for resource in Resource}
        """Versions in which objects were deleted: an older version must not bring them back."""
        self._pods: dict[JobKey | None, dict[JobKey, Pod]] = {}
        """The pods of each job, and of no job."""
        self._changed_jobs: dict[JobKey, None] = {}
        self._no_news: dict[JobKey, None] = {}
        self._resources_changed = False
        self.changed = asyncio.Event()
        """Is set by each change that has to be looked at now. The reader clears it."""

    def all(self, resource: Resource) -> list[ApiObject]:
        """Return all objects of a resource, by namespace and name."""
        objects = self._objects[resource]
        return [objects[key] for key in sorted(objects)]

    def get(self, resource: Resource, key: JobKey) -> ApiObject | None:
        """Return an object by namespace and name. None if it does not exist."""
        found: ApiObject | None = self._objects[resource].get(key)
        return found

    def keys(self, resource: Resource) -> Collection[JobKey]:
        """Return namespace and name of all objects of a resource."""
        return self._objects[resource].keys()

    def pods_of(self, job: JobKey | None) -> list[Pod]:
        """Return the pods of a job, or all that belong to no job, by namespace and name."""
        pods = self._pods.get(job, _NO_PODS)
        return [pods[key] for key in sorted(pods)]

    def jobs_with_pods(self) -> list[JobKey]:
        """Return namespace and name of the jobs that have pods, whether they exist or not."""
        return [job for job in self._pods if job is not None]

    @property
    def has_changes(self) -> bool:
        """Whether there are changes to look at now that were not taken."""
        return bool(self._changed_jobs) or self._resources_changed

    def take_changes(self) -> CacheChanges:
        """Return what has changed since the last call."""
        no_news = [job for job in self._no_news if job not in self._changed_jobs]
        changes = CacheChanges(self._changed_jobs.keys(), no_news, self._resources_changed)
        self._changed_jobs, self._no_news, self._resources_changed = {}, {}, False
        return changes

    def put(self, resource: Resource, raw: Cached, is_news: bool = True) -> None:
        """Store an object unless the cache has it in a newer version. A new generation always is news."""
        key = _key(raw)
        cached = self._objects[resource].get(key)
        newest = self._deleted[resource].get(key, -1) if cached is None else _version(cached)
        if newest >= _version(raw):
            return
        kept = raw if isinstance(raw, Pod) else cached_fields(resource, raw)
        self._objects[resource][key] = kept
        if isinstance(kept, Pod):
            self._index(key, cached, kept)
        if cached is not None and _is_without_effect(resource, cached, kept):
            return
        if not is_news and cached is not None and _generation(cached) == _generation(kept):
            self._no_news[key] = None
            return
        self._note(resource, key, cached, kept)
        self.changed.set()

    def remove(self, resource: Resource, raw: ApiObject) -> None:
        """Remove a deleted object, of which `raw` is the last version."""
        key = object_key(raw)
        cached = self._objects[resource].get(key)
        if cached is not None and _version(cached) > _version(raw):
            return
        self._deleted[resource][key] = max(self._deleted[resource].get(key, -1), _version(raw))
        self._drop(resource, key)

    def replace(self, resource: Resource, objects: Iterable[Cached], version: int) -> None:
        """Store a list of all objects of a resource as of `version`, and remove what it does not contain."""
        listed = set()
        for raw in objects:
            listed.add(_key(raw))
            self.put(resource, raw)
        for key, cached in list(self._objects[resource].items()):
            if key not in listed and _version(cached) <= version:
                self._drop(resource, key)
        deleted = self._deleted[resource].items()
        self._deleted[resource] = {key: in_version for key, in_version in deleted if in_version > version}

    def _drop(self, resource: Resource, key: JobKey) -> None:
        cached = self._objects[resource].pop(key, None)
        if cached is None:
            return
        if resource is Resource.PODS:
            self._index(key, cached, None)
        self._note(resource, key, cached)
        self.changed.set()

    def _index(self, key: JobKey, before: Pod | None, pod: Pod | None) -> None:
        """Keep the pods by job."""
        if before is not None:
            pods = self._pods[before.job]
            del pods[key]
            if not pods:
                del self._pods[before.job]
        if pod is not None:
            self._pods.setdefault(pod.job, {})[key] = pod

    def _note(self, resource: Resource, key: JobKey, *versions: Cached | None) -> None:
        """Record whom a change concerns."""
        if resource is Resource.ADASCALEJOBS:
            self._changed_jobs[key] = None
        for each in versions:
            if isinstance(each, Pod) and each.job is not None:
                self._changed_jobs[each.job] = None
            elif resource is not Resource.ADASCALEJOBS and each is not None:
                self._resources_changed = True


def _is_without_effect(resource: Resource, before: Cached, after: Cached) -> bool:
    """Whether an object has changed in nothing that concerns any job."""
    if isinstance(before, Pod) and isinstance(after, Pod):
        before_of, after_of = (
            (each.job, each.node, each.has_ended, each.requests) for each in (before, after)
        )
        return after.job is None and before_of == after_of
    if isinstance(before, Pod) or isinstance(after, Pod) or resource is not Resource.NODES:
        return False
    return _without_heartbeat(before) == _without_heartbeat(after)


def _without_heartbeat(node: ApiObject) -> list[object]:
    metadata, status = node["metadata"], node.get("status") or {}
    conditions = {raw["type"]: raw["status"] for raw in status.get("conditions") or ()}
    return [metadata.get("labels"), node.get("spec"), status.get("allocatable"), conditions]


def _generation(known: Cached) -> object:
    return None if isinstance(known, Pod) else known["metadata"].get("generation")


def _version(known: Cached) -> int:
    return known.version if isinstance(known, Pod) else int(known["metadata"]["resourceVersion"])


def _key(known: Cached) -> JobKey:
    return (known.namespace, known.name) if isinstance(known, Pod) else object_key(known)


ERROR_BACKOFFS = (1, 1, 2, 3, 5)
"""Seconds between tries while the API server is unreachable. The last value repeats without end."""
INACTIVITY_TIMEOUT = 60.0
"""Seconds without data after which a watch is restarted: its connection may be lost without an error."""
IDLE_TIMEOUT = 0.1
"""Seconds after which kopf forgets an object without events. Until then it keeps its last version whole."""

_SELECTORS: Mapping[Resource, tuple[str, ...]] = {
    Resource.ADASCALEJOBS: (names.API_GROUP, names.API_VERSION, names.PLURAL),
    Resource.PODS: ("v1", "pods"),
    Resource.NODES: ("v1", "nodes"),
}


class _EndlessBackoffs:
    """The pauses between tries. Each iteration starts with the first pause."""

    def __iter__(self) -> Any:
        return chain(ERROR_BACKOFFS, repeat(ERROR_BACKOFFS[-1]))


class _NoDifferences(kopf.DiffBaseStorage):
    """Has kopf not copy and compare each object, which only handlers of creation and updates need."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return nothing to compare."""
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Return nothing to compare with."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


async def run_informers(
    cache: ObjectCache, resources: Iterable[Resource], settings: OperatorSettings
) -> None:
    """Watch until SIGTERM or SIGINT, or until cancelled."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login)

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.persistence.diffbase_storage = _NoDifferences()
        settings.networking.error_backoffs = _EndlessBackoffs()
        settings.watching.inactivity_timeout = INACTIVITY_TIMEOUT
        settings.watching.chunk_size = PAGE_SIZE
        settings.queueing.idle_timeout = IDLE_TIMEOUT

    for resource in resources:
        kopf.on.event(*_SELECTORS[resource], registry=registry, id=str(resource))(_handler(cache, resource))
    await kopf.operator(
        registry=registry,
        standalone=True,
        clusterwide=settings.namespace is None,
        namespaces=[settings.namespace] if settings.namespace else [],
    )


def _handler(cache: ObjectCache, resource: Resource) -> Callable[..., Awaitable[None]]:
    async def update(event: kopf.RawEvent, **_: Any) -> None:
        raw: Any = event["object"]
        if event["type"] == "DELETED":
            cache.remove(resource, raw)
        else:
            cache.put(resource, raw)

    return update


def _login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


def silence_event_logs() -> None:
    """Raise the level of kopf's log of each event to WARNING."""
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
