"""The operator at work: looks at all jobs, decides, and acts; see `docs/operator.md`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.operator.acting import Actor
from adascale_controller.operator.apart import Apart
from adascale_controller.operator.cluster import Cluster, ClusterError
from adascale_controller.operator.deciding import decide_all
from adascale_controller.operator.looking import Look, Looker
from adascale_controller.operator.objects import PodSettings
from adascale_controller.operator.settings import OperatorSettings
from adascale_controller.operator.stage import Kind as StageKind
from adascale_controller.operator.store import Kind, Store
from adascale_core.views import JobView

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two cycles while nothing is told to have changed."""
PAUSE = 0.2
"""Seconds between two cycles at least."""
RESYNC_INTERVAL = 300.0
"""Seconds between two lists of everything."""
STALE_INTERVAL = 5.0
"""Seconds between two lists where the API server has something else than what was seen."""
REMEMBERED = 1000
"""Jobs that are remembered to be forgotten by the service, the latest."""
AT_ONCE = 8
"""Jobs that are acted upon at the same time."""


class Controller:
    """Keeps all AdaScaleJobs as they should be.

    Args:
        store: the objects as they were last seen.
        cluster: the Kubernetes API.
        service: the metrics service.
        settings: of the operator.
        kinds: what is watched.
        alive: called with each cycle.
        clock: the time, in seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        service: MetricsServiceClient,
        settings: OperatorSettings,
        kinds: Collection[Kind],
        *,
        alive: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._service = service
        self._settings = settings
        self._kinds = kinds
        self._alive = alive
        self._clock = clock
        self._apart = Apart()
        pod_settings = PodSettings(api_url=settings.pod_api_url or settings.api_url)
        self._looker = Looker(store, cluster, pod_settings, self._apart, clock)
        self._actor = Actor(store, cluster, service, self._looker.specs, self._apart, settings.identity)
        self._service_was_up = True
        self._forgotten: deque[str] = deque(maxlen=REMEMBERED)

    async def run(self) -> None:
        """Go on until cancelled."""
        listed_at = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(INTERVAL):
                    await self._store.changed.wait()
            except TimeoutError:
                pass
            self._store.changed.clear()
            if time.monotonic() - listed_at > (STALE_INTERVAL if self._apart.stale else RESYNC_INTERVAL):
                listed_at = time.monotonic()
                self._apart.stale = False
                await self._list_again()
            await self.cycle()
            self._alive()
            await asyncio.sleep(PAUSE)

    async def list_all(self) -> None:
        """Fill the store.

        Raises:
            ClusterError: the API server does not answer, or refuses.
        """
        for kind in self._kinds:
            items, version = await self._cluster.list(kind)
            self._store.replace(kind, items, version)

    async def cycle(self) -> None:
        """Look at everything once, and do what is to be done."""
        views = await self._ask_service()
        looks = await self._looker.look(views)
        nodes = self._store.all(Kind.NODES) if Kind.NODES in self._kinds else None
        decisions = decide_all(looks, nodes, self._store.all(Kind.PODS), self._apart)
        limit = asyncio.Semaphore(AT_ONCE)

        async def carry_out(look: Look) -> None:
            async with limit:
                decision = decisions.get(look.seen.job.id)
                # Where something is wrong with a job that may run, so that nothing is decided, it goes on.
                if decision is not None or look.stage.kind is not StageKind.RUN:
                    await self._actor.carry_out(look, decision)

        await asyncio.gather(*(carry_out(look) for look in looks))
        if views is not None:
            await self._have_service_forget(views)

    async def _list_again(self) -> None:
        try:
            await self.list_all()
        except ClusterError as error:
            logger.warning("%s; watching goes on", error)

    async def _ask_service(self) -> dict[str, JobView] | None:
        try:
            views = await asyncio.to_thread(self._service.list_jobs)
        except ServiceError as error:
            if self._service_was_up:
                logger.warning("%s; training goes on, and nothing is decided meanwhile", error)
            self._service_was_up = False
            return None
        if not self._service_was_up:
            logger.warning("The metrics service answers again")
        self._service_was_up = True
        return {view.id: view for view in views}

    async def _have_service_forget(self, views: Mapping[str, JobView]) -> None:
        """Have the service forget the jobs that the cluster has no more."""
        present = {
            f"{raw['metadata']['namespace']}.{raw['metadata']['name']}"
            for raw in self._store.all(Kind.ADASCALEJOBS)
        }
        gone = [view for view in views.values() if view.id not in present and self._is_to_forget(view)]
        # Most cycles find none: the pods are looked through only where one may still be ending.
        ending = {f"{namespace}.{name}" for namespace, name in self._looker.pods_by_job()} if gone else set()
        for view in gone:
            if view.id in ending:
                continue
            try:
                await asyncio.to_thread(self._service.delete_job, view.id)
                self._forgotten.append(view.id)
                logger.info("%s is deleted, and forgotten by the metrics service", view.id)
            except ServiceError as error:
                logger.warning("%s: %s", view.id, error)

    def _is_to_forget(self, view: JobView) -> bool:
        """Whether a job that the cluster has no more is the operator's to forget.

        What was only ever posted to by hand is not, but a report that was late, and made a job known again
        that had been forgotten, is.
        """
        ours = self._settings.namespace in (None, view.id.partition(".")[0])
        known = view.spec is not None or view.desired is not None or bool(view.replicas)
        return ours and (known or view.id in self._forgotten)
