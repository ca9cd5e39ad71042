"""The pods of a job: where they run, what keeps them from starting, how they have ended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from adascale_controller.operator.types.conditions import Reason
from adascale_controller.operator.types.kubernetes import (
    COMPLETION_INDEX,
    TRACKING_FINALIZER,
    ApiObject,
    JobKey,
    seconds,
)
from adascale_core import names
from adascale_core.failures.termination_message import TerminationMessage

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
_VOLUME_MESSAGE: Final = re.compile(
    r"persistentvolumeclaim|persistent volumes? to bind|pvc\(s\)|binding volumes|VolumeBinding", re.IGNORECASE
)
"""Matches the scheduler's messages about claims."""


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not start.

    Args:
        reason: the reason of a condition.
        message: the message of a condition. It names the missing object.
        blocks: whether the pod can't start unless something changes. False if it may only be slow.
    """

    reason: Reason
    message: str
    blocks: bool = True


@dataclass(frozen=True)
class PodExit:
    """How a pod has ended.

    Args:
        exit_code: exit code of the worker, or of the container that failed the pod. None if no container ran.
        reason: Kubernetes' reason: Completed, Error, OOMKilled, StartError, Evicted, DeadlineExceeded.
        message: the message of the container, or else of the pod.
        termination: the termination message of the agent; None if it wrote none.
        disruption: whether the pod has the condition DisruptionTarget: eviction, preemption, a lost node.
        of_worker: whether the exit code is that of the worker.
    """

    exit_code: int | None
    reason: str = ""
    message: str = ""
    termination: TerminationMessage | None = None
    disruption: bool = False
    of_worker: bool = True


@dataclass(frozen=True)
class Pod:
    """A pod of a job.

    Args:
        name, uid: its identity.
        rank: its completion index. -1 if it has none, so it does not belong to an Indexed Job.
        node: the node that it is assigned to.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        created_at: seconds since 1970.
        deletion_deadline: deletion timestamp, which includes the grace period, in seconds since 1970. None if
            it is not being deleted.
        scheduled_at: when it was assigned to its node, in seconds since 1970. None if it is not.
        has_started: whether one of its containers has ever started.
        problem: why it does not start.
        exit: how it has ended. None if it has not.
        tracked: whether it has the Job controller's finalizer.
    """

    name: str
    uid: str
    rank: int
    node: str | None
    phase: str
    created_at: float
    deletion_deadline: float | None = None
    scheduled_at: float | None = None
    has_started: bool = True
    problem: PodProblem | None = None
    exit: PodExit | None = None
    tracked: bool = False

    @property
    def is_placed(self) -> bool:
        """Whether it is on a node and nothing keeps it from starting."""
        return self.node is not None and (self.problem is None or not self.problem.blocks)


def read_pod(raw: ApiObject) -> Pod:
    """Return the pod in an object of the API."""
    meta, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    phase = status.get("phase") or "Pending"
    ended = phase in ("Succeeded", "Failed")
    node = spec.get("nodeName") or None
    created_at = seconds(meta.get("creationTimestamp")) or 0.0
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        rank=_rank(meta),
        node=node,
        phase=phase,
        created_at=created_at,
        deletion_deadline=seconds(meta.get("deletionTimestamp")),
        scheduled_at=None if node is None else (_scheduled_at(status) or created_at),
        has_started=ended or _has_started(status),
        problem=None if ended else _problem(spec, status, scheduled=node is not None),
        exit=_exit(spec, status) if ended else None,
        tracked=TRACKING_FINALIZER in (meta.get("finalizers") or ()),
    )


def job_of_pod(raw: ApiObject) -> JobKey | None:
    """Return namespace and name of the job that a pod belongs to. None if it has no job label."""
    meta = raw["metadata"]
    name = (meta.get("labels") or {}).get(names.LABEL_JOB)
    return None if name is None else (meta["namespace"], name)


def _rank(meta: ApiObject) -> int:
    index = (meta.get("annotations") or {}).get(COMPLETION_INDEX)
    if index is None:
        index = (meta.get("labels") or {}).get(COMPLETION_INDEX)
    return int(index) if index is not None and index.isdecimal() else -1


def _scheduled_at(status: ApiObject) -> float | None:
    """Return when the scheduler assigned the pod to a node; pods that name their node have no such time."""
    for condition in _statuses(status, "conditions"):
        if condition["type"] == "PodScheduled" and condition["status"] == "True":
            return seconds(condition.get("lastTransitionTime"))
    return None


# -- container statuses ------------------------------------------------------------------------------------


def _statuses(status: ApiObject, key: str) -> Sequence[ApiObject]:
    return status.get(key) or ()


def _state(container: ApiObject | None) -> ApiObject:
    return (container or {}).get("state") or {}


def _worker_status(spec: ApiObject, status: ApiObject) -> ApiObject | None:
    """Return the status of the container named `worker`, or of the first. None before it has a status."""
    containers = [container["name"] for container in spec["containers"]]
    worker = names.WORKER_CONTAINER if names.WORKER_CONTAINER in containers else containers[0]
    statuses = _statuses(status, "containerStatuses")
    return next((container for container in statuses if container["name"] == worker), None)


def _has_started(status: ApiObject) -> bool:
    containers = [*_statuses(status, "initContainerStatuses"), *_statuses(status, "containerStatuses")]
    return any(_state(container).keys() & {"running", "terminated"} for container in containers)


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
            return PodProblem(Reason.CONTAINER_START_FAILED, f"{container_name}: {detail}")
    return None


def _scheduling_problem(spec: ApiObject, status: ApiObject) -> PodProblem | None:
    for condition in _statuses(status, "conditions"):
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


def _exit(spec: ApiObject, status: ApiObject) -> PodExit:
    worker = _worker_status(spec, status)
    container = _decisive_container(status, worker)
    terminated: ApiObject = _state(container).get("terminated") or {}
    of_worker = container is None or container is worker
    text = terminated.get("message") or ""
    message = text or status.get("message") or ""
    if container is not None and not of_worker:
        message = f"container {container['name']}: {message}".rstrip(": ")
    code = terminated.get("exitCode")
    return PodExit(
        exit_code=code,
        reason=status.get("reason") or terminated.get("reason") or "",
        message=message,
        termination=TerminationMessage.parse(text) if of_worker else None,
        disruption=any(
            condition["type"] == "DisruptionTarget" and condition["status"] == "True"
            for condition in _statuses(status, "conditions")
        ),
        of_worker=of_worker,
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
