"""What the caches hold of objects; of pods: where they run, what keeps them from starting, how they end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Any, Final

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.types.kubernetes import (
    SCHEDULING_FIELDS,
    ApiObject,
    JobKey,
    Resource,
    find_condition,
    only,
    replica_index,
    seconds,
    shared,
)
from adascale_controller.operator.types.settings import (
    KUEUE_FINALIZER,
    KUEUE_GROUP,
    POD_GROUP,
    POD_GROUP_SIZE,
    QUEUE_NAME,
)
from adascale_core import names
from adascale_core.failures import ExitClass, ProgramFailure, TerminationMessage, classify_exit

_IMAGE_PULL_FAILURES: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_START_FAILURES: Final = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "PreCreateHookError",
        "PreStartHookError",
        "PostStartHookError",
        "CrashLoopBackOff",  # of a sidecar, which restarts even where restartPolicy is Never
    }
)
ENDED: Final = ("Succeeded", "Failed")
"""The phases of a pod whose containers have all ended."""
END_DEADLINE: Final = 1
"""`activeDeadlineSeconds` by which the operator ends a pod."""
_REJECTED: Final = re.compile(
    "OutOf.*|UnexpectedAdmissionError|NodeAffinity|NodeName|NodePorts|TopologyAffinityError|SMTAlignmentError"
)
"""Matches the reasons of pods that the kubelet does not admit."""
_NOT_ROOT: Final = (
    ". Set spec.template.spec.securityContext.runAsUser to the number of a user of the image other than 0, "
    "or, where the namespace allows root, spec.template.spec.securityContext.runAsNonRoot to false"
)
_VOLUME_MESSAGE: Final = re.compile(
    r"persistentvolumeclaim|persistent volumes? to bind|pvc\(s\)|binding volumes|VolumeBinding", re.IGNORECASE
)
"""Matches the scheduler's messages about claims."""


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not start."""

    reason: Reason
    message: str  # names the missing object
    blocks: bool = True  # whether the pod can't start unless something changes. False if it may only be slow.


@dataclass(frozen=True)
class PodExit:
    """How a pod has ended."""

    # exit code of the worker, or of the container that failed the pod. None if no container ran.
    exit_code: int | None
    reason: str = ""  # Kubernetes' reason: Completed, Error, OOMKilled, StartError, Evicted, DeadlineExceeded
    message: str = ""  # the message of the container, or else of the pod
    # the termination message of the agent; None if it wrote none
    termination: TerminationMessage | None = None
    # whether the pod has the condition DisruptionTarget: eviction, preemption, a lost node
    disruption: bool = False
    of_worker: bool = True  # whether the exit code is that of the worker
    others: tuple[str, ...] = ()  # names of the containers that run on
    ended_at: float | None = None  # in seconds since 1970; None if it is not known

    @property
    def is_rejection(self) -> bool:
        """Whether the kubelet has not admitted the pod, so that no container ran."""
        return self.exit_code is None and _REJECTED.fullmatch(self.reason) is not None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a job."""

    name: str
    uid: str
    rank: int  # the index of its replica; -1 if it has none, so that an earlier version has made it
    node: str | None
    phase: str  # Pending, Running, Succeeded, Failed or Unknown
    created_at: float  # seconds since 1970
    # with the grace period, in seconds since 1970; None if it is not being deleted
    deletion_deadline: float | None = None
    # when it was assigned to its node, in seconds since 1970
    scheduled_at: float | None = None
    has_started: bool = True  # whether one of its containers has ever started
    problem: PodProblem | None = None
    exit: PodExit | None = None  # how its worker has ended, whatever else runs on in it. None if it has not.
    priority: int | None = None
    is_ending: bool = False  # whether it has a deadline of its own, `spec.activeDeadlineSeconds`
    # the init container that runs now and is no sidecar
    init_container: str | None = None
    # kind, name and uid of the object that controls it; empty if no object does
    controller: tuple[str, str, str] = ("", "", "")
    template: str | None = None  # digest of the template that it was made from. None if it is not known.
    accelerator: str | None = None  # the type that it requires
    is_extra: bool = False  # whether it has the priority of extra pods
    attempt: int = 0  # how many pods of its replica are known to have ended before it
    queue: str | None = None  # the LocalQueue of Kueue that it is queued in. None if it is not queued.
    group_size: int = 0  # the number of pods that Kueue admits together with it; 0 if it is admitted alone
    gang: str | None = None  # the PodGroup of Kubernetes that it is placed with. None if it is placed alone.
    # `nodeSelector` and `tolerations`, to which Kueue adds those of a flavor, of a queued pod
    scheduling: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # the group for which Kueue counts it, with its finalizer. None if it does not.
    held_group: str | None = None
    namespace: str = ""
    version: int = 0  # the resource version
    # namespace and name of the job that it belongs to. None if it has no job label.
    job: JobKey | None = None
    # the parts of its PodSpec that say what it requests
    requests: ApiObject = field(default_factory=lambda: MappingProxyType({}))

    @property
    def has_ended(self) -> bool:
        """Whether all its containers have ended."""
        return self.phase in ENDED

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs any more, or ever will."""
        return self.has_ended or (self.deletion_deadline is not None and self.node is None)

    @property
    def awaits_gang(self) -> bool:
        """Whether it is placed only together with the other pods of its PodGroup."""
        return self.gang is not None and self.node is None

    @property
    def is_gated(self) -> bool:
        """Whether it waits for the quota of its queue."""
        return self.problem is not None and self.problem.reason is Reason.QUEUED

    @property
    def is_placed(self) -> bool:
        """Whether it is on a node and nothing keeps it from starting."""
        return self.node is not None and (self.problem is None or not self.problem.blocks)


def read_pod(raw: ApiObject) -> Pod:
    """Return the pod in an object of the API."""
    meta, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    phase = status.get("phase") or "Pending"
    ended = phase in ENDED
    worker = _worker_status(meta, spec, status)
    others = () if ended else _running_beside(worker, status)
    node = shared(spec.get("nodeName") or None)
    created_at = seconds(meta.get("creationTimestamp")) or 0.0
    annotations, labels = meta.get("annotations") or {}, meta.get("labels") or {}
    queue = labels.get(QUEUE_NAME) or None
    job = labels.get(names.LABEL_JOB)
    is_held = KUEUE_FINALIZER in (meta.get("finalizers") or ())
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        rank=replica_index(meta),
        node=node,
        phase=phase,
        created_at=created_at,
        deletion_deadline=seconds(meta.get("deletionTimestamp")),
        scheduled_at=None if node is None else (_scheduled_at(status) or created_at),
        has_started=ended or _has_started(status),
        # What becomes of other containers then keeps no replica from training.
        problem=None
        if ended or "running" in _state(worker)
        else _problem(spec, status, scheduled=node is not None),
        exit=_exit(status, worker, others) if ended or others else None,
        priority=spec.get("priority"),
        is_ending=spec.get("activeDeadlineSeconds") == END_DEADLINE,
        init_container=_running_init_container(spec, status),
        controller=_controller(meta),
        template=shared(annotations.get(names.ANNOTATION_TEMPLATE)),
        accelerator=annotations.get(names.ANNOTATION_ACCELERATOR),
        is_extra=names.LABEL_EXTRA in labels,
        attempt=_number(labels.get(names.LABEL_ATTEMPT)),
        queue=queue,
        group_size=_number(annotations.get(POD_GROUP_SIZE)),
        gang=(spec.get("schedulingGroup") or {}).get("podGroupName"),
        scheduling=only(spec, SCHEDULING_FIELDS) if queue is not None else {},
        held_group=labels.get(POD_GROUP) if is_held else None,
        namespace=meta["namespace"],
        version=int(meta.get("resourceVersion") or 0),
        job=None if job is None else (meta["namespace"], job),
        requests=shared(_requests(spec)),
    )


def _requests(spec: ApiObject) -> ApiObject:
    """Return the parts of a PodSpec that say what a pod requests: a whole pod takes ten times as much."""
    kept = only(spec, ("overhead", "resources"))
    for kind in ("containers", "initContainers"):
        kept[kind] = [only(each, ("resources", "restartPolicy")) for each in spec.get(kind) or ()]
    return kept


def _controller(meta: ApiObject) -> tuple[str, str, str]:
    owners = (owner for owner in meta.get("ownerReferences") or () if owner.get("controller"))
    return next(((owner["kind"], owner["name"], owner["uid"]) for owner in owners), ("", "", ""))


def _number(text: str | None) -> int:
    # Anybody who may write pods writes this text, of any length.
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else 0


def _scheduled_at(status: ApiObject) -> float | None:
    """Return when the scheduler assigned the pod to a node; pods that name their node have no such time."""
    condition = find_condition(status, "PodScheduled")
    return seconds(condition.get("lastTransitionTime")) if condition is not None else None


# -- container statuses ------------------------------------------------------------------------------------


def _statuses(status: ApiObject, key: str) -> Sequence[ApiObject]:
    return status.get(key) or ()


def _state(container: ApiObject | None) -> ApiObject:
    return (container or {}).get("state") or {}


def _worker_status(meta: ApiObject, spec: ApiObject, status: ApiObject) -> ApiObject | None:
    """Return the status of the container that trains. None before it has a status.

    The pod names it. A pod that the operator has not made does not: it is the container named `worker`, or
    the first.
    """
    containers = [container["name"] for container in spec["containers"]]
    default = names.WORKER_CONTAINER if names.WORKER_CONTAINER in containers else containers[0]
    worker = (meta.get("annotations") or {}).get(names.ANNOTATION_WORKER, default)
    statuses = _statuses(status, "containerStatuses")
    return next((container for container in statuses if container["name"] == worker), None)


def _running_beside(worker: ApiObject | None, status: ApiObject) -> tuple[str, ...]:
    """Return the containers that have not ended though the worker has; none if the worker has not ended.

    Init containers that run as sidecars are not among them: they end by themselves once all containers have.
    """
    if "terminated" not in _state(worker):
        return ()
    containers = _statuses(status, "containerStatuses")
    return tuple(each["name"] for each in containers if "terminated" not in _state(each))


def _has_started(status: ApiObject) -> bool:
    containers = [*_statuses(status, "initContainerStatuses"), *_statuses(status, "containerStatuses")]
    return any(_state(container).keys() & {"running", "terminated"} for container in containers)


def _running_init_container(spec: ApiObject, status: ApiObject) -> str | None:
    sidecars = [
        each["name"] for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"
    ]
    running = (each for each in _statuses(status, "initContainerStatuses") if "running" in _state(each))
    return next((each["name"] for each in running if each["name"] not in sidecars), None)


def _waiting(status: ApiObject) -> Iterator[tuple[str, ApiObject]]:
    kinds = (("init container", "initContainerStatuses"), ("container", "containerStatuses"))
    for kind, key in kinds:
        for container in _statuses(status, key):
            if "waiting" in _state(container):
                yield kind, container


# -- why a pod does not start ------------------------------------------------------------------------------


def _problem(spec: ApiObject, status: ApiObject, *, scheduled: bool) -> PodProblem | None:
    if not scheduled:
        return _scheduling_problem(spec, status)
    for kind, container in _waiting(status):
        waiting = _state(container)["waiting"]
        reason, message = waiting.get("reason") or "", waiting.get("message") or ""
        detail = f"{reason}: {message}" if message else reason
        container_name = f"{kind} {container['name']}"
        if reason in _IMAGE_PULL_FAILURES:
            return PodProblem(
                Reason.IMAGE_PULL_FAILED, f"{container_name}, image {container['image']}: {detail}"
            )
        if reason in _START_FAILURES:
            hint = _NOT_ROOT if "runAsNonRoot" in message else ""
            return PodProblem(Reason.CONTAINER_START_FAILED, f"{container_name}: {detail}{hint}")
    return None


def _scheduling_problem(spec: ApiObject, status: ApiObject) -> PodProblem | None:
    gates = [gate["name"] for gate in spec.get("schedulingGates") or ()]
    if any(gate.startswith(f"{KUEUE_GROUP}/") for gate in gates):
        return PodProblem(Reason.QUEUED, "waiting for Kueue to reserve quota")
    if gates:
        listed = ", ".join(gates)
        return PodProblem(Reason.SCHEDULING_GATED, f"waiting until scheduling gates are removed: {listed}")
    for condition in _statuses(status, "conditions"):
        if condition.get("reason") == "SchedulingGated":
            # The gates are gone, and the scheduler has not looked at the pod since.
            return None
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = condition.get("message") or condition.get("reason") or "no node is available"
            if not _VOLUME_MESSAGE.search(message):
                return PodProblem(Reason.UNSCHEDULABLE, message)
            claims = [claim for claim in _claim_names(spec) if claim not in message]
            suffix = f" (PersistentVolumeClaims of the pod: {', '.join(claims)})" if claims else ""
            return PodProblem(Reason.VOLUME_NOT_BOUND, f"{message}{suffix}")
    return None


def _claim_names(spec: ApiObject) -> Iterator[str]:
    for volume in spec.get("volumes") or ():
        claim = volume.get("persistentVolumeClaim")
        if claim:
            yield claim["claimName"]


# -- how a pod has ended -----------------------------------------------------------------------------------


def _exit(status: ApiObject, worker: ApiObject | None, others: tuple[str, ...]) -> PodExit:
    container = _decisive_container(status, worker)
    terminated: ApiObject = _state(container).get("terminated") or {}
    of_worker = container is None or container is worker
    text = terminated.get("message") or ""
    message = text or status.get("message") or ""
    if container is not None and not of_worker:
        message = f"container {container['name']}: {message}".rstrip(": ")
    code = terminated.get("exitCode")
    reasons = [status.get("reason"), terminated.get("reason")]
    if reasons[0] == "DeadlineExceeded":
        # The operator has ended what ran on after the worker.
        reasons.reverse()
    return PodExit(
        exit_code=code,
        reason=next(filter(None, reasons), ""),
        message=message,
        termination=TerminationMessage.parse(text) if of_worker else None,
        disruption=find_condition(status, "DisruptionTarget") is not None,
        of_worker=of_worker,
        others=others,
        ended_at=seconds(terminated.get("finishedAt")),
    )


def _decisive_container(status: ApiObject, worker: ApiObject | None) -> ApiObject | None:
    """Return the container that decided the result: the worker, unless only another container failed."""

    def failed(container: ApiObject | None) -> bool:
        return bool((_state(container).get("terminated") or {}).get("exitCode"))

    if failed(worker):
        return worker
    others = [*_statuses(status, "initContainerStatuses"), *_statuses(status, "containerStatuses")]
    if status.get("phase") == "Failed":
        return next((container for container in others if failed(container)), worker)
    return worker


def failed_pods(pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods that the program has failed in, by creation time."""
    failed = [pod for pod in pods if pod.exit is not None and is_program_failure(pod.exit)]
    return sorted(failed, key=lambda pod: (pod.created_at, pod.rank))


def program_failures(pods: Iterable[Pod]) -> list[ProgramFailure]:
    """Return the failures of the program in pods, by creation time."""
    failures = []
    for pod in failed_pods(pods):
        end = pod.exit
        assert end is not None
        assert end.exit_code is not None
        agent = end.termination
        failures.append(
            ProgramFailure(
                pod.rank,
                agent.generation if agent is not None else 0,
                end.exit_code,
                agent.log if agent is not None else end.message,
                f"pod {pod.name}",
                is_reported=agent is not None and end.of_worker,
            )
        )
    return failures


def is_program_failure(end: PodExit) -> bool:
    """Whether a pod has ended by a failure of the program, which counts against `backoffLimit`.

    Not a failure: the program saved its state and left, it was killed or ran out of memory, or Kubernetes
    ended the pod or never started it.
    """
    if end.exit_code is None or end.disruption:
        return False
    exit_class = classify_exit(end.exit_code, out_of_memory=end.reason == "OOMKilled")
    if end.of_worker or exit_class in {ExitClass.KILLED, ExitClass.OUT_OF_MEMORY}:
        return exit_class.is_failure
    # The exit codes of agents have no meaning in another container.
    return end.exit_code != 0


# -- why a pod starts slowly -------------------------------------------------------------------------------

CONTAINER_START_TIMEOUT: Final = 10.0
"""Seconds that a node may take for a pod's volumes and network before its Events are read. Before that they
often report problems that disappear by themselves."""
CONTAINER_CREATING_TIMEOUT: Final = 60.0
"""Seconds after which a pod in ContainerCreating is reported in any case."""
_START_EVENTS: Final = frozenset(
    {"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox", "NetworkNotReady"}
)
"""Reasons of Events by which a node reports why it has started no container. Pod statuses don't have them."""
_ORDINARY: Final = ("Scheduled", "SuccessfulAttachVolume", "Pulled", "Created", "Started", "Killing")
"""Reasons of Events that don't explain why a pod is still in ContainerCreating. Each pod has some of them."""
START_EVENTS: Final = ",".join(["involvedObject.kind=Pod", *(f"reason!={reason}" for reason in _ORDINARY)])
"""Selects Events that may say why pods start no container."""


def slow_pod(pods: Iterable[Pod], now: float) -> Pod | None:
    """Return the first pod that was assigned to a node and has started no container in time."""
    slow = (pod for pod in pods if _seconds_creating(pod, now) > CONTAINER_START_TIMEOUT)
    return min(slow, key=lambda pod: pod.rank, default=None)


def with_start_problem(pod: Pod, events: Sequence[ApiObject], now: float) -> Pod:
    """Return a pod. If it starts no container, it has the reason, from the Events about it.

    A pod with an Event about a failed start has that as its problem after `CONTAINER_START_TIMEOUT`; any
    other is reported as slow after `CONTAINER_CREATING_TIMEOUT`, with its newest Event if it has any.
    """
    elapsed = _seconds_creating(pod, now)
    if elapsed <= CONTAINER_START_TIMEOUT:
        return pod
    events = _lasting(pod, events)
    failure = _newest(event for event in events if event["reason"] in _START_EVENTS)
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


def _lasting(pod: Pod, events: Sequence[ApiObject]) -> list[ApiObject]:
    """Return the Events about a pod without failures that are over: Events stay for an hour.

    A node pulls images once the volumes and the network of a pod are there.
    """
    pulls = max((_last_seen(event) for event in events if event["reason"] == "Pulling"), default=-inf)
    over = inf if pod.has_started else pulls
    return [each for each in events if each["reason"] not in _START_EVENTS or _last_seen(each) > over]


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


# -- what the cache keeps ----------------------------------------------------------------------------------

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


def lost_nodes(nodes: Iterable[ApiObject]) -> frozenset[str]:
    """Return the names of the nodes that are not ready."""
    return frozenset(str(node["metadata"]["name"]) for node in nodes if not is_ready(node))


def is_ready(node: ApiObject) -> bool:
    """Whether a node has the condition Ready."""
    return find_condition(node.get("status") or {}, "Ready") is not None


def is_deleting(raw: ApiObject) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in raw["metadata"]
