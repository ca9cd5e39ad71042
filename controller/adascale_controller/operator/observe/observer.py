"""Reads cached objects into `CachedJob`s and, with lookup results, into `ObservedJob`s."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from adascale_controller.operator.observe.adascalejob import AdaScaleJob, SpecReader
from adascale_controller.operator.observe.lookups import LookupResults, with_start_problems
from adascale_controller.operator.observe.observed_job import CachedJob, IndexedJob, ObservedJob
from adascale_controller.operator.observe.pods import Pod, job_of_pod, read_pod
from adascale_controller.operator.types.actions import Isolation
from adascale_controller.operator.types.kubernetes import ApiObject, object_key
from adascale_controller.operator.types.workload import PodSettings, Workload, template_digest
from adascale_core.views import JobView


@dataclass(frozen=True)
class Snapshot:
    """The contents of the caches at one moment.

    Args:
        adascalejobs, indexed_jobs, pods: all objects of these resources.
        nodes: all nodes. None if the operator may not read nodes.
    """

    adascalejobs: Sequence[ApiObject]
    indexed_jobs: Sequence[ApiObject]
    pods: Sequence[ApiObject]
    nodes: Sequence[ApiObject] | None

    @property
    def job_uids(self) -> set[str]:
        """The uids of all AdaScaleJobs that are not being deleted."""
        return {raw["metadata"]["uid"] for raw in self.adascalejobs if not _is_deleting(raw)}


class Observer:
    """Reads the caches. Parsed specs and pods are kept until their objects change.

    Args:
        settings: settings that all pods get.
    """

    def __init__(self, settings: PodSettings) -> None:
        self._settings = settings
        self._specs = SpecReader()
        self._pods: dict[str, tuple[str, Pod]] = {}

    def read(self, snapshot: Snapshot, isolation: Isolation) -> list[CachedJob]:
        """Return all AdaScaleJobs that are not being deleted and can be read.

        Args:
            snapshot: the contents of the caches.
            isolation: handles the errors of a single job.
        """
        self._specs.retain(snapshot.job_uids)
        indexed_jobs = {object_key(raw): raw for raw in snapshot.indexed_jobs}
        pods = self._pods_by_job(snapshot.pods)
        nodes_lost = lost_nodes(snapshot.nodes or ())
        found = []
        for raw in snapshot.adascalejobs:
            if _is_deleting(raw):
                continue
            key = object_key(raw)
            with isolation(".".join(key)):
                found.append(self._read_job(raw, indexed_jobs.get(key), pods.get(key, ()), nodes_lost))
        return found

    def reject(self, job: AdaScaleJob, reason: str) -> None:
        """Record that the API server rejects an object made from the current spec of a job."""
        self._specs.reject(job, reason)

    def _read_job(
        self,
        raw: ApiObject,
        raw_indexed_job: ApiObject | None,
        pods: Iterable[ApiObject],
        lost_nodes: frozenset[str],
    ) -> CachedJob:
        job = AdaScaleJob.read(raw, self._specs)
        indexed_job = IndexedJob.read(raw_indexed_job) if raw_indexed_job is not None else None
        own = indexed_job.uid if indexed_job is not None and indexed_job.owner == job.uid else None
        return CachedJob(
            resource=job,
            workload=self._workload(job),
            indexed_job=indexed_job,
            pods=[self._read_pod(pod) for pod in pods if own in (None, _controller_uid(pod))],
            lost_nodes=lost_nodes,
        )

    def _pods_by_job(self, pods: Iterable[ApiObject]) -> Mapping[tuple[str, str], list[ApiObject]]:
        found: dict[tuple[str, str], list[ApiObject]] = defaultdict(list)
        for raw in pods:
            key = job_of_pod(raw)
            if key is not None:
                found[key].append(raw)
        present = {raw["metadata"]["uid"] for raws in found.values() for raw in raws}
        self._pods = {uid: pod for uid, pod in self._pods.items() if uid in present}
        return found

    def _read_pod(self, raw: ApiObject) -> Pod:
        meta = raw["metadata"]
        version, pod = self._pods.get(meta["uid"], (None, None))
        if pod is None or version != meta["resourceVersion"]:
            pod = read_pod(raw)
            self._pods[meta["uid"]] = (meta["resourceVersion"], pod)
        return pod

    def _workload(self, job: AdaScaleJob) -> Workload | None:
        if job.job is None:
            return None
        return Workload(
            name=job.name,
            namespace=job.namespace,
            uid=job.uid,
            job=job.job,
            template=job.template,
            created_at=job.created_at,
            settings=self._settings,
        )


def observe(
    cached: CachedJob, lookups: LookupResults, views: Mapping[str, JobView] | None, now: float
) -> ObservedJob:
    """Return the observed state of a job.

    Args:
        cached: the job as the caches hold it.
        lookups: the newest results of its lookups.
        views: the jobs of the metrics service by job id. None if the metrics service does not answer.
        now: seconds since 1970.
    """
    job = cached.resource
    return ObservedJob(
        resource=job,
        service=None if views is None else views.get(job.id, JobView.empty(job.id)),
        indexed_job=cached.indexed_job,
        pods=with_start_problems(cached.pods, lookups, now),
        claim=lookups.claim,
        digest=_digest(cached, lookups),
        pod_creation_failure=lookups.pod_creation_failure,
        lost_nodes=cached.lost_nodes,
        now=now,
        workload=cached.workload,
    )


def jobs_with_pods(pods: Collection[ApiObject]) -> set[str]:
    """Return the ids of all jobs that have a pod."""
    return {".".join(key) for key in map(job_of_pod, pods) if key is not None}


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
        return (cached.indexed_job.digest if cached.indexed_job is not None else None) or ""
    single_node = lookups.claim is not None and lookups.claim.single_node
    return template_digest(cached.workload, single_node=single_node)


def _controller_uid(raw: ApiObject) -> str | None:
    owners = raw["metadata"].get("ownerReferences") or ()
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)


def _is_deleting(raw: ApiObject) -> bool:
    return "deletionTimestamp" in raw["metadata"]


def _name(raw: ApiObject) -> str:
    return str(raw["metadata"]["name"])
