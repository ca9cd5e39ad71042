"""Conditions of an AdaScaleJob, and their reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from adascale_controller.operator.types.kubernetes import find_condition, timestamp

MAX_MESSAGE = 4096
"""The maximum length of a message, in characters. The API allows 32768, which is too long to read."""


class ConditionType(StrEnum):
    """The condition types of an AdaScaleJob."""

    RUNNING = "Running"
    RESCALING = "Rescaling"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    DEADLINE_FEASIBLE = "DeadlineFeasible"
    SLOW_REPLICA = "SlowReplica"


@dataclass(frozen=True)
class JobCondition:
    """A condition. `reason` is a string because a status may hold reasons of other versions."""

    type: ConditionType
    status: bool
    reason: str
    message: str = ""


def condition_of(status: Mapping[str, Any], kind: ConditionType) -> JobCondition | None:
    """Return the condition of a type in a status. None if the status has none."""
    for raw in status.get("conditions") or ():
        if raw["type"] == kind:
            return JobCondition(kind, raw["status"] == "True", raw["reason"], raw.get("message", ""))
    return None


def is_true(status: Mapping[str, Any], kind: ConditionType) -> bool:
    """Whether a status has the condition with status True."""
    return find_condition(status, kind) is not None


def has_ended(status: Mapping[str, Any]) -> bool:
    """Whether a status has the condition Complete or Failed."""
    return is_true(status, ConditionType.COMPLETE) or is_true(status, ConditionType.FAILED)


def merged(
    previous: Sequence[Mapping[str, Any]], current: Sequence[JobCondition], generation: int, now: float
) -> list[dict[str, Any]]:
    """Return the conditions as JSON, with the transition times of those whose status is unchanged."""
    previous_by_type = {raw["type"]: raw for raw in previous}
    conditions = []
    for condition in current:
        status = "True" if condition.status else "False"
        old = previous_by_type.get(condition.type)
        unchanged = old is not None and old["status"] == status
        since = old["lastTransitionTime"] if old is not None and unchanged else timestamp(now)
        conditions.append(
            {
                "type": str(condition.type),
                "status": status,
                "observedGeneration": generation,
                "lastTransitionTime": since,
                "reason": str(condition.reason),
                "message": condition.message[:MAX_MESSAGE],
            }
        )
    return conditions
