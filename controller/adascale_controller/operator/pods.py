"""What the pods of a job tell: where they are, what keeps them from starting, how they have ended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from adascale_controller.operator.capacity import pod_request
from adascale_controller.operator.conditions import Reason
from adascale_controller.operator.resource import seconds
from adascale_core import names
from adascale_core.exit_codes import ExitClass, classify_exit, signal_number
from adascale_core.termination_message import TerminationMessage

Raw = Mapping[str, Any]
"""An object of the Kubernetes API, or a part of one, as its JSON."""

COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
TRACKING: Final = "batch.kubernetes.io/job-tracking"
"""The finalizer by which the Job controller keeps a pod until it has counted it and made the next."""
LONG_LIFE: Final = 600.0
"""Seconds after which a pod that is lost was not lost for how it was started: Kubernetes' own."""

_NOT_PULLED: Final = frozenset(
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
_NOT_CREATED: Final = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "PreCreateHookError",
        "PreStartHookError",
        "PostStartHookError",
        "CrashLoopBackOff",  # of a sidecar, which is restarted even where the pod is not
    }
)
_ABOUT_A_VOLUME: Final = re.compile(
    r"persistentvolumeclaim|persistent volumes? to bind|pvc\(s\)|binding volumes|VolumeBinding", re.IGNORECASE
)
"""How the scheduler speaks of claims."""


@dataclass(frozen=True)
class Problem:
    """What keeps a pod from starting.

    Args:
        reason: as in a condition.
        message: in words, with the name of what is missing.
    """

    reason: Reason
    message: str


@dataclass(frozen=True)
class Ended:
    """How a pod has ended.

    Args:
        exit_code: of the container that trains, or of the one for which the pod has failed; none: no
            container of it has run.
        signal: that has ended the container, if one has.
        reason: in Kubernetes' word: Completed, Error, OOMKilled, StartError, Evicted, DeadlineExceeded.
        message: what the container, or else Kubernetes, says of it.
        words: what the agent has said of a program that failed, if it has.
        disruption: whether Kubernetes has ended the pod for reasons of its own: eviction, a lost node.
        of_worker: whether the exit code is that of the container that trains.
    """

    exit_code: int | None
    signal: int | None = None
    reason: str = ""
    message: str = ""
    words: TerminationMessage | None = None
    disruption: bool = False
    of_worker: bool = True


@dataclass(frozen=True)
class Pod:
    """A pod of a job.

    Args:
        name, uid: which one.
        rank: its completion index; -1 where it has none, so it isn't of an Indexed Job.
        node: where it runs; none: nowhere yet.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        created_at: seconds since 1970.
        deleting_since: when it should have ended, the grace period included, in seconds since 1970; none:
            nobody has deleted it.
        scheduled: whether a node was found for it.
        begun: whether one of its containers was ever started.
        running: whether the container that trains runs.
        problem: what keeps it from starting, if something does.
        ended: how it has ended, if it has.
        request: resource -> whole units that it takes of a node.
        kept: whether the Job controller keeps it from being deleted for good.
    """

    name: str
    uid: str
    rank: int
    node: str | None
    phase: str
    created_at: float
    deleting_since: float | None = None
    scheduled: bool = False
    begun: bool = True
    running: bool = False
    problem: Problem | None = None
    ended: Ended | None = None
    request: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    kept: bool = False


def read_pod(raw: Raw) -> Pod:
    """The pod in an object of the API."""
    meta, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    phase = status.get("phase") or "Pending"
    over = phase in ("Succeeded", "Failed")
    node = spec.get("nodeName") or None
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        rank=_rank(meta),
        node=node,
        phase=phase,
        created_at=seconds(meta.get("creationTimestamp")) or 0.0,
        deleting_since=seconds(meta.get("deletionTimestamp")),
        scheduled=node is not None,
        begun=over or _begun(status),
        running=not over and "running" in _state(_worker_status(spec, status)),
        problem=None if over else _problem(spec, status, scheduled=node is not None),
        ended=_ended(spec, status) if over else None,
        request=pod_request(spec),
        kept=TRACKING in (meta.get("finalizers") or ()),
    )


def own_failure(ended: Ended) -> bool:
    """Whether a pod has ended by the program's own failure, which counts against `backoffLimit`.

    It has not where the program left with its state saved, was killed, or ran out of memory, and where
    Kubernetes has ended the pod or never started it.
    """
    if ended.exit_code is None or ended.disruption:
        return False
    exit_class = classify_exit(ended.exit_code, out_of_memory=ended.reason == "OOMKilled")
    if ended.of_worker or exit_class in {ExitClass.KILLED, ExitClass.OUT_OF_MEMORY}:
        return exit_class.is_failure
    # Of a container other than the worker, the exit codes of agents have no meaning.
    return ended.exit_code != 0


def is_lost(pod: Pod, now: float) -> bool:
    """Whether a pod was ended from outside, so that another one may be started in its place at once.

    One that was killed or ran out of memory soon after its start may be so again: it is not.
    """
    if pod.ended is None or pod.phase != "Failed" or own_failure(pod.ended):
        return False
    return pod.ended.disruption or pod.deleting_since is not None or now > pod.created_at + LONG_LIFE


def _rank(meta: Raw) -> int:
    index = (meta.get("annotations") or {}).get(COMPLETION_INDEX)
    if index is None:
        index = (meta.get("labels") or {}).get(COMPLETION_INDEX)
    return int(index) if index is not None and index.isdecimal() else -1


# -- statuses of containers --------------------------------------------------------------------------------


def _statuses(status: Raw, key: str) -> Sequence[Raw]:
    return status.get(key) or ()


def _state(container: Raw | None) -> Raw:
    return (container or {}).get("state") or {}


def _worker_status(spec: Raw, status: Raw) -> Raw | None:
    """The status of the container named `worker`, or of the first, once there is one."""
    containers = [one["name"] for one in spec["containers"]]
    worker = names.WORKER_CONTAINER if names.WORKER_CONTAINER in containers else containers[0]
    return next((one for one in _statuses(status, "containerStatuses") if one["name"] == worker), None)


# -- what keeps a pod from starting ------------------------------------------------------------------------


def _problem(spec: Raw, status: Raw, *, scheduled: bool) -> Problem | None:
    if not scheduled:
        return _not_scheduled(spec, status)
    for what, container in _waiting(status):
        waiting = _state(container)["waiting"]
        reason, message = waiting.get("reason") or "", waiting.get("message") or ""
        said = f"{reason}: {message}" if message else reason
        if reason in _NOT_PULLED:
            return Problem(
                Reason.IMAGE_NOT_PULLED, f"{what} {container['name']}, image {container['image']}: {said}"
            )
        if reason in _NOT_CREATED:
            return Problem(Reason.CONTAINER_NOT_CREATED, f"{what} {container['name']}: {said}")
    return None


def _not_scheduled(spec: Raw, status: Raw) -> Problem | None:
    for condition in _statuses(status, "conditions"):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = condition.get("message") or condition.get("reason") or "no node takes it"
            if not _ABOUT_A_VOLUME.search(message):
                return Problem(Reason.UNSCHEDULABLE, message)
            claims = [claim for claim in _claims(spec) if claim not in message]
            told = f" (PersistentVolumeClaims of the pod: {', '.join(claims)})" if claims else ""
            return Problem(Reason.VOLUME_NOT_BOUND, f"{message}{told}")
    return None


def _claims(spec: Raw) -> Iterator[str]:
    for volume in spec.get("volumes") or ():
        claim = volume.get("persistentVolumeClaim")
        if claim:
            yield claim["claimName"]


def _begun(status: Raw) -> bool:
    containers = [*_statuses(status, "initContainerStatuses"), *_statuses(status, "containerStatuses")]
    return any(_state(one).keys() & {"running", "terminated"} for one in containers)


def _waiting(status: Raw) -> Iterator[tuple[str, Raw]]:
    kinds = (("init container", "initContainerStatuses"), ("container", "containerStatuses"))
    for what, key in kinds:
        for container in _statuses(status, key):
            if "waiting" in _state(container):
                yield what, container


# -- how a pod has ended -----------------------------------------------------------------------------------


def _ended(spec: Raw, status: Raw) -> Ended:
    worker = _worker_status(spec, status)
    to_blame = _to_blame(status, worker)
    end: Raw = _state(to_blame).get("terminated") or {}
    of_worker = to_blame is None or to_blame is worker
    text = end.get("message") or ""
    said = text or status.get("message") or ""
    if to_blame is not None and not of_worker:
        said = f"container {to_blame['name']}: {said}".rstrip(": ")
    code = end.get("exitCode")
    return Ended(
        exit_code=code,
        signal=end.get("signal") or (signal_number(code) if code is not None else None),
        reason=status.get("reason") or end.get("reason") or "",
        message=said,
        words=TerminationMessage.parse(text) if of_worker else None,
        disruption=any(
            one["type"] == "DisruptionTarget" and one["status"] == "True"
            for one in _statuses(status, "conditions")
        ),
        of_worker=of_worker,
    )


def _to_blame(status: Raw, worker: Raw | None) -> Raw | None:
    """The container whose end tells how the pod has ended: the worker, unless only another one failed."""

    def failed(container: Raw | None) -> bool:
        return bool((_state(container).get("terminated") or {}).get("exitCode"))

    if failed(worker):
        return worker
    others = [*_statuses(status, "initContainerStatuses"), *_statuses(status, "containerStatuses")]
    if status.get("phase") == "Failed":
        return next((one for one in others if failed(one)), worker)
    return worker
