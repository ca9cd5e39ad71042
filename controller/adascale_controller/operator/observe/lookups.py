"""Lookups: reads of the API server that the caches don't answer, as requests and as results.

A job may need three: its checkpoint claim, what admission makes of its pods, and the Events of a pod whose
containers don't start. `runtime.lookup_fetcher` makes the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observed_job import (
    Admission,
    CachedJob,
    CheckpointClaim,
)
from adascale_controller.operator.observe.pods import Pod, PodProblem
from adascale_controller.operator.types.kubernetes import ApiObject, seconds

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
    modes = raw["spec"]["accessModes"] if raw is not None else [checkpoint.access_mode]
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
