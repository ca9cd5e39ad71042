"""Fetches what the caches don't hold: claims, Events, what admission makes of pods, and Kueue's objects.

Claims are read concurrently, with a bound on the number of calls and a deadline for each; Events by
`EventReader`, which lets reads wait for each other. A cycle waits for the claims that it reads, but not
longer than `CYCLE_WAIT`, and not for Events. All other calls continue in the background, their results are
used in a later cycle, and until then the job has the last known result. So a slow call of one job delays no
other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from adascale_controller.operator.apply.cluster import ApiServerError, Cluster
from adascale_controller.operator.observe.lookups import (
    START_EVENTS,
    LookupResults,
    Lookups,
    assume_claim,
    creation_problem,
    needed_lookups,
    next_start_check,
    read_claim,
)
from adascale_controller.operator.observe.observed_job import (
    CachedJob,
    CheckpointClaim,
    QueueView,
)
from adascale_controller.operator.runtime.admission_reader import AdmissionReader, TemplateChecker
from adascale_controller.operator.schedule.quota import of_job, read_queues
from adascale_controller.operator.types.conditions import has_ended
from adascale_controller.operator.types.kubernetes import ApiObject, JobKey
from adascale_controller.operator.types.workload import Workload, template_digest

MAX_EVENT_SHARE = 0.1
"""The largest part of the time in which a read is in progress."""

EventsByObject = Mapping[str, Sequence[ApiObject]]
"""Events, by the uid of the object that they are about."""


class EventReader:
    """Reads Events of whole namespaces, one read at a time, and in at most `MAX_EVENT_SHARE` of the time.

    The API server has no index of Events: a read costs it as much as all Events of the namespace. Pods that
    start slowly because it is busy would keep it busy, so all jobs of a namespace share a read.
    """

    def __init__(self, cluster: Cluster, deadline: float) -> None:
        self._cluster = cluster
        self._deadline = deadline
        self._reads: dict[str, asyncio.Task[EventsByObject | None]] = {}
        self._turn = asyncio.Lock()
        self._next_start = 0.0

    async def read(self, namespace: str) -> EventsByObject | None:
        """Return the `START_EVENTS` of a namespace, or None if they could not be read.

        A read of the same namespace that has not returned yet is joined.
        """
        task = self._reads.get(namespace)
        if task is None:
            task = self._reads[namespace] = asyncio.create_task(self._read(namespace))
            task.add_done_callback(lambda _: self._reads.pop(namespace))
        return await asyncio.shield(task)

    async def _read(self, namespace: str) -> EventsByObject | None:
        clock = asyncio.get_running_loop().time
        async with self._turn:
            await asyncio.sleep(self._next_start - clock())
            start = clock()
            try:
                async with asyncio.timeout(self._deadline):
                    events = await self._cluster.list_events(namespace, START_EVENTS)
            except TimeoutError:
                logger.warning(
                    "The Events of namespace %s can't be read: the API server does not answer within %.0f s",
                    *(namespace, self._deadline),
                )
                return None
            except ApiServerError as error:
                logger.warning("The Events of namespace %s can't be read: %s", namespace, error)
                return None
            finally:
                end = clock()
                self._next_start = end + (end - start) * (1 / MAX_EVENT_SHARE - 1)
        by_object = defaultdict(list)
        for event in events:
            by_object[event["involvedObject"]["uid"]].append(event)
        return by_object


logger = logging.getLogger(__name__)

MAX_CONCURRENT = 16
"""Reads of claims at the same time, and as many dry runs."""
DEADLINE = 8.0
"""Seconds after which a call fails."""
CYCLE_WAIT = 0.1
"""Seconds that a cycle waits for the claims that it reads."""
CLAIM_INTERVAL = 5.0
"""Seconds between two reads of a claim that does not exist."""
EVENTS_INTERVAL = 5.0
"""Seconds between two reads of Events for one job."""

_NEVER = float("-inf")


@dataclass
class _JobLookups:
    """The lookups for one job."""

    results: LookupResults = field(default_factory=LookupResults)
    claim_error: ApiServerError | None = None  # why the claim could not be read
    # start of the last reads, in seconds since 1970
    claim_read_at: float = _NEVER
    pod_events_read_at: float = _NEVER
    running: set[str] = field(default_factory=set)  # the calls that have not returned


class LookupFetcher:
    """Fetches the lookups of all jobs."""

    def __init__(self, cluster: Cluster, on_result: Callable[[JobKey], None]) -> None:
        self._cluster = cluster
        self._admissions = AdmissionReader(cluster, on_result)
        self._on_result = on_result
        self._checker = TemplateChecker(cluster)
        self._events = EventReader(cluster, DEADLINE)
        self._jobs: dict[str, _JobLookups] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._claim_reads = 0

    def retain(self, uids: Collection[str]) -> None:
        """Drop the results of all AdaScaleJobs with other uids."""
        self._jobs = {uid: lookups for uid, lookups in self._jobs.items() if uid in uids}
        self._admissions.retain(uids)
        self._checker.retain(uids)

    def expire_claim(self, uid: str) -> None:
        """Drop the claim of a job, so that the next cycle reads it."""
        lookups = self._jobs.get(uid)
        if lookups is not None:
            lookups.results = replace(lookups.results, claim=None)

    def note_creation(self, uid: str, error: ApiServerError | None) -> None:
        """Record why the API server creates no pod of a job, or that it has created all."""
        lookups = self._jobs.setdefault(uid, _JobLookups())
        before = lookups.results.refusal
        refusal = None if error is None else creation_problem(error.reply)
        # The first message stays while the reason is the same: it may differ each time, and a status that
        # changes makes the operator try again at once.
        if before is None or refusal is None or before.reason != refusal.reason:
            lookups.results = replace(lookups.results, refusal=refusal)

    async def fetch(self, jobs: Iterable[CachedJob], now: float) -> None:
        """Start the calls that are due, and wait `CYCLE_WAIT` at most for claims and admission."""
        # Reads of earlier cycles that hang take from the bound, but never all of it.
        limit = asyncio.Semaphore(max(MAX_CONCURRENT - self._claim_reads, 1))
        ask_limit = asyncio.Semaphore(MAX_CONCURRENT)
        awaited: set[asyncio.Task[None]] = set()
        started: dict[asyncio.Task[None], JobKey] = {}
        for job in jobs:
            lookups = self._jobs.setdefault(job.resource.uid, _JobLookups())
            for name, call in self._due(job, lookups, now, limit, ask_limit):
                lookups.running.add(name)
                task = asyncio.create_task(self._run(lookups, name, call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                started[task] = job.resource.key
                if name in ("claim", "admission"):
                    awaited.add(task)
        if awaited:
            await asyncio.wait(awaited, timeout=CYCLE_WAIT)
        for task in started:
            if not (task in awaited and task.done()):
                task.add_done_callback(lambda done: self._on_result(started[done]))

    def results(self, job: CachedJob) -> LookupResults | None:
        """Return the newest results for a job. None while its claim or its admission is unknown.

        Its pods depend on its claim, and where they can run on admission.
        """
        lookups = self._jobs.get(job.resource.uid, _JobLookups())
        if _asks_admission(job):
            admission = self._admissions.admission(job.resource)
            if admission is None:
                return None
            if lookups.results.admission is not admission:
                lookups.results = replace(lookups.results, admission=admission)
        digest = self._changed_digest(job, lookups)
        check = self._checker.result(job.resource.uid, digest) if digest else None
        lookups.results = replace(lookups.results, template_check=check)
        claim = job.workload.claim_name if job.workload is not None else None
        if claim is None:
            return replace(lookups.results, claim=None)
        if lookups.results.claim is None or lookups.results.claim.name != claim:
            if lookups.claim_error is not None:
                raise lookups.claim_error
            return None
        return lookups.results

    def next_due(self, job: CachedJob, now: float) -> float:
        """Return when the lookups of a job are due next, in seconds since 1970; infinite if never."""
        lookups = self._jobs.get(job.resource.uid, _JobLookups())
        needed, times = needed_lookups(job, now), [next_start_check(job.pods, now)]
        if _asks_admission(job):
            times.append(self._admissions.due_at(job.resource))
        digest = self._changed_digest(job, lookups)
        if "check" not in lookups.running:
            uid = job.resource.uid
            due = self._checker.left_due_at(uid) if digest is None else self._checker.due_at(uid, digest)
            times.append(due)
        if needed.claim is not None and "claim" not in lookups.running:
            claim = lookups.results.claim
            if claim is None or claim.name != needed.claim:
                times.append(now)
            elif needed.claim_awaited and not claim.exists:
                times.append(lookups.claim_read_at + CLAIM_INTERVAL)
        if needed.slow_pod is not None and "pod" not in lookups.running:
            times.append(lookups.pod_events_read_at + EVENTS_INTERVAL)
        return min(times)

    # -- calls ----------------------------------------------------------------------------------------------

    def _due(
        self,
        job: CachedJob,
        lookups: _JobLookups,
        now: float,
        limit: asyncio.Semaphore,
        ask_limit: asyncio.Semaphore,
    ) -> Iterable[tuple[str, Callable[[], Awaitable[None]]]]:
        needed = needed_lookups(job, now)
        if job.workload is not None and _asks_admission(job):
            asked = job.workload
            if self._admissions.due_at(job.resource) <= now:
                self._admissions.begin(job.resource, now)
                yield "admission", lambda: self._admissions.ask(job, asked, ask_limit)
        checker, digest = self._checker, self._changed_digest(job, lookups)
        if digest is not None and job.workload is not None:
            changed = job.workload
            if "check" not in lookups.running and checker.due_at(job.resource.uid, digest) <= now:
                earlier = checker.begin(job, digest, now)
                yield "check", lambda: checker.look(job, changed, earlier, now)
        is_left = digest is None and "check" not in lookups.running
        if is_left and checker.left_due_at(job.resource.uid) <= now:
            checker.begin_drop(job.resource.uid, now)
            yield "check", lambda: checker.drop(job)
        if job.workload is not None and needed.claim is not None and "claim" not in lookups.running:
            workload, name = job.workload, needed.claim
            if self._claim_is_due(lookups, needed, now):
                lookups.claim_read_at = now
                yield "claim", lambda: self._read_claim(workload, name, lookups, limit)
        if needed.slow_pod is None:
            lookups.results = replace(lookups.results, slow_pod=None, slow_pod_events=())
        elif now - lookups.pod_events_read_at >= EVENTS_INTERVAL and "pod" not in lookups.running:
            pod = needed.slow_pod.uid
            lookups.pod_events_read_at = now
            yield "pod", lambda: self._read_pod_events(job, pod, lookups)

    def _changed_digest(self, job: CachedJob, lookups: _JobLookups) -> str | None:
        """Return the digest of a template that the present pods do not have. None if they have it."""
        workload, claim = job.workload, lookups.results.claim
        if workload is None or workload.job.suspend or workload.job.replica_limit == 0:
            return None
        if workload.claim_name is not None and claim is None:
            return None
        digest = template_digest(workload, single_node=claim is not None and claim.single_node)
        is_changed = any(pod.template not in (None, digest) for pod in job.live_pods.values())
        return digest if is_changed and not has_ended(job.resource.status) else None

    @staticmethod
    def _claim_is_due(lookups: _JobLookups, needed: Lookups, now: float) -> bool:
        claim = lookups.results.claim
        if claim is None or claim.name != needed.claim:
            return True
        # The claim that the operator creates is read again once it is created.
        awaited = needed.claim_awaited and not claim.exists
        return awaited and now - lookups.claim_read_at >= CLAIM_INTERVAL

    @staticmethod
    async def _run(lookups: _JobLookups, name: str, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        finally:
            lookups.running.discard(name)

    async def _read_claim(
        self, workload: Workload, name: str, lookups: _JobLookups, limit: asyncio.Semaphore
    ) -> None:
        claim: CheckpointClaim | None = None
        self._claim_reads += 1
        try:
            async with limit, _deadline():
                raw = await self._cluster.get_claim(workload.namespace, name)
            claim = read_claim(workload, name, raw)
        except ApiServerError as error:
            # No assumption where the claim may be known soon: it could lead to other pods.
            if error.status != 403:
                lookups.claim_error = error
                return
            claim = assume_claim(workload, name)
        finally:
            self._claim_reads -= 1
        lookups.claim_error = None
        lookups.results = replace(lookups.results, claim=claim)

    async def _read_pod_events(self, job: CachedJob, pod_uid: str, lookups: _JobLookups) -> None:
        events = await self._events.read(job.resource.namespace)
        if events is not None:
            found = tuple(events.get(pod_uid, ()))
            lookups.results = replace(lookups.results, slow_pod=pod_uid, slow_pod_events=found)


def _asks_admission(job: CachedJob) -> bool:
    """Whether it matters what admission makes of the pods of a job: it may get more of them."""
    return job.workload is not None and not has_ended(job.resource.status)


@asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    """Raise a `ApiServerError` if the calls inside take longer than `DEADLINE`."""
    try:
        async with asyncio.timeout(DEADLINE):
            yield
    except TimeoutError as error:
        raise ApiServerError(f"the API server does not answer within {DEADLINE:.0f} s") from error


QUEUE_INTERVAL = 2.0
"""Seconds between two reads."""
MAX_QUEUE_SHARE = 0.05
"""The share of the time that reads take, at most."""
QUEUE_RETRY_INTERVAL = 60.0
"""Seconds until it is tried again to read what may not be read, or what is not understood."""


class QueueReader:
    """Reads the Workloads of queued jobs and all ClusterQueues at intervals: they are few and change rarely.

    Kueue writes the status of a ClusterQueue a moment after it has reserved quota for a Workload. What is
    reserved would be counted as unused until then, so more room counts only once it was read twice.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._due_at = float("-inf")
        """On the monotonic clock."""
        self._last: Mapping[str, QueueView] = {}
        """What was read last, without confirmation."""
        self._before: Mapping[str, QueueView] = {}
        """What was read before that."""
        self._has_read = False

    def is_due(self) -> bool:
        """Whether to read now."""
        return time.monotonic() >= self._due_at

    async def read(self, namespaces: Collection[str]) -> None:
        """Read what Kueue says about the jobs of these namespaces."""
        begun = time.monotonic()
        # Also after an error that nobody expects.
        self._due_at = begun + QUEUE_RETRY_INTERVAL
        try:
            cluster_queues = await self._cluster.list_kueue("clusterqueues")
            workloads: list[ApiObject] = []
            may_read = False
            for namespace in sorted(namespaces):
                found = await self._cluster.list_kueue("workloads", namespace)
                may_read |= found is not None
                workloads += found or ()
        except ApiServerError as error:
            logger.debug("The queues of Kueue are not known: %s", error)
            self._due_at = time.monotonic() + QUEUE_INTERVAL
            return
        self._before, self._last = self._last, read_queues(workloads, cluster_queues)
        now = time.monotonic()
        interval = max(QUEUE_INTERVAL, (now - begun) / MAX_QUEUE_SHARE)
        self._has_read = True
        self._due_at = now + (interval if may_read else QUEUE_RETRY_INTERVAL)

    def view(self, uids: Collection[str]) -> QueueView | None:
        """Return what Kueue says about pods with these uids. None if that is not read yet."""
        if not self._has_read:
            return None
        now, before = (
            of_job(views[uid] for uid in uids if uid in views) for views in (self._last, self._before)
        )
        return confirmed(now, before)


def confirmed(view: QueueView, last: QueueView) -> QueueView:
    """Return what Kueue says about a job, with no more room than it said before."""
    if view.room is None:
        return view
    return replace(view, room=max(min(view.room, last.admitted + (last.room or 0) - view.admitted), 0))
