"""Reads objects for the cache, and cached objects into `CachedJob`s and, with lookups, `ObservedJob`s."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from adascale_controller.operator.observe.adascalejob import (
    AdaScaleJob,
    ParsedSpec,
    parse_spec,
    template_digest,
)
from adascale_controller.operator.observe.lookups import LookupResults, with_start_problems
from adascale_controller.operator.observe.observed_job import (
    Admission,
    CachedJob,
    ObservedJob,
    QueueView,
)
from adascale_controller.operator.observe.pods import Pod, read_pod
from adascale_controller.operator.types.kubernetes import ApiObject, Resource, find_condition, only, shared
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_core.views.jobs import JobView

Cached = ApiObject | Pod
"""A pod, or another object as JSON."""


def cached_fields(resource: Resource, raw: ApiObject) -> Cached:
    """Return an object without the parts that the operator does not read, such as the images of a node."""
    if resource is Resource.PODS:
        return read_pod(raw)
    kept = {
        **raw,
        "metadata": {name: each for name, each in raw["metadata"].items() if name != "managedFields"},
    }
    if resource is Resource.NODES:
        kept["status"] = only(raw.get("status") or {}, ("allocatable", "conditions"))
    found: ApiObject = shared(kept)
    return found


class Observer:
    """Reads cached objects. Parsed specs are kept until their objects change."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._specs: dict[str, ParsedSpec] = {}

    def retain(self, uids: Collection[str]) -> None:
        """Drop the memory of all AdaScaleJobs with other uids."""
        self._specs = {uid: parsed for uid, parsed in self._specs.items() if uid in uids}

    def read(self, raw: ApiObject, pods: Sequence[Pod], lost_nodes: frozenset[str]) -> CachedJob:
        """Return an AdaScaleJob."""
        uid = raw["metadata"]["uid"]
        parsed = self._specs[uid] = parse_spec(raw, self._specs.get(uid))
        job = AdaScaleJob.read(raw, parsed, self._settings)
        own = [pod for pod in pods if pod.controller[2] == uid and pod.rank >= 0]
        others = [pod for pod in pods if pod not in own and not pod.has_ended]
        return CachedJob(job, own, lost_nodes, others=others)

    def reject(self, job: AdaScaleJob, reason: str) -> None:
        """Record that the API server rejects an object made from the current spec of a job."""
        self._specs[job.uid] = ParsedSpec((job.generation, job.queueing.queue), None, reason)


def observe(
    cached: CachedJob,
    lookups: LookupResults,
    views: Mapping[str, JobView] | None,
    now: float,
    queue: QueueView | None = None,
) -> ObservedJob:
    """Return the observed state of a job."""
    job = cached.resource
    return ObservedJob(
        resource=job,
        # The next write creates a job that the metrics service does not have.
        service=None if views is None else views.get(job.id, JobView.empty(job.id, created_at=now)),
        pods=_with_queue(with_start_problems(cached.pods, lookups, now), queue),
        claim=lookups.claim,
        digest=_digest(cached, lookups),
        refusal=lookups.refusal,
        lost_nodes=cached.lost_nodes,
        now=now,
        others=cached.others,
        admission=lookups.admission or Admission(),
        queue=queue,
    )


def _with_queue(pods: Sequence[Pod], queue: QueueView | None) -> Sequence[Pod]:
    """Return pods; those that Kueue gates with why it does."""
    if queue is None or not queue.message:
        return pods
    return [
        replace(pod, problem=replace(pod.problem, message=f"{pod.problem.message}: {queue.message}"))
        if pod.problem is not None and pod.is_gated
        else pod
        for pod in pods
    ]


def lost_nodes(nodes: Iterable[ApiObject]) -> frozenset[str]:
    """Return the names of the nodes that are not ready."""
    return frozenset(_name(node) for node in nodes if not is_ready(node))


def is_ready(node: ApiObject) -> bool:
    """Whether a node has the condition Ready."""
    return find_condition(node.get("status") or {}, "Ready") is not None


def _digest(cached: CachedJob, lookups: LookupResults) -> str:
    """Return the digest of the current template. An invalid spec leaves the pods as they are."""
    if cached.resource.job is None:
        return next((pod.template for pod in cached.live_pods.values() if pod.template), "")
    single_node = lookups.claim is not None and lookups.claim.single_node
    return template_digest(cached.resource, single_node=single_node)


def is_deleting(raw: ApiObject) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in raw["metadata"]


def _name(raw: ApiObject) -> str:
    return str(raw["metadata"]["name"])
