"""Reads cached objects into `CachedJob`s and, with lookup results, into `ObservedJob`s."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from adascale_controller.job_definition import JobDefinition
from adascale_controller.operator.observe.adascalejob import AdaScaleJob, SpecReader
from adascale_controller.operator.observe.lookups import LookupResults, with_start_problems
from adascale_controller.operator.observe.observed_job import (
    Admission,
    CachedJob,
    IndexedJob,
    ObservedJob,
    QueueView,
)
from adascale_controller.operator.observe.pods import Pod, read_pod
from adascale_controller.operator.types.conditions import Reason
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.operator.types.workload import PodSettings, Workload, template_digest
from adascale_core.views.jobs import JobView


class Observer:
    """Reads cached objects. Parsed specs and pods are kept until their objects change."""

    def __init__(self, settings: PodSettings) -> None:
        self._settings = settings
        self._settings_without_tls = settings.without_tls()
        self._specs = SpecReader()
        self._pods: dict[str, dict[str, tuple[str, Pod]]] = {}
        self._digests: dict[str, tuple[JobDefinition, dict[bool, str], dict[bool, str]]] = {}
        """uid of an AdaScaleJob -> its parsed spec, and the digests of the template of that spec, with TLS
        and without."""

    def retain(self, uids: Collection[str]) -> None:
        """Drop the memory of all AdaScaleJobs with other uids."""
        self._specs.retain(uids)
        self._pods = {uid: pods for uid, pods in self._pods.items() if uid in uids}
        self._digests = {uid: known for uid, known in self._digests.items() if uid in uids}

    def read(
        self,
        raw: ApiObject,
        raw_indexed_job: ApiObject | None,
        pods: Iterable[ApiObject],
        lost_nodes: frozenset[str],
        raw_extra_job: ApiObject | None = None,
    ) -> CachedJob:
        """Return an AdaScaleJob."""
        job = AdaScaleJob.read(raw, self._specs)
        indexed_job = IndexedJob.read(raw_indexed_job) if raw_indexed_job is not None else None
        extra_job = IndexedJob.read(raw_extra_job) if raw_extra_job is not None else None
        if extra_job is not None and extra_job.of != job.name and not _has_extra_pods(job):
            # It belongs to another AdaScaleJob, which has this name.
            extra_job = None
        found = self._read_pods(job.uid, list(pods))
        own = {each.uid for each in (indexed_job, extra_job) if each is not None and each.owner == job.uid}
        return CachedJob(
            resource=job,
            workload=self._workload(job, [each for each in (indexed_job, extra_job) if each is not None]),
            indexed_job=indexed_job,
            pods=[pod for pod in found if not own or _belongs_to(pod, own, job.uid)],
            lost_nodes=lost_nodes,
            extra_job=extra_job,
            leaving=[pod for pod in found if own and pod.exit is None and not _belongs_to(pod, own, job.uid)],
        )

    def reject(self, job: AdaScaleJob, reason: str) -> None:
        """Record that the API server rejects an object made from the current spec of a job."""
        self._specs.reject(job, reason)

    def _read_pods(self, job_uid: str, raws: Sequence[ApiObject]) -> list[Pod]:
        """Return the pods of a job, and keep them until the next call."""
        known, self._pods[job_uid] = self._pods.get(job_uid, {}), {}
        for raw in raws:
            uid, version = raw["metadata"]["uid"], raw["metadata"]["resourceVersion"]
            before = known.get(uid)
            if before is None or before[0] != version:
                before = version, read_pod(raw)
            self._pods[job_uid][uid] = before
        return [pod for _, pod in self._pods[job_uid].values()]

    def _workload(self, job: AdaScaleJob, indexed_jobs: Sequence[IndexedJob]) -> Workload | None:
        if job.job is None:
            return None
        known = self._digests.get(job.uid)
        if known is None or known[0] is not job.job:
            known = self._digests[job.uid] = job.job, {}, {}
        workload = Workload(
            name=job.name,
            namespace=job.namespace,
            uid=job.uid,
            job=job.job,
            template=job.template,
            created_at=job.created_at,
            settings=self._settings,
            queueing=job.queueing,
            digests=known[1],
        )
        if self._settings_without_tls is None:
            return workload
        # Pods that were made before TLS was turned on are not replaced because of it: the metrics service
        # answers both. New pods of their Indexed Job are like them.
        plain = replace(workload, settings=self._settings_without_tls, digests=known[2])
        digests = {template_digest(plain, single_node=single_node) for single_node in (False, True)}
        owned = [each for each in indexed_jobs if each.owner == job.uid]
        return plain if any(each.digest in digests for each in owned) else workload


def observe(
    cached: CachedJob,
    lookups: LookupResults,
    views: Mapping[str, JobView] | None,
    now: float,
    queue: QueueView | None = None,
    extra_queue: QueueView | None = None,
) -> ObservedJob:
    """Return the observed state of a job."""
    job = cached.resource
    return ObservedJob(
        resource=job,
        # The next write creates a job that the metrics service does not have.
        service=None if views is None else views.get(job.id, JobView.empty(job.id, created_at=now)),
        indexed_job=cached.indexed_job,
        extra_job=cached.extra_job,
        pods=_with_queues(with_start_problems(cached.pods, lookups, now), queue, extra_queue),
        claim=lookups.claim,
        digest=_digest(cached, lookups),
        pod_creation_failure=lookups.pod_creation_failure,
        lost_nodes=cached.lost_nodes,
        now=now,
        workload=cached.workload,
        leaving=cached.leaving,
        admission=lookups.admission or Admission(),
        template_check=lookups.template_check,
        queue=queue,
        extra_queue=extra_queue,
        refusal=lookups.refusal,
    )


def _with_queues(
    pods: Sequence[Pod], queue: QueueView | None, extra_queue: QueueView | None
) -> Sequence[Pod]:
    """Return pods; those that Kueue gates with why it does."""
    messages = {
        is_extra: each.message
        for is_extra, each in ((False, queue), (True, extra_queue))
        if each is not None and each.message
    }
    return [_with_message(pod, messages[pod.is_extra]) if pod.is_extra in messages else pod for pod in pods]


def _with_message(pod: Pod, message: str) -> Pod:
    problem = pod.problem
    if problem is None or problem.reason is not Reason.SCHEDULING_GATED:
        return pod
    return replace(pod, problem=replace(problem, message=f"{problem.message}: {message}"))


def lost_nodes(nodes: Iterable[ApiObject]) -> frozenset[str]:
    """Return the names of the nodes that are not ready."""
    return frozenset(_name(node) for node in nodes if not is_ready(node))


def is_ready(node: ApiObject) -> bool:
    """Whether a node has the condition Ready."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _digest(cached: CachedJob, lookups: LookupResults) -> str:
    """Return the digest of the current template. An invalid spec leaves the pods as they are."""
    if cached.workload is None:
        return next((each.digest for each in cached.own_indexed_jobs if each.digest), "")
    single_node = lookups.claim is not None and lookups.claim.single_node
    return template_digest(cached.workload, single_node=single_node)


def _has_extra_pods(job: AdaScaleJob) -> bool:
    return job.job is not None and job.job.opportunistic is not None


def _belongs_to(pod: Pod, indexed_jobs: Collection[str], job: str) -> bool:
    """Whether one of the Indexed Jobs controls a pod, or is about to adopt it."""
    return pod.job_uid == job if pod.controller is None else pod.controller in indexed_jobs


def is_deleting(raw: ApiObject) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in raw["metadata"]


def _name(raw: ApiObject) -> str:
    return str(raw["metadata"]["name"])
