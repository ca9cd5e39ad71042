"""Conditions of an AdaScaleJob, and the reasons that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from adascale_controller.operator.resource import timestamp

MAX_MESSAGE = 4096
"""Characters of a message, at most: the API allows 32768, people read less."""


class ConditionType(StrEnum):
    """What can be said of a job."""

    RUNNING = "Running"
    RESCALING = "Rescaling"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Why a condition is as it is. `docs/kubernetes.md` has what to do about each."""

    TRAINING = "Training"
    STARTING = "Starting"
    REENTERING = "Reentering"
    PREPARING = "Preparing"
    SETTLED = "Settled"
    WAITING_FOR_ROOM = "WaitingForRoom"
    SUSPENDED = "Suspended"
    SCALED_TO_ZERO = "ScaledToZero"
    RESUMED = "Resumed"
    TEMPLATE_CHANGED = "TemplateChanged"
    METRICS_SERVICE_UNAVAILABLE = "MetricsServiceUnavailable"
    NAME_TAKEN = "NameTaken"
    CLEANING_UP = "CleaningUp"
    UNSCHEDULABLE = "Unschedulable"
    VOLUME_NOT_FOUND = "VolumeNotFound"
    VOLUME_NOT_BOUND = "VolumeNotBound"
    IMAGE_NOT_PULLED = "ImageNotPulled"
    CONTAINER_NOT_CREATED = "ContainerNotCreated"
    QUOTA_EXCEEDED = "QuotaExceeded"
    PODS_REFUSED = "PodsRefused"
    PROGRAM_FAILED = "ProgramFailed"
    FINISHED = "Finished"
    FAILED = "Failed"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    INVALID_SPEC = "InvalidSpec"


@dataclass(frozen=True)
class Condition:
    """One condition, as it is now."""

    type: ConditionType
    status: bool
    reason: str
    message: str = ""


def condition_of(status: Mapping[str, Any], kind: ConditionType) -> Condition | None:
    """A condition as a status has it; none if it doesn't."""
    for told in status.get("conditions") or ():
        if told["type"] == kind:
            return Condition(kind, told["status"] == "True", told["reason"], told.get("message", ""))
    return None


def is_true(status: Mapping[str, Any], kind: ConditionType) -> bool:
    """Whether a status has the condition, and it holds."""
    found = condition_of(status, kind)
    return found is not None and found.status


def merged(
    before: Sequence[Mapping[str, Any]], now: Sequence[Condition], generation: int, moment: float
) -> list[dict[str, Any]]:
    """The conditions as the status has them.

    Args:
        before: as the status had them.
        now: as they are.
        generation: of the spec that they were seen for.
        moment: when, in seconds since 1970; a condition that holds on keeps the time of its last change.
    """
    known = {told["type"]: told for told in before}
    conditions = []
    for one in now:
        status = "True" if one.status else "False"
        old = known.get(one.type)
        if old is not None and old["status"] == status:
            since = old["lastTransitionTime"]
        else:
            since = timestamp(moment)
        conditions.append(
            {
                "type": str(one.type),
                "status": status,
                "observedGeneration": generation,
                "lastTransitionTime": since,
                "reason": str(one.reason),
                "message": one.message[:MAX_MESSAGE],
            }
        )
    return conditions
