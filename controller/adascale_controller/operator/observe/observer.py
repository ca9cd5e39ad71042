"""Reads objects for the cache, and cached objects into `CachedJob`s and, with lookups, `ObservedJob`s.

Lookups are reads of the API server that the caches don't answer. A job may need three: its checkpoint claim,
what admission makes of its pods, and the Events of a pod whose containers don't start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.adascalejob import (
    AdaScaleJob,
    ParsedSpec,
    parse_spec,
    template_digest,
)
from adascale_controller.operator.observe.observed_job import (
    Admission,
    CachedJob,
    CheckpointClaim,
    ObservedJob,
    QueueView,
)
from adascale_controller.operator.observe.pods import Pod, PodProblem, read_pod
from adascale_controller.operator.types.kubernetes import (
    ApiObject,
    Resource,
    find_condition,
    only,
    seconds,
    shared,
)
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_controller.schema import DEFAULT_ACCESS_MODE
from adascale_core.views.jobs import JobView

CONTAINER_START_TIMEOUT: Final = 10.0
"""Seconds that a node may take for a pod's volumes and network before its Events are read. Before that they
often report problems that disappear by themselves."""
CONTAINER_CREATING_TIMEOUT: Final = 60.0
"""Seconds after which a pod in ContainerCreating is reported in any case."""

_START_FAILURES: Final = frozenset(
    {"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox", "NetworkNotReady"}
)
"""Reasons of Events by which a node reports why it has started no container. Pod statuses don't have them."""
_ORDINARY: Final = ("Scheduled", "SuccessfulAttachVolume", "Pulled", "Created", "Started", "Killing")
"""Reasons of Events that don't explain why a pod is still in ContainerCreating. Each pod has some of them."""

START_EVENTS: Final = ",".join(["involvedObject.kind=Pod", *(f"reason!={reason}" for reason in _ORDINARY)])
"""Selects Events that may say why pods start no container."""


@dataclass
class LookupResults:
    """The newest results of a job's lookups. Each is None until it is known."""

    claim: CheckpointClaim | None = None
    slow_pod: str | None = None  # uid of the pod whose Events `slow_pod_events` holds
    slow_pod_events: Sequence[ApiObject] = ()  # the Events of that pod, of `START_EVENTS`
    admission: Admission | None = None  # what admission makes of its pods
    refusal: PodProblem | None = None  # why the API server creates no pod that is missing


def slow_pod(cached: CachedJob, now: float) -> Pod | None:
    """Return the first pod that was assigned to a node and has started no container in time."""
    live = cached.live_pods.values()
    slow = (pod for pod in live if _seconds_creating(pod, now) > CONTAINER_START_TIMEOUT)
    return min(slow, key=lambda pod: pod.rank, default=None)


def read_claim(job: AdaScaleJob, name: str, raw: ApiObject | None) -> CheckpointClaim:
    """Return the checkpoint claim of a job."""
    checkpoint = job.valid_job.checkpoint
    modes = raw["spec"]["accessModes"] if raw is not None else [checkpoint.access_mode or DEFAULT_ACCESS_MODE]
    own = checkpoint.claim_name is None
    return CheckpointClaim(name, own, raw is not None, single_node="ReadWriteMany" not in modes)


def assumed_claim(job: AdaScaleJob) -> ApiObject | None:
    """Return the checkpoint claim of a job where claims may not be read.

    A claim of the user's is assumed to exist and to be ReadWriteMany. If it is not, its pods show it.
    """
    is_own = job.valid_job.checkpoint.claim_name is None
    return None if is_own else {"spec": {"accessModes": ["ReadWriteMany"]}}


def creation_problem(message: str) -> PodProblem:
    """Return why there are no pods, from the API server's message about a pod that it rejects."""
    exceeded = "exceeded quota" in message
    return PodProblem(Reason.QUOTA_EXCEEDED if exceeded else Reason.POD_CREATION_FAILED, message)


def with_start_problems(pods: Sequence[Pod], results: LookupResults, now: float) -> Sequence[Pod]:
    """Return the pods. A pod that starts no container has the reason.

    A pod with an Event about a failed start has that as its problem after `CONTAINER_START_TIMEOUT`; any
    other is reported as slow after `CONTAINER_CREATING_TIMEOUT`, with its newest Event if it has any.
    """
    return [_with_start_problem(pod, results, now) for pod in pods]


def next_start_check(pods: Iterable[Pod], now: float) -> float:
    """Return when a pod that has not started its worker is next reported in another way, by time alone.

    In seconds since 1970; infinite if all have started.
    """
    return min((_next_start_check(pod, now) for pod in pods), default=inf)


def _next_start_check(pod: Pod, now: float) -> float:
    elapsed = _seconds_creating(pod, now)
    if not _is_creating(pod):
        return inf
    threshold = CONTAINER_START_TIMEOUT
    if elapsed > CONTAINER_START_TIMEOUT:
        threshold = CONTAINER_CREATING_TIMEOUT
    while threshold < elapsed:
        threshold *= 2
    return (pod.scheduled_at or 0.0) + threshold


def _with_start_problem(pod: Pod, results: LookupResults, now: float) -> Pod:
    elapsed = _seconds_creating(pod, now)
    if elapsed <= CONTAINER_START_TIMEOUT:
        return pod
    events = _lasting(pod, results.slow_pod_events) if results.slow_pod == pod.uid else []
    failure = _newest(event for event in events if event["reason"] in _START_FAILURES)
    if failure is not None:
        return replace(pod, problem=PodProblem(Reason.CONTAINER_START_FAILED, failure))
    if elapsed <= CONTAINER_CREATING_TIMEOUT:
        return pod
    # Thresholds that double keep the message, and with it the status, from changing in each cycle.
    threshold = CONTAINER_CREATING_TIMEOUT
    while 2 * threshold < elapsed:
        threshold *= 2
    message = f"pod {pod.name} has {_waits(pod)} for more than {threshold:.0f} s on node {pod.node}"
    warnings = [event for event in events if event.get("type") == "Warning"]
    detail = _newest(warnings) or _newest(events)
    message = f"{message}: {detail}" if detail else message
    return replace(pod, problem=PodProblem(Reason.CONTAINER_CREATING, message, blocks=False))


def _lasting(pod: Pod, events: Iterable[ApiObject]) -> list[ApiObject]:
    """Return the Events about a pod without failures that are over: Events stay for an hour.

    A node pulls images once the volumes and the network of a pod are there.
    """
    events = list(events)
    pulls = max((_last_seen(event) for event in events if event["reason"] == "Pulling"), default=-inf)
    over = inf if pod.has_started else pulls
    return [each for each in events if each["reason"] not in _START_FAILURES or _last_seen(each) > over]


def _waits(pod: Pod) -> str:
    waits_for = pod.init_container
    return "been in ContainerCreating" if waits_for is None else f"waited for init container {waits_for}"


def _seconds_creating(pod: Pod, now: float) -> float:
    """Return how long a pod has been on a node without starting its worker; 0 if it is not in that state."""
    return now - (pod.scheduled_at or 0.0) if _is_creating(pod) else 0.0


def _is_creating(pod: Pod) -> bool:
    is_early = not pod.has_started or pod.init_container is not None
    waits = pod.scheduled_at is not None and is_early and pod.problem is None
    return waits and pod.exit is None and pod.deletion_deadline is None


def _newest(events: Iterable[ApiObject]) -> str | None:
    newest = max(events, key=_last_seen, default=None)
    return None if newest is None else f"{newest['reason']}: {newest.get('message', '')}"


def _last_seen(event: ApiObject) -> float:
    """Return when an Event was last recorded, in seconds since 1970. A series records it elsewhere."""
    series = event.get("series") or {}
    recorded = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return seconds(recorded) or 0.0


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
