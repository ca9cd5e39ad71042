"""Reads cached objects into `CachedJob`s and, with lookup results, into `ObservedJob`s."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from adascale_controller.operator.observe.adascalejob import AdaScaleJob, SpecReader
from adascale_controller.operator.observe.lookups import LookupResults, with_start_problems
from adascale_controller.operator.observe.observed_job import CachedJob, IndexedJob, ObservedJob
from adascale_controller.operator.observe.pods import Pod, read_pod
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.operator.types.workload import PodSettings, Workload, template_digest
from adascale_core.views.jobs import JobView


class Observer:
    """Reads cached objects. Parsed specs and pods are kept until their objects change.

    Args:
        settings: settings that all pods get.
    """

    def __init__(self, settings: PodSettings) -> None:
        self._settings = settings
        self._specs = SpecReader()
        self._pods: dict[str, dict[str, tuple[str, Pod]]] = {}

    def retain(self, uids: Collection[str]) -> None:
        """Drop the memory of all AdaScaleJobs with other uids."""
        self._specs.retain(uids)
        self._pods = {uid: pods for uid, pods in self._pods.items() if uid in uids}

    def read(
        self,
        raw: ApiObject,
        raw_indexed_job: ApiObject | None,
        pods: Iterable[ApiObject],
        lost_nodes: frozenset[str],
    ) -> CachedJob:
        """Return an AdaScaleJob.

        Args:
            raw: the AdaScaleJob.
            raw_indexed_job: the Job of its name. None if there is none.
            pods: the pods of its name.
            lost_nodes: names of the nodes that are not ready.
        """
        job = AdaScaleJob.read(raw, self._specs)
        indexed_job = IndexedJob.read(raw_indexed_job) if raw_indexed_job is not None else None
        own = indexed_job.uid if indexed_job is not None and indexed_job.owner == job.uid else None
        return CachedJob(
            resource=job,
            workload=self._workload(job),
            indexed_job=indexed_job,
            pods=self._read_pods(job.uid, [pod for pod in pods if own in (None, _controller_uid(pod))]),
            lost_nodes=lost_nodes,
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
        # The next write creates a job that the metrics service does not have.
        service=None if views is None else views.get(job.id, JobView.empty(job.id, created_at=now)),
        indexed_job=cached.indexed_job,
        pods=with_start_problems(cached.pods, lookups, now),
        claim=lookups.claim,
        digest=_digest(cached, lookups),
        pod_creation_failure=lookups.pod_creation_failure,
        lost_nodes=cached.lost_nodes,
        now=now,
        workload=cached.workload,
    )


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


def is_deleting(raw: ApiObject) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in raw["metadata"]


def _name(raw: ApiObject) -> str:
    return str(raw["metadata"]["name"])
