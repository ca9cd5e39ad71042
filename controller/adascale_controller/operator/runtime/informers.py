"""Watches the cluster with kopf and keeps the object cache up to date.

The handlers are for plain events, not for creation or updates: with those, kopf adds finalizers and
annotations to the objects, and a finalizer blocks their deletion where no operator runs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain, repeat
from typing import Any

import kopf

from adascale_controller.operator.apply.kubernetes_cluster import PAGE_SIZE
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.runtime.settings import OperatorSettings
from adascale_controller.operator.types.kubernetes import Resource
from adascale_core import names

ERROR_BACKOFFS = (1, 1, 2, 3, 5)
"""Seconds between tries while the API server is unreachable. The last value repeats without end."""
INACTIVITY_TIMEOUT = 60.0
"""Seconds without data after which a watch is restarted: its connection may be lost without an error."""
IDLE_TIMEOUT = 0.1
"""Seconds after which kopf forgets an object without events. Until then it keeps its last version whole."""

_SELECTORS: Mapping[Resource, tuple[str, ...]] = {
    Resource.ADASCALEJOBS: (names.API_GROUP, names.API_VERSION, names.PLURAL),
    Resource.JOBS: ("batch", "v1", "jobs"),
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
