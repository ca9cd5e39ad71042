"""The control loop: runs the four phases for all jobs, in cycles."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from adascale_controller.operator.apply.applier import Applier
from adascale_controller.operator.apply.cluster import Cluster, ClusterError
from adascale_controller.operator.apply.service import AllocationService
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.observer import Observer, Snapshot, jobs_with_pods, observe
from adascale_controller.operator.reconcile.job_phase import Assessment, JobPhase, assess
from adascale_controller.operator.reconcile.reconciler import reconcile
from adascale_controller.operator.runtime.deregistration import Deregistration
from adascale_controller.operator.runtime.error_isolation import ErrorIsolation
from adascale_controller.operator.runtime.job_follower import JobFollower
from adascale_controller.operator.runtime.lookup_fetcher import LookupFetcher
from adascale_controller.operator.runtime.metrics import OperatorMetrics
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.runtime.settings import OperatorSettings
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.actions import Actions
from adascale_controller.operator.types.kubernetes import ApiObject, Resource, object_key
from adascale_controller.operator.types.workload import PodSettings
from adascale_core.decision import Decision
from adascale_core.messages import AllocationView
from adascale_core.views import DecisionView, JobView

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two cycles while no change is reported."""
PAUSE = 0.2
"""The minimum number of seconds between two cycles."""
MAX_PAUSE = 2.0
"""The maximum number of seconds that the processor time of a cycle delays the next one."""
RESYNC_INTERVAL = 300.0
"""Seconds between two lists of all objects."""
STALE_RESYNC_INTERVAL = 5.0
"""Seconds between two lists of all objects while the caches are known to be stale."""
MAX_CONCURRENT = 8
"""Jobs whose actions are applied at the same time."""
MAX_TELEMETRY_WRITES = 50
"""Statuses in which only telemetry has changed that a cycle writes."""
SLICE = 50
"""Jobs after which the lease, the probes and the watches get their turn."""
MAX_IDLE_SHARE = 0.05
"""The share of the time that cycles take in which no object and no generation has changed."""


class ControlLoop:
    """Keeps all AdaScaleJobs in their desired state.

    Args:
        cache: the cache of watched objects.
        cluster: the API server.
        service: the metrics service.
        settings: of the operator.
        resources: the watched resources.
        reader: the metrics service over connections of its own, to follow its jobs. None for `service`.
        metrics: counts what is done. None for metrics that no one reads.
        on_progress: is called whenever the actions for a job are applied, and after each cycle.
        clock: returns seconds since 1970.
    """

    def __init__(
        self,
        cache: ObjectCache,
        cluster: Cluster,
        service: AllocationService,
        settings: OperatorSettings,
        resources: Collection[Resource],
        *,
        reader: AllocationService | None = None,
        metrics: OperatorMetrics | None = None,
        on_progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._cluster = cluster
        self._resources = resources
        self._on_progress = on_progress
        self._clock = clock
        self._metrics = metrics or OperatorMetrics()
        self._errors = ErrorIsolation(self._metrics.job_errors.inc)
        self._deregistration = Deregistration(service, settings.namespace)
        self._observer = Observer(PodSettings(api_url=settings.pod_api_url or settings.api_url))
        self._fetcher = LookupFetcher(cluster, cache.changed.set)
        self._scheduler = Scheduler()
        self._follower = JobFollower(reader or service, cache.changed.set)
        self._applier = Applier(
            cluster, service, self._store_written, settings.identity, self._expect_allocated
        )
        self._next_full_cycle = float("-inf")

    async def run(self) -> None:
        """Run cycles until cancelled."""
        await asyncio.to_thread(self._follower.refresh)
        self._follower.start()
        try:
            await self._run()
        finally:
            self._follower.stop()

    async def _run(self) -> None:
        listed_at = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(INTERVAL):
                    await self._cache.changed.wait()
            except TimeoutError:
                pass
            has_news = self._cache.changed.is_set() or time.monotonic() >= self._next_full_cycle
            self._cache.changed.clear()
            interval = STALE_RESYNC_INTERVAL if self._errors.cache_is_stale else RESYNC_INTERVAL
            if time.monotonic() - listed_at > interval:
                listed_at = time.monotonic()
                self._errors.cache_is_stale = False
                await self._resync()
            if has_news:
                await self._follower.caught_up()
                await self._timed_cycle(self._follower.views)
            self._on_progress()
            await asyncio.sleep(PAUSE)

    async def list_all(self) -> None:
        """Fill the cache.

        Raises:
            ClusterError: the API server does not answer, or rejects a list.
        """
        for resource in self._resources:
            objects, version = await self._cluster.list(resource)
            self._cache.replace(resource, objects, version)

    async def cycle(self) -> None:
        """Read all jobs of the metrics service, and observe, schedule, reconcile and apply all jobs once."""
        await asyncio.to_thread(self._follower.refresh)
        await self._cycle(self._follower.views)

    async def _timed_cycle(self, views: Mapping[str, JobView] | None) -> None:
        begun = time.process_time()
        with self._metrics.cycle_duration.time():
            await self._cycle(views)
        used = time.process_time() - begun
        self._metrics.cycle_cpu.inc(used)
        interval = max(INTERVAL, (used + self._follower.refresh_cost) / MAX_IDLE_SHARE)
        self._follower.refresh_interval = interval
        # Each read of all jobs brings the next cycle; without one, time alone may change what is to be done.
        self._next_full_cycle = time.monotonic() + interval + INTERVAL
        # At most half of the time, so that changes that arrive all the time do not take a whole core.
        await asyncio.sleep(min(used, MAX_PAUSE))

    async def _cycle(self, views: Mapping[str, JobView] | None) -> None:
        snapshot = self._snapshot()
        self._retain(snapshot)
        jobs = await self._observe(snapshot, views)
        assessments = {}
        async for job in _in_slices(jobs):
            with self._errors.isolate(job.resource.id):
                assessments[job.resource.id] = assess(job)
        runnable = [
            job
            for job in jobs
            if job.resource.id in assessments and assessments[job.resource.id].phase is JobPhase.RUNNABLE
        ]
        # In a thread, so that the lease, the probes and the watches go on.
        decisions = await asyncio.to_thread(
            self._scheduler.schedule, runnable, snapshot.nodes, snapshot.pods, self._errors.isolate
        )
        self._metrics.set_jobs(assessment.phase for assessment in assessments.values())
        self._metrics.waiting.set(sum(decision.replicas == 0 for decision in decisions.values()))
        urgent, telemetry = [], []
        async for job in _in_slices(jobs):
            with self._errors.isolate(job.resource.id):
                actions = self._reconcile(job, assessments, decisions)
                if actions is None:
                    continue
                if actions.are_urgent:
                    urgent.append((job, actions))
                elif self._applier.telemetry_due(job, actions):
                    telemetry.append((job, actions))
                else:
                    self._errors.clear(job.resource.id)
        await self._apply(urgent)
        await self._apply(self._applier.oldest_telemetry(telemetry, MAX_TELEMETRY_WRITES))
        await self._store_decisions(service_answers=views is not None)
        if views is not None:
            present = {".".join(object_key(raw)) for raw in self._cache.all(Resource.ADASCALEJOBS)}
            await self._deregistration.deregister_deleted(
                views, present, lambda: jobs_with_pods(self._cache.all(Resource.PODS))
            )

    def _reconcile(
        self, job: ObservedJob, assessments: Mapping[str, Assessment], decisions: Mapping[str, Decision]
    ) -> Actions | None:
        """Return the actions for a job; None if an error kept it from being scheduled: it stays as it is."""
        assessment, decision = assessments.get(job.resource.id), decisions.get(job.resource.id)
        if assessment is None or (decision is None and assessment.phase is JobPhase.RUNNABLE):
            return None
        failed_placement = self._scheduler.failed_placement(job)
        failing_count = self._scheduler.failing_count(job)
        return reconcile(job, assessment, decision, failed_placement, failing_count)

    async def _store_decisions(self, *, service_answers: bool) -> None:
        """Store the explained decisions with the metrics service, or have them explained again."""

        async def store(decision: DecisionView) -> None:
            if not service_answers or not await self._applier.store_decision(decision):
                self._scheduler.explain_again(decision.job)

        await asyncio.gather(*(store(each) for each in self._scheduler.explained.values()))

    async def _apply(self, planned: Iterable[tuple[ObservedJob, Actions]]) -> None:
        """Carry out the actions for these jobs, `MAX_CONCURRENT` jobs at a time."""
        limit = asyncio.Semaphore(MAX_CONCURRENT)

        async def apply(job: ObservedJob, actions: Actions) -> None:
            async with limit:
                if actions.allocate is not None:
                    current = job.current_allocation
                    before = 0 if current is None else current.replicas
                    self._metrics.count_allocation(before, actions.allocate.replicas)
                with self._errors.isolate(job.resource.id):
                    applied = await self._applier.apply(job, actions)
                    if applied.claim_created:
                        self._fetcher.expire_claim(job.resource.uid)
                    if applied.template_rejection is not None:
                        self._observer.reject(job.resource, f"spec.template: {applied.template_rejection}")
                        self._cache.changed.set()
                    self._errors.clear(job.resource.id)
                self._metrics.pending.dec()
                self._on_progress()

        jobs = list(planned)
        self._metrics.pending.set(len(jobs))
        await asyncio.gather(*(apply(job, actions) for job, actions in jobs))

    def _expect_allocated(self, job_id: str, view: AllocationView) -> None:
        self._follower.expect(job_id, view.version)

    def _store_written(self, resource: Resource, raw: ApiObject, is_news: bool) -> None:
        self._cache.put(resource, raw, is_news=is_news)

    async def _observe(self, snapshot: Snapshot, views: Mapping[str, JobView] | None) -> list[ObservedJob]:
        cached = self._observer.read(snapshot, self._errors.isolate)
        await self._fetcher.fetch(cached, self._clock())
        jobs = []
        async for job in _in_slices(cached):
            with self._errors.isolate(job.resource.id):
                lookups = self._fetcher.results(job)
                if lookups is not None:
                    jobs.append(observe(job, lookups, views, self._clock()))
        return jobs

    def _snapshot(self) -> Snapshot:
        watches_nodes = Resource.NODES in self._resources
        return Snapshot(
            adascalejobs=self._cache.all(Resource.ADASCALEJOBS),
            indexed_jobs=self._cache.all(Resource.JOBS),
            pods=self._cache.all(Resource.PODS),
            nodes=self._cache.all(Resource.NODES) if watches_nodes else None,
        )

    def _retain(self, snapshot: Snapshot) -> None:
        """Have each phase drop its memory of jobs that are deleted."""
        uids = snapshot.job_uids
        self._fetcher.retain(uids)
        self._scheduler.retain(uids)
        self._applier.retain(uids)
        self._errors.retain({".".join(object_key(raw)) for raw in snapshot.adascalejobs})

    async def _resync(self) -> None:
        try:
            await self.list_all()
        except ClusterError as error:
            logger.warning("%s; the watches continue", error)


T = TypeVar("T")


async def _in_slices(items: Sequence[T]) -> AsyncIterator[T]:
    """Yield items, and let other tasks run after each `SLICE` of them."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % SLICE == 0:
            await asyncio.sleep(0)
