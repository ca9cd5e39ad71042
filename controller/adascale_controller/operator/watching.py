"""Watches the cluster with kopf: what changes goes into the store.

Handlers of plain events, not of creation or updates: kopf then writes nothing onto the objects, neither
finalizers nor annotations, so that nothing hangs where no operator runs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain, repeat
from typing import Any

import kopf

from adascale_controller.operator.settings import OperatorSettings
from adascale_controller.operator.store import Kind, Store
from adascale_core import names

ERROR_BACKOFFS = (1, 1, 2, 3, 5)
"""Seconds between tries while the API server is away; the last one is repeated for ever."""
INACTIVITY = 60.0
"""Seconds without a word after which a watch is begun anew: the connection may be gone unnoticed."""

_RESOURCES: Mapping[Kind, tuple[str, ...]] = {
    Kind.ADASCALEJOBS: (names.API_GROUP, names.API_VERSION, names.PLURAL),
    Kind.JOBS: ("batch", "v1", "jobs"),
    Kind.PODS: ("v1", "pods"),
    Kind.NODES: ("v1", "nodes"),
}


class _Forever:
    """The pauses between tries, as often as one iterates over them."""

    def __iter__(self) -> Any:
        return chain(ERROR_BACKOFFS, repeat(ERROR_BACKOFFS[-1]))


async def watch(store: Store, kinds: Iterable[Kind], settings: OperatorSettings) -> None:
    """Watch until asked to end (SIGTERM, SIGINT), or cancelled.

    Args:
        store: where everything goes.
        kinds: what to watch.
        settings: of the operator.
    """
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login)

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.networking.error_backoffs = _Forever()
        settings.watching.inactivity_timeout = INACTIVITY

    for kind in kinds:
        kopf.on.event(*_RESOURCES[kind], registry=registry, id=str(kind))(_handler(store, kind))
    await kopf.operator(
        registry=registry,
        standalone=True,
        clusterwide=settings.namespace is None,
        namespaces=[settings.namespace] if settings.namespace else [],
    )


def _handler(store: Store, kind: Kind) -> Callable[..., Awaitable[None]]:
    async def take_in(event: kopf.RawEvent, **_: Any) -> None:
        raw: Any = event["object"]
        if event["type"] == "DELETED":
            store.remove(kind, raw)
        else:
            store.put(kind, raw)

    return take_in


def _login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


def quieten() -> None:
    """Leave what kopf says about each event to those who debug it."""
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
