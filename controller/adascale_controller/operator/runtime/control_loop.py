"""The control loop: runs the four phases for the jobs that have changed, in cycles."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, TypeVar

from adascale_client import MetricsServiceClient
from adascale_controller.job.phase import Assessment, JobPhase
from adascale_controller.operator.apply.applier import Applier, BeforePods
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, KubernetesCluster
from adascale_controller.operator.observe.observed_job import ObservedJob, Observer, observe
from adascale_controller.operator.observe.pods import Pod, is_deleting, lost_nodes
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.reconcile.reconciler import next_deadline, reconcile
from adascale_controller.operator.runtime.health import OperatorMetrics
from adascale_controller.operator.runtime.job_follower import Deregistration, JobFollower
from adascale_controller.operator.runtime.lookup_fetcher import LookupFetcher, QueueReader
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.runtime.work_queue import ErrorIsolation, WorkQueue
from adascale_controller.operator.schedule.scheduler import DecisionResult, Scheduler
from adascale_controller.operator.types.actions import Actions, Stop
from adascale_controller.operator.types.kubernetes import JobKey, Resource, job_key
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_core.views.decision import DecisionView
from adascale_core.views.jobs import JobView

logger = logging.getLogger(__name__)

T = TypeVar("T")

INTERVAL = 1.0
"""Seconds between two cycles while no change is reported."""
PAUSE = 0.02
"""The minimum number of seconds between two cycles."""
MAX_PAUSE = 2.0
"""The maximum number of seconds for which a cycle delays the next one by the processor time that it took."""
RESYNC_INTERVAL = 300.0
"""Seconds between two lists of all objects."""
STALE_RESYNC_INTERVAL = 5.0
"""Seconds between two lists of all objects while the caches are known to be stale."""
MAX_BACKGROUND = 100
"""Jobs of a cycle that are looked at only for new reports, a status that is not urgent, or by interval."""
MAX_BESIDE_CHANGES = 10
"""The same for a cycle in which someone waits for something else."""
MAX_CONCURRENT = 8
"""Jobs whose actions are applied at the same time."""
MAX_STATUS_WRITES = 2
"""Statuses that are not urgent and are written at the same time, beside the others."""
MAX_EXPLAIN_DELAY = 10.0
"""Seconds for which decisions are not explained at most while changes arrive all the time."""
SLICE = 50
"""Jobs after which the lease, the probes and the watches get their turn."""
MAX_IDLE_SHARE = 0.05
"""The share of the time that the reports of all jobs take, with reading them."""
DECISION_DEADLINE = 60.0
"""Seconds after which a decision is taken to hang: the operator makes no progress."""
DECISION_RETRY_INTERVAL = 10.0
"""Seconds until the next decision after one that has failed."""
APPLY_WAIT = 0.05
"""Seconds that a cycle waits for its writes. Jobs whose writes take longer are left out until these end."""
STORE = "store explained decisions"
"""The name of these calls among those that no cycle waits for."""


@dataclass(frozen=True)
class _TrackedJob:
    """A job as it was looked at last."""

    cached: ObservedJob
    observed: ObservedJob
    assessment: Assessment


@dataclass
class _Writes:
    """Actions that begin as soon as there is room."""

    limit: int  # the number of jobs whose actions are carried out at the same time
    # with the actions that were decided last
    planned: dict[JobKey, tuple[ObservedJob, Actions]] = field(default_factory=dict)
    running: int = 0

    def plan(self, jobs: Iterable[tuple[ObservedJob, Actions]], looked_at: Iterable[JobKey]) -> None:
        """Carry out the actions of these jobs, and no others of jobs `looked_at`.

        A job keeps its place if it is planned already, so its turn comes however often it is looked at.
        """
        planned = {job.resource.key: (job, actions) for job, actions in jobs}
        for key in looked_at:
            if key not in planned:
                self.planned.pop(key, None)
        self.planned.update(planned)

    def take(self, looking: Collection[JobKey]) -> tuple[ObservedJob, Actions] | None:
        """Return the actions to begin now, of no job in `looking`; None if there is no room, or none."""
        ready = [key for key in self.planned if key not in looking] if self.running < self.limit else []
        if not ready:
            return None
        self.running += 1
        waited_for = (key for key in ready if is_waited_for(*self.planned[key]))
        return self.planned.pop(next(waited_for, ready[0]))


class OperatorLoop:
    """Keeps all AdaScaleJobs in their desired state."""

    def __init__(
        self,
        cache: ObjectCache,
        cluster: KubernetesCluster,
        service: MetricsServiceClient,
        settings: OperatorSettings,
        resources: Collection[Resource],
        *,
        reader: MetricsServiceClient | None = None,
        before_pods: BeforePods | None = None,
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
        self._errors = ErrorIsolation(self._metrics.job_errors.inc, clock)
        self._deregistration = Deregistration(service, settings.namespace, cache)
        self._observer = Observer(settings)
        self._queue_reader = QueueReader(cluster)
        self._fetcher = LookupFetcher(cluster, self._look_at)
        self._scheduler = Scheduler(
            settings.accelerator_label, request_nodes=settings.request_nodes, fairness=settings.fairness
        )
        self._follower = JobFollower(reader or service, cache.changed.set)
        self._applier = Applier(
            *(cluster, service, cache.put, settings.identity, self._follower.expect, before_pods)
        )
        self._queue: WorkQueue[JobKey] = WorkQueue()
        self._jobs: dict[JobKey, _TrackedJob] = {}
        self._known: set[JobKey] = set()
        """The jobs of which a phase may have a memory."""
        self._without_job: set[JobKey] = set()
        """Names of jobs that do not exist and have pods."""
        self._views: Mapping[str, JobView] | None = None
        self._lost_nodes: frozenset[str] = frozenset()
        self._resources_changed = True
        self._decision: asyncio.Task[DecisionResult] | None = None
        self._decision_begun_at = 0.0
        self._decide_after = -inf
        """When a decision may begin after one has failed, on the monotonic clock."""
        self._beside: dict[str, asyncio.Task[None]] = {}
        """Calls that no cycle waits for."""
        self._listed_at = time.monotonic()
        self._list_duration = 0.0
        self._applying: dict[JobKey, asyncio.Task[None]] = {}
        self._postponed: set[JobKey] = set()
        """The jobs to look at as soon as their actions are carried out."""
        self._urgent, self._statuses = _Writes(MAX_CONCURRENT), _Writes(MAX_STATUS_WRITES)
        self._looking: set[JobKey] = set()
        """The jobs that this cycle looks at. Their planned actions are about to be replaced."""
        self._explained_at = time.monotonic()
        self._reads = 0
        self._report_cost = 0.0

    async def run(self) -> None:
        """Run cycles until cancelled."""
        await asyncio.to_thread(self._follower.refresh)
        self._follower.start()
        try:
            await self._run()
        finally:
            self._follower.stop()
            await self._cancel_writes()

    async def _cancel_writes(self) -> None:
        """Cancel all pending calls and writes: another operator may write as soon as this one has ended."""
        for writes in (self._urgent, self._statuses):
            writes.planned.clear()
        tasks: list[asyncio.Task[Any]] = [*self._applying.values(), *self._beside.values()]
        if self._decision is not None:
            tasks.append(self._decision)
        for task in tasks:
            task.cancel()
        self._applying.clear()
        self._beside.clear()
        self._postponed.clear()
        self._decision = None
        self._look_at_all()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        self._listed_at = time.monotonic()
        while True:
            await self._wait_for_work()
            stale_interval = max(STALE_RESYNC_INTERVAL, self._list_duration / MAX_IDLE_SHARE)
            interval = stale_interval if self._errors.cache_is_stale else RESYNC_INTERVAL
            if time.monotonic() - self._listed_at > interval:
                self._begin_beside("list all objects", self._resync)
            self._follower.check()
            await self._timed_cycle()
            self._note_progress()
            await self._pause(PAUSE)

    async def _wait_for_work(self) -> None:
        """Wait for a change, or until a decision is due, but not longer than `INTERVAL`."""
        wait = INTERVAL
        if self._decision is None:
            now = self._clock()
            due_in = max(self._scheduler.due_at(now) - now, self._decide_after - time.monotonic())
            wait = min(wait, max(due_in, 0.0))
        try:
            async with asyncio.timeout(wait):
                await self._cache.changed.wait()
        except TimeoutError:
            pass
        self._cache.changed.clear()

    async def list_all(self) -> None:
        """Fill the cache."""
        for resource in self._resources:
            objects, version = await self._cluster.list(resource)
            self._cache.replace(resource, objects, version)

    async def cycle(self, *, full: bool = False) -> None:
        """Read all jobs of the metrics service, run one cycle, and wait for the decision that it starts."""
        await asyncio.to_thread(self._follower.refresh)
        if full:
            self._look_at_all()
        await self._cycle(apply_wait=None)
        while self._decision is not None:
            await asyncio.wait([self._decision])
            await self._cycle(apply_wait=None)
        await asyncio.gather(*self._beside.values())

    async def _timed_cycle(self) -> None:
        begun = time.thread_time()
        with self._metrics.cycle_duration.time():
            await self._cycle()
        used = time.thread_time() - begun
        self._metrics.cycle_cpu.inc(used)
        if self._follower.reads == self._reads:
            self._report_cost += used if self._queue.has_reported else 0.0
        else:
            cost = self._report_cost + used + self._follower.refresh_cost
            self._follower.refresh_interval = max(INTERVAL, cost / MAX_IDLE_SHARE)
            self._reads, self._report_cost = self._follower.reads, 0.0
        # Cycles take at most half of the time, so that changes that arrive all the time do not take a core.
        await self._pause(min(used, MAX_PAUSE))

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until the decision that is being made has ended."""
        if self._decision is None:
            await asyncio.sleep(seconds)
        else:
            await asyncio.wait([self._decision], timeout=seconds)

    async def _cycle(self, apply_wait: float | None = APPLY_WAIT) -> None:
        is_deciding = self._decision is not None
        self._drop_applied()
        self._adopt_decision()
        self._collect_changes()
        self._follow_queues()
        # A decision takes twice as long beside other work, and what it has changed comes first.
        max_background = 0 if is_deciding else MAX_BESIDE_CHANGES if self._has_changes else MAX_BACKGROUND
        keys = self._free_to_change(self._queue.take(self._clock(), max_background))
        self._looking = set(keys)
        looked_at = await self._look(keys)
        self._update_resources()
        self._applier.jobs = len(self._jobs)
        urgent, statuses = await self._reconcile_all(looked_at)
        self._looking = set()
        for writes, jobs in ((self._urgent, urgent), (self._statuses, statuses)):
            writes.plan(jobs, looked_at)
        self._begin_planned()
        self._begin_decision()
        self._metrics.pending.set(len(self._applying) + len(self._urgent.planned))
        await self._applied(apply_wait)
        await self._store_decisions()
        self._metrics.set_jobs(job.assessment.phase for job in self._jobs.values())
        self._metrics.waiting.set(self._scheduler.waiting)
        for job_id, retry_at in self._errors.take_failed().items():
            self._queue.retry(job_key(job_id), retry_at)
        if self._queue.has_reported and self._decision is None:
            self._cache.changed.set()
        if self._views is not None and (deleted := self._deregistration.deleted(self._views)):
            self._begin_beside("deregister deleted jobs", lambda: self._deregistration.deregister(deleted))

    def _note_progress(self) -> None:
        """Report progress, except while a decision hangs: other work is no sign of health then."""
        if not self._decision_hangs():
            self._on_progress()

    def _begin_beside(self, name: str, calls: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin calls that no cycle waits for, unless the last ones of this name are not over."""
        if name in self._beside:
            return

        async def run() -> None:
            try:
                await calls()
            except Exception:
                # Broad on purpose: they are made again in a later cycle.
                logger.exception("Could not %s; trying again", name)
            finally:
                self._beside.pop(name, None)

        self._beside[name] = asyncio.create_task(run())

    # -- what to look at ------------------------------------------------------------------------------------

    def _look_at(self, key: JobKey) -> None:
        """Look at a job in the next cycle, and start that now."""
        self._queue.add([key])
        self._cache.changed.set()

    def _look_at_changed(self, keys: Collection[JobKey]) -> None:
        """Look at jobs in the next cycle, and retry their failed calls."""
        self._queue.add(keys)
        self._errors.retry_now(map(".".join, keys))

    def _look_at_all(self) -> None:
        """Look at all jobs and nodes in the next cycle, as if all had changed."""
        self._queue.add(self._cache.keys(Resource.ADASCALEJOBS))
        self._resources_changed = True
        self._scheduler.decide_again()

    def _collect_changes(self) -> None:
        """Find the jobs that changes of the caches and of the metrics service concern."""
        changes = self._cache.take_changes()
        self._look_at_changed(changes.jobs)
        self._queue.add_reported(changes.no_news)
        if changes.resources:
            self._resources_changed = True
            self._update_lost_nodes()
        views = self._follower.views
        changed, reported = self._follower.take_changes()
        self._look_at_changed(list(map(job_key, changed)))
        self._queue.add_reported(map(job_key, reported))
        if (views is None) != (self._views is None):
            self._look_at_changed(self._cache.keys(Resource.ADASCALEJOBS))
        self._views = views

    def _update_lost_nodes(self) -> None:
        before, self._lost_nodes = self._lost_nodes, lost_nodes(self._cache.all(Resource.NODES))
        if nodes := before ^ self._lost_nodes:
            self._queue.add(
                key for key, job in self._jobs.items() if any(pod.node in nodes for pod in job.cached.pods)
            )

    def _follow_queues(self) -> None:
        """Look at the jobs about which Kueue says something new, and read it again if that is due."""
        queued = {
            key for key, job in self._jobs.items() if not job.assessment.ended and _queued_pods(job.cached)
        }
        if queued and self._queue_reader.is_due():
            namespaces = {namespace for namespace, _ in queued}

            async def read() -> None:
                await self._queue_reader.read(namespaces)
                for key in queued & self._jobs.keys():
                    job = self._jobs[key]
                    if job.observed.queue != self._queue_reader.view(_queued_pods(job.cached)):
                        self._look_at(key)

            self._begin_beside("read the queues of Kueue", read)

    @property
    def _has_changes(self) -> bool:
        """Whether someone waits for a cycle, or for writes other than of statuses that are not urgent."""
        has_writes = self._urgent.running > 0 or bool(self._urgent.planned)
        return has_writes or self._queue.has_changed or self._cache.has_changes

    def _free_to_change(self, keys: Iterable[JobKey]) -> list[JobKey]:
        """Return the jobs without writes of the operator that are not finished, or not observed yet.

        The others are looked at in a later cycle.
        """
        free: list[JobKey] = []
        behind: list[JobKey] = []
        for key in keys:
            if key in self._applying:
                self._postponed.add(key)
            elif self._follower.is_behind(".".join(key)):
                behind.append(key)
            else:
                free.append(key)
        self._queue.add(behind)
        return free

    # -- observe --------------------------------------------------------------------------------------------

    async def _look(self, keys: Collection[JobKey]) -> set[JobKey]:
        """Observe jobs, find their phase, and pass them to the scheduler. Returns those without errors."""
        cached = await self._read(keys)
        await self._fetcher.fetch(cached.values(), self._clock())
        looked_at = set()
        async for key, job in self._in_slices(list(cached.items())):
            with self._errors.isolate(job.resource.id):
                lookups = self._fetcher.results(job)
                if lookups is not None:
                    uids = _queued_pods(job)
                    queue = self._queue_reader.view(uids) if uids else None
                    observed = observe(job, lookups, self._views, self._clock(), queue)
                    self._track(key, _TrackedJob(job, observed, assess(observed)))
                    looked_at.add(key)
        return looked_at

    async def _read(self, keys: Collection[JobKey]) -> dict[JobKey, ObservedJob]:
        """Read jobs from the caches, and drop jobs that no longer exist."""
        cached, gone = {}, []
        async for key in self._in_slices(list(keys)):
            raw = self._cache.get(Resource.ADASCALEJOBS, key)
            if raw is None or is_deleting(raw):
                gone.append(key)
                continue
            self._known.add(key)
            with self._errors.isolate(".".join(key)):
                cached[key] = self._observer.read(raw, self._cache.pods_of(key), self._lost_nodes)
        self._drop(gone)
        return cached

    def _track(self, key: JobKey, job: _TrackedJob) -> None:
        before, self._jobs[key] = self._jobs.get(key), job
        if job.assessment.phase is JobPhase.RUNNABLE:
            self._scheduler.update(job.observed)
        else:
            self._scheduler.remove(job.observed.resource.id)
        # The pods of a job that may not run take resources.
        if before is None:
            self._resources_changed |= bool(job.cached.pods)
        else:
            self._resources_changed |= _fixed_pods(before) != _fixed_pods(job)

    def _drop(self, keys: Collection[JobKey]) -> None:
        """Drop the memory of deleted jobs in each phase. Jobs and pods of others have none."""
        self._queue.discard(keys)
        for writes in (self._urgent, self._statuses):
            writes.plan((), keys)
        with_pods = {key for key in keys if self._cache.pods_of(key)}
        self._give_groups_up(with_pods)
        self._resources_changed |= bool(with_pods | self._without_job.intersection(keys))
        self._without_job = (self._without_job - set(keys)) | with_pods
        known = self._known.intersection(keys)
        if not known:
            return
        self._known -= known
        self._resources_changed = True
        for key in known:
            self._jobs.pop(key, None)
            self._scheduler.remove(".".join(key))
        present = [raw for raw in self._cache.all(Resource.ADASCALEJOBS) if not is_deleting(raw)]
        uids = {raw["metadata"]["uid"] for raw in present}
        for phase in (self._observer, self._fetcher, self._scheduler, self._applier):
            phase.retain(uids)
        self._errors.retain({".".join(key) for key in self._cache.keys(Resource.ADASCALEJOBS)})

    def _give_groups_up(self, keys: Collection[JobKey]) -> None:
        """Delete the Workloads of groups of deleted jobs: Kueue would keep their pods for further ones."""
        for key in keys:
            for group in {pod.held_group for pod in self._cache.pods_of(key)} - {None}:
                give_up = partial(self._cluster.delete_workload, key[0], str(group))
                self._begin_beside(f"delete Workload {group} of {'.'.join(key)}", give_up)

    # -- schedule -------------------------------------------------------------------------------------------

    def _update_resources(self) -> None:
        """Pass the nodes to the scheduler, and the pods on them that it can't move."""
        if not self._resources_changed:
            return
        self._resources_changed = False
        if Resource.NODES not in self._resources:
            self._scheduler.set_resources(None, ())
            return
        pods = self._cache.pods_of(None)
        for key in self._cache.jobs_with_pods():
            job = self._jobs.get(key)
            if job is None or job.assessment.phase is not JobPhase.RUNNABLE:
                pods += self._cache.pods_of(key)
        self._scheduler.set_resources(self._cache.all(Resource.NODES), pods)

    def _begin_decision(self) -> None:
        """Decide if that is due and no decision is being made.

        It runs in a thread, beside the cycles: the lease, the probes and the watches go on, and so do the
        jobs, by the decisions before.
        """
        may_decide = self._decision is None and time.monotonic() >= self._decide_after
        if may_decide and self._scheduler.is_due(self._clock()):
            given = self._scheduler.decision_input()
            self._decision = asyncio.create_task(asyncio.to_thread(self._scheduler.solve, given))
            self._decision.add_done_callback(lambda _: self._cache.changed.set())
            self._decision_begun_at = time.monotonic()

    def _adopt_decision(self) -> None:
        """Use the decision that was made, if any: the jobs that get another replica count are looked at."""
        if self._decision is None or not self._decision.done():
            return
        decision, self._decision = self._decision, None
        try:
            result = decision.result()
        except Exception:
            # Broad on purpose: a bug of ours must not stop the operator, which follows the decisions before.
            self._metrics.job_errors.inc()
            logger.exception("No decision could be made; trying again in %.0f s", DECISION_RETRY_INTERVAL)
            self._decide_after = time.monotonic() + DECISION_RETRY_INTERVAL
            self._scheduler.decide_again()
            return
        self._metrics.cycle_cpu.inc(result.cost)
        self._metrics.decision_duration.observe(time.monotonic() - self._decision_begun_at)
        changed = self._scheduler.adopt(result, self._clock())
        self._look_at_changed([job_key(job_id) for job_id in sorted(changed)])

    def _decision_hangs(self) -> bool:
        return self._decision is not None and time.monotonic() - self._decision_begun_at > DECISION_DEADLINE

    # -- reconcile ------------------------------------------------------------------------------------------

    async def _reconcile_all(
        self, keys: Collection[JobKey]
    ) -> tuple[list[tuple[ObservedJob, Actions]], list[tuple[ObservedJob, Actions]]]:
        """Return the jobs to change at once, and those whose status is to be written, with the actions."""
        urgent, statuses = [], []
        async for key in self._in_slices(sorted(keys)):
            tracked = self._jobs[key]
            job, now = tracked.observed, self._clock()
            with self._errors.isolate(job.resource.id):
                actions = reconcile(job, tracked.assessment, self._scheduler.schedule(job))
                status_due = self._applier.status_due_at(job, actions)
                due = (
                    self._fetcher.next_due(tracked.cached, now),
                    self._scheduler.next_due(job),
                    next_deadline(job, tracked.assessment),
                )
                # A status that is due is written below.
                self._queue.plan(key, now, min(due), status_due if status_due > job.now else inf)
                retry_at = self._errors.retry_at(job.resource.id)
                if now < retry_at:
                    self._queue.retry(key, retry_at)
                    continue
                if actions.are_urgent:
                    urgent.append((job, actions))
                elif status_due <= job.now:
                    statuses.append((job, actions))
                else:
                    self._errors.clear(job.resource.id)
        return urgent, statuses

    async def _store_decisions(self) -> None:
        """Store the explained decisions with the metrics service, or else explain them again later.

        While there are changes, they come first, for `MAX_EXPLAIN_DELAY` at most.
        """

        async def store(explained: Iterable[DecisionView]) -> None:
            for decision in explained:
                if self._views is None or not await self._applier.store_decision(decision):
                    self._scheduler.explain_again(decision.job)

        may_wait = time.monotonic() < self._explained_at + MAX_EXPLAIN_DELAY
        if STORE in self._beside or self._decision is not None or (may_wait and self._has_changes):
            return
        self._explained_at = time.monotonic()
        try:
            explained = await asyncio.to_thread(self._scheduler.explain)
        except Exception:
            # Broad on purpose: see `_adopt_decision`.
            self._metrics.job_errors.inc()
            logger.exception("The last decision could not be explained")
            self._scheduler.leave_unexplained()
            return
        if explained:
            self._begin_beside(STORE, lambda: store(explained))

    # -- apply ----------------------------------------------------------------------------------------------

    def _begin_planned(self) -> None:
        """Begin to carry out actions that are planned, as far as there is room."""
        for writes in (self._urgent, self._statuses):
            while (found := writes.take(self._looking)) is not None:
                job, actions = found
                if actions.allocate is not None:
                    self._scheduler.note_request(job.resource.id, actions.allocate.replicas)
                key = job.resource.key
                self._applying[key] = asyncio.create_task(self._apply_planned(writes, job, actions))
                self._applying[key].add_done_callback(partial(self._wake_if_postponed, key))

    async def _apply_planned(self, writes: _Writes, job: ObservedJob, actions: Actions) -> None:
        try:
            await self._apply(job, actions)
        finally:
            writes.running -= 1
        self._begin_planned()

    def _wake_if_postponed(self, key: JobKey, _: asyncio.Task[None]) -> None:
        if key in self._postponed:
            self._cache.changed.set()

    async def _applied(self, wait: float | None) -> None:
        """Wait for the actions that are carried out, but not longer than `wait` seconds."""
        while self._applying:
            await asyncio.wait(self._applying.values(), timeout=wait)
            self._drop_applied()
            if wait is not None:
                break

    def _drop_applied(self) -> None:
        """Queue the jobs whose actions are carried out, if a look at them was postponed."""
        for key, task in list(self._applying.items()):
            if task.done():
                del self._applying[key]
                task.result()
                if key in self._postponed:
                    self._postponed.remove(key)
                    self._queue.add([key])

    async def _apply(self, job: ObservedJob, actions: Actions) -> None:
        if actions.allocate is not None:
            current = job.current_allocation
            before = 0 if current is None else current.replicas
            self._metrics.count_allocation(before, actions.allocate.replicas)
        with self._errors.isolate(job.resource.id):
            applied = await self._applier.apply(job, actions)
            if actions.declare is not None:
                # It may be lost again before it is read, so that no change of the job is seen.
                self._queue.add([job.resource.key])
            self._errors.cache_is_stale |= applied.is_stale
            if applied.claim_created:
                self._fetcher.expire_claim(job.resource.uid)
            if applied.template_rejection is not None:
                self._observer.reject(job.resource, f"spec.template: {applied.template_rejection}")
                self._look_at(job.resource.key)
            if actions.create_pods:
                self._fetcher.note_creation(job.resource.uid, applied.refused)
            if applied.refused is not None:
                raise applied.refused
            self._errors.clear(job.resource.id)
        self._note_progress()

    async def _in_slices(self, items: Sequence[T]) -> AsyncIterator[T]:
        """Yield items. After each `SLICE` of them, let other tasks run: many are progress too."""
        for number, item in enumerate(items, start=1):
            yield item
            if number % SLICE == 0:
                self._note_progress()
                await asyncio.sleep(0)

    async def _resync(self) -> None:
        begun = time.monotonic()
        self._errors.cache_is_stale = False
        try:
            await self.list_all()
            self._scheduler.decide_again()
        except ApiServerError as error:
            logger.warning("%s; the watches continue", error)
        self._listed_at = time.monotonic()
        self._list_duration = self._listed_at - begun


def _fixed_pods(job: _TrackedJob) -> Sequence[Pod]:
    """Return the pods whose resources a decision can't use."""
    return () if job.assessment.phase is JobPhase.RUNNABLE else tuple(job.cached.pods)


def _queued_pods(job: ObservedJob) -> list[str]:
    return [pod.uid for pod in job.live_pods.values() if pod.queue is not None]


def is_waited_for(job: ObservedJob, actions: Actions) -> bool:
    """Whether someone waits for the actions: a new job, an edit, a lost pod, a deletion. They come first."""
    edited = actions.status.get("observedGeneration") != job.resource.status.get("observedGeneration")
    is_lost = any(pod.how is Stop.FORCE for pod in actions.stop_pods)
    return bool(actions.create_pods or is_lost or actions.delete_job or edited)
