"""Objects of the Kubernetes API as JSON, the names in them that several phases read, and conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from adascale_core import names

ApiObject = Mapping[str, Any]
"""An object of the Kubernetes API, or a part of an object, as JSON."""
JobKey = tuple[str, str]
"""Namespace and name of a job, and of any other object."""
Manifest = dict[str, Any]
"""An `ApiObject` under construction."""

SCHEDULING_FIELDS: Final = ("nodeSelector", "tolerations")
"""Fields of a PodSpec to which Kueue adds those of a flavor."""


MAX_STRINGS: Final = 50_000
"""Strings that are remembered, to be shared by further objects."""
MAX_SHARED: Final = 32
"""Characters of a string that is shared. Longer ones, such as uids, are mostly of a single object."""
_strings: Final[dict[str, str]] = {}


def only(members: ApiObject, wanted: Iterable[str]) -> Manifest:
    """Return the wanted members of an object that has them."""
    return {name: members[name] for name in wanted if name in members}


def shared(value: Any) -> Any:
    """Return a value with equal strings as the same object: each object that is parsed has its own copies."""
    if len(_strings) > MAX_STRINGS:
        _strings.clear()
    if isinstance(value, str):
        return _strings.setdefault(value, value) if len(value) <= MAX_SHARED else value
    if isinstance(value, dict):
        return {_strings.setdefault(name, name): shared(member) for name, member in value.items()}
    if isinstance(value, list):
        return [shared(member) for member in value]
    return value


class Resource(StrEnum):
    """The resources that the operator watches, by their plural name."""

    ADASCALEJOBS = names.PLURAL
    PODS = "pods"
    NODES = "nodes"


def seconds(timestamp: str | None) -> float | None:
    """Return a timestamp of the Kubernetes API in seconds since 1970."""
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()


def timestamp(moment: float) -> str:
    """Return seconds since 1970 as a timestamp of the Kubernetes API."""
    return datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_condition(status: ApiObject, kind: str, value: str = "True") -> ApiObject | None:
    """Return the condition of a type in the status of an object, if it has this value; None if not."""
    conditions: Iterable[ApiObject] = status.get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind and each["status"] == value), None)


def object_key(raw: ApiObject) -> JobKey:
    """Return namespace (empty for cluster-scoped objects) and name of an object."""
    meta = raw["metadata"]
    return meta.get("namespace", ""), meta["name"]


def job_key(job_id: str) -> JobKey:
    """Return namespace and name in a job id."""
    namespace, _, name = job_id.partition(".")
    return namespace, name


def replica_index(meta: ApiObject) -> int:
    """Return the index of the replica of a pod, from the pod's metadata; -1 without an index."""
    index = (meta.get("labels") or {}).get(names.LABEL_REPLICA)
    return int(index) if index is not None and index.isdecimal() else -1


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
