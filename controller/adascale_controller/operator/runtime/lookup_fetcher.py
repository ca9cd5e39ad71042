"""Fetches what the caches don't hold: claims, Events, what admission makes of pods, and Kueue's objects.

Claims are read concurrently, with a bound on the number of calls and a deadline for each; Events by
`EventReader`, which lets reads wait for each other. A cycle waits for the claims that it reads, but not
longer than `CYCLE_WAIT`, and not for Events. All other calls continue in the background, their results are
used in a later cycle, and until then the job has the last known result. So a slow call of one job delays no
other.

Admission may add tolerations, requests, a priority or a node selector. Without them the capacity for a job is
estimated too low or too high. Jobs of a namespace with equal templates share the answer of a dry run. Where
dry runs are not possible, the pods that a job has show it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, KubernetesCluster
from adascale_controller.operator.apply.manifests import pod_manifest
from adascale_controller.operator.observe.adascalejob import AdaScaleJob, digest_of
from adascale_controller.operator.observe.observed_job import (
    Admission,
    LookupResults,
    ObservedJob,
    QueueView,
    assumed_claim,
    creation_problem,
    read_claim,
)
from adascale_controller.operator.observe.pods import START_EVENTS, next_start_check, slow_pod
from adascale_controller.operator.schedule.quota import of_job, read_queues
from adascale_controller.operator.types.actions import NewPod
from adascale_controller.operator.types.kubernetes import (
    ApiObject,
    ConditionType,
    JobKey,
    Manifest,
    condition_of,
    has_ended,
    only,
)

Calls = Coroutine[Any, Any, None]
"""Calls of the API server that are about to be made."""

logger = logging.getLogger(__name__)

ADMISSION_INTERVAL: Final = 600.0
"""Seconds after which admission is asked again: policies and webhooks change."""
ADMISSION_RETRY_INTERVAL: Final = 60.0
"""The same after an error."""
ADMISSION_QUOTA_INTERVAL: Final = 10.0
"""The same while a quota allows a job no more pods."""
DEADLINE: Final = 8.0
"""Seconds after which a dry run fails."""

_POD_FIELDS: Final = (
    "nodeName",
    "nodeSelector",
    "tolerations",
    "overhead",
    "resources",
    "priority",
    "priorityClassName",
    "preemptionPolicy",
)
_CONTAINER_FIELDS: Final = ("name", "resources", "restartPolicy")


@dataclass
class _Answer:
    """What is known of the pods of a template in a namespace."""

    admission: Admission | None = None  # the last answer. None before the first one.
    asked_at: float = float("-inf")  # seconds since 1970
    is_running: bool = False  # whether the API server has not answered yet
    waiting: set[JobKey] = field(default_factory=set)  # the jobs that wait for the first answer


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Raise an `ApiServerError` if the calls inside take longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise ApiServerError(f"the API server does not answer within {seconds:.0f} s") from error


class AdmissionReader:
    """The pods of templates as admission makes them."""

    def __init__(self, cluster: KubernetesCluster, on_answer: Callable[[JobKey], None]) -> None:
        self._cluster = cluster
        self._on_answer = on_answer
        self._answers: dict[str, _Answer] = {}
        self._keys: dict[str, tuple[int, str]] = {}
        """uid of an AdaScaleJob -> its generation, and the key of its answer."""

    def retain(self, uids: Collection[str]) -> None:
        """Drop the answers that only AdaScaleJobs with other uids have needed."""
        self._keys = {uid: key for uid, key in self._keys.items() if uid in uids}
        used = {key for _, key in self._keys.values()}
        self._answers = {key: answer for key, answer in self._answers.items() if key in used}

    def admission(self, job: AdaScaleJob) -> Admission | None:
        """Return what admission makes of the pods of a job. None before the first answer."""
        answer = self._answers.setdefault(self._key(job), _Answer())
        if answer.admission is None:
            answer.waiting.add(job.key)
        return answer.admission

    def due_at(self, job: AdaScaleJob, *, awaits_gang: bool = False) -> float:
        """Return when to ask for a job, in seconds since 1970.

        Often while a quota limits the job: it may be raised. And while pods wait in a gang: it may be one of
        a priority that new pods no longer have.
        """
        answer = self._answers.get(self._key(job))
        if answer is None:
            return float("-inf")
        if answer.is_running:
            return float("inf")
        known = answer.admission
        may_differ = awaits_gang or (known is not None and (known.problem or known.extra_problem))
        if _lacks_quota(job):
            return answer.asked_at + ADMISSION_QUOTA_INTERVAL
        return answer.asked_at + (ADMISSION_RETRY_INTERVAL if may_differ else ADMISSION_INTERVAL)

    def ask(self, cached: ObservedJob, now: float, limit: asyncio.Semaphore) -> Calls:
        """Ask the API server for a job. An earlier answer stays if it has none now."""
        answer = self._answers.setdefault(self._key(cached.resource), _Answer())
        answer.is_running, answer.asked_at = True, now
        return self._ask(cached, answer, limit)

    async def _ask(self, cached: ObservedJob, answer: _Answer, limit: asyncio.Semaphore) -> None:
        job = cached.resource
        try:
            async with limit, deadline(DEADLINE):
                found = await self._read(cached)
            answer.admission = replace(found, asked_at=answer.asked_at)
        except ApiServerError as error:
            problem = error.reply or str(error)
            if answer.admission is None or answer.admission.spec is None:
                logger.info("%s: what admission makes of its pods is not known: %s", job.id, problem)
                answer.admission = Admission(problem=problem)
            has_quota = "exceeded quota" not in problem
            answer.admission = replace(answer.admission, has_quota=has_quota, asked_at=answer.asked_at)
        finally:
            answer.is_running = False
        waiting, answer.waiting = answer.waiting - {job.key}, set()
        for key in waiting:
            self._on_answer(key)

    async def _read(self, cached: ObservedJob) -> Admission:
        try:
            pod = await self._cluster.admit_pod(_tried(cached.resource))
            return await self._with_extra_pods(cached.resource, Admission(_kept(pod["spec"])))
        except ApiServerError:
            made = next((pod for pod in cached.live_pods.values() if not pod.is_extra), None)
            found = await self._cluster.get("pods", made.namespace, made.name) if made is not None else None
            if found is None:
                raise
            return Admission(_kept(found["spec"]))

    async def _with_extra_pods(self, job: AdaScaleJob, admission: Admission) -> Admission:
        """Return an answer with the priority of extra pods, or with why these are rejected."""
        if job.valid_job.spec.opportunistic is None:
            return admission
        manifest = _tried(job, extra=True)
        try:
            pod = await self._cluster.admit_pod(manifest)
        except ApiServerError as error:
            # A quota may be used up for now, and an error of a webhook is no answer.
            is_final = error.status == 403 and "exceeded quota" not in error.reply
            return replace(admission, extra_problem=error.reply if is_final else "")
        return replace(admission, extra_priority=pod["spec"].get("priority"))

    def _key(self, job: AdaScaleJob) -> str:
        """Return a key that is equal for jobs of a namespace with equal templates."""
        known = self._keys.get(job.uid)
        if known is None or known[0] != job.generation:
            opportunistic = job.job.spec.opportunistic if job.job is not None else None
            extra = [opportunistic.priority_class_name, job.valid_job.core_replicas] if opportunistic else []
            known = self._keys[job.uid] = job.generation, digest_of([job.namespace, job.template, extra])
        return known[1]


def _tried(job: AdaScaleJob, *, extra: bool = False) -> Manifest:
    """Return a pod for a dry run. It requires no type of accelerator, and has a name of its own."""
    manifest = pod_manifest(job, NewPod(0, 0, extra=extra))
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "name"}
    return {**manifest, "metadata": {**metadata, "generateName": f"{manifest['metadata']['name']}-"}}


def _lacks_quota(job: AdaScaleJob) -> bool:
    """Whether a quota allows a job no more pods, by its status."""
    conditions = (condition_of(job.status, kind) for kind in (ConditionType.RUNNING, ConditionType.RESCALING))
    return any(each is not None and each.reason == Reason.QUOTA_EXCEEDED for each in conditions)


def _kept(spec: ApiObject) -> Manifest:
    """Return the parts of a PodSpec on which capacity depends."""
    kept = only(spec, _POD_FIELDS)
    for kind in ("containers", "initContainers"):
        kept[kind] = [only(each, _CONTAINER_FIELDS) for each in spec.get(kind) or ()]
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity")
    if node_affinity:
        kept["affinity"] = {"nodeAffinity": node_affinity}
    return kept


MAX_EVENT_SHARE = 0.1
"""The largest part of the time in which a read is in progress."""

EventsByObject = Mapping[str, Sequence[ApiObject]]
"""Events, by the uid of the object that they are about."""


class EventReader:
    """Reads Events of whole namespaces, one read at a time, and in at most `MAX_EVENT_SHARE` of the time.

    The API server has no index of Events: a read costs it as much as all Events of the namespace. Pods that
    start slowly because it is busy would keep it busy, so all jobs of a namespace share a read.
    """

    def __init__(self, cluster: KubernetesCluster, deadline: float) -> None:
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
                async with deadline(self._deadline):
                    events = await self._cluster.list_events(namespace, START_EVENTS)
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


MAX_CONCURRENT = 16
"""Reads of claims and dry runs at the same time."""
CYCLE_WAIT = 0.1
"""Seconds that a cycle waits for the claims that it reads."""
CLAIM_INTERVAL = 5.0
"""Seconds between two reads of a claim that does not exist."""
EVENTS_INTERVAL = 5.0
"""Seconds between two reads of Events for one job."""

_NEVER = float("-inf")


@dataclass
class _JobLookups(LookupResults):
    """The lookups for one job."""

    claim_error: ApiServerError | None = None  # why the claim could not be read
    # call -> its last begin, in seconds since 1970
    begun_at: dict[str, float] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)  # the calls that have not returned


_Call = tuple[str, float, Callable[[], Calls]]
"""The name of a call that a job may need, when it is due, in seconds since 1970, and the call itself."""


class LookupFetcher:
    """Fetches the lookups of all jobs."""

    def __init__(self, cluster: KubernetesCluster, on_result: Callable[[JobKey], None]) -> None:
        self._cluster = cluster
        self._admissions = AdmissionReader(cluster, on_result)
        self._on_result = on_result
        self._events = EventReader(cluster, DEADLINE)
        self._jobs: dict[str, _JobLookups] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = asyncio.Semaphore(MAX_CONCURRENT)

    def retain(self, uids: Collection[str]) -> None:
        """Drop the results of all AdaScaleJobs with other uids."""
        self._jobs = {uid: lookups for uid, lookups in self._jobs.items() if uid in uids}
        self._admissions.retain(uids)

    def expire_claim(self, uid: str) -> None:
        """Drop the claim of a job, so that the next cycle reads it."""
        lookups = self._jobs.get(uid)
        if lookups is not None:
            lookups.claim = None

    def note_creation(self, uid: str, error: ApiServerError | None) -> None:
        """Record why the API server creates no pod of a job, or that it has created all."""
        lookups = self._jobs.setdefault(uid, _JobLookups())
        before = lookups.refusal
        refusal = None if error is None else creation_problem(error.reply)
        # The first message stays while the reason is the same: it may differ each time, and a status that
        # changes makes the operator try again at once.
        if before is None or refusal is None or before.reason != refusal.reason:
            lookups.refusal = refusal

    async def fetch(self, jobs: Iterable[ObservedJob], now: float) -> None:
        """Start the calls that are due, and wait `CYCLE_WAIT` at most for claims and admission."""
        awaited: set[asyncio.Task[None]] = set()
        started: dict[asyncio.Task[None], JobKey] = {}
        for job in jobs:
            lookups = self._jobs.setdefault(job.resource.uid, _JobLookups())
            if slow_pod(job.pods, now) is None:
                lookups.slow_pod = ("", ())
            for name, due, call in self._calls(job, lookups, now):
                if due > now:
                    continue
                lookups.running.add(name)
                lookups.begun_at[name] = now
                task = asyncio.create_task(call())
                self._tasks.add(task)
                task.add_done_callback(partial(self._note_end, lookups, name))
                started[task] = job.resource.key
                if name in ("claim", "admission"):
                    awaited.add(task)
        if awaited:
            await asyncio.wait(awaited, timeout=CYCLE_WAIT)
        for task in started:
            if not (task in awaited and task.done()):
                task.add_done_callback(lambda done: self._on_result(started[done]))

    def _note_end(self, lookups: _JobLookups, name: str, task: asyncio.Task[None]) -> None:
        lookups.running.discard(name)
        self._tasks.discard(task)

    def results(self, job: ObservedJob) -> LookupResults | None:
        """Return the newest results for a job. None while its claim or its admission is unknown.

        Its pods depend on its claim, and where they can run on admission.
        """
        lookups = self._jobs.get(job.resource.uid, _JobLookups())
        if _asks_admission(job):
            lookups.admission = self._admissions.admission(job.resource)
            if lookups.admission is None:
                return None
        claim = job.resource.claim_name if job.resource.job is not None else None
        if claim is None:
            lookups.claim = None
        elif lookups.claim is None or lookups.claim.name != claim:
            if lookups.claim_error is not None:
                raise lookups.claim_error
            return None
        return lookups

    def next_due(self, job: ObservedJob, now: float) -> float:
        """Return when the lookups of a job are due next, in seconds since 1970; infinite if never."""
        lookups = self._jobs.get(job.resource.uid, _JobLookups())
        return min([next_start_check(job.pods, now), *(due for _, due, _ in self._calls(job, lookups, now))])

    # -- calls ----------------------------------------------------------------------------------------------

    def _calls(self, job: ObservedJob, lookups: _JobLookups, now: float) -> Iterator[_Call]:
        """Yield the calls that a job may need, without those that have not returned."""
        resource = job.resource
        if _asks_admission(job):
            ask = partial(self._admissions.ask, job, now, self._limit)
            awaits_gang = any(pod.awaits_gang for pod in job.pods)
            yield "admission", self._admissions.due_at(resource, awaits_gang=awaits_gang), ask
        name = resource.claim_name if resource.job is not None else None
        if name is not None and "claim" not in lookups.running:
            due = _claim_due(resource, name, lookups)
            yield "claim", due, partial(self._read_claim, resource, name, lookups)
        slow = slow_pod(job.pods, now)
        if slow is not None and "pod" not in lookups.running:
            due = lookups.begun_at.get("pod", _NEVER) + EVENTS_INTERVAL
            yield "pod", due, partial(self._read_pod_events, resource.namespace, slow.uid, lookups)

    async def _read_claim(self, job: AdaScaleJob, name: str, lookups: _JobLookups) -> None:
        try:
            async with self._limit, deadline(DEADLINE):
                raw = await self._cluster.get("persistentvolumeclaims", job.namespace, name)
        except ApiServerError as error:
            # No assumption where the claim may be known soon: it could lead to other pods.
            if error.status != 403:
                lookups.claim_error = error
                return
            raw = assumed_claim(job)
        lookups.claim_error = None
        lookups.claim = read_claim(job, name, raw)

    async def _read_pod_events(self, namespace: str, uid: str, lookups: _JobLookups) -> None:
        events = await self._events.read(namespace)
        if events is not None:
            lookups.slow_pod = uid, tuple(events.get(uid, ()))


def _claim_due(job: AdaScaleJob, name: str, lookups: _JobLookups) -> float:
    """Return when to read a claim: once, and again while a job waits for one of the user's.

    The claim that the operator creates is read again once it is created.
    """
    claim = lookups.claim
    if claim is None or claim.name != name:
        return _NEVER
    is_awaited = not (claim.exists or claim.own or job.valid_job.spec.suspend or has_ended(job.status))
    return lookups.begun_at.get("claim", _NEVER) + CLAIM_INTERVAL if is_awaited else float("inf")


def _asks_admission(job: ObservedJob) -> bool:
    """Whether it matters what admission makes of the pods of a job: it may get more of them."""
    return job.resource.job is not None and not has_ended(job.resource.status)


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

    def __init__(self, cluster: KubernetesCluster) -> None:
        self._cluster = cluster
        self._due_at = float("-inf")
        """On the monotonic clock."""
        self._last: Mapping[str, QueueView] | None = None
        """What was read last, without confirmation. None before the first read."""
        self._before: Mapping[str, QueueView] = {}
        """What was read before that."""

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
        self._before, self._last = self._last or {}, read_queues(workloads, cluster_queues)
        now = time.monotonic()
        interval = max(QUEUE_INTERVAL, (now - begun) / MAX_QUEUE_SHARE)
        self._due_at = now + (interval if may_read else QUEUE_RETRY_INTERVAL)

    def view(self, uids: Collection[str]) -> QueueView | None:
        """Return what Kueue says about pods with these uids. None if that is not read yet."""
        if self._last is None:
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
