"""The parts of objects that the operator reads: only these are kept in memory.

A whole pod takes ten times as much, and a node lists the images that it has. Equal strings are kept once:
each object that is parsed has its own copies of the names of its members, and of most values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from adascale_controller.operator.types.kubernetes import (
    SCHEDULING_FIELDS,
    ApiObject,
    Manifest,
    Resource,
)
from adascale_controller.operator.types.workload import POD_GROUP, POD_GROUP_SIZE, QUEUE_NAME
from adascale_core import names

MAX_STRINGS = 50_000
"""Strings that are remembered, to be shared by further objects."""
MAX_SHARED = 32
"""Characters of a string that is shared. Longer ones, such as uids, are mostly of a single object."""
_strings: Final[dict[str, str]] = {}

_POD_CONTAINER: Final = ("name", "resources", "restartPolicy")
_CONTAINER_STATUS: Final = ("name", "image", "state")
_POD_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "finalizers",
    "ownerReferences",
)
_POD_MARKS: Final = (
    names.LABEL_JOB,
    names.LABEL_REPLICA,
    names.LABEL_ATTEMPT,
    names.LABEL_EXTRA,
    names.ANNOTATION_WORKER,
    names.ANNOTATION_TEMPLATE,
    names.ANNOTATION_ACCELERATOR,
    QUEUE_NAME,
    POD_GROUP,
    POD_GROUP_SIZE,
)
"""The labels and annotations that are read."""
_POD_STATUS: Final = (
    "phase",
    "reason",
    "message",
    "conditions",
    "containerStatuses",
    "initContainerStatuses",
)


def cached_fields(resource: Resource, raw: ApiObject) -> ApiObject:
    """Return an object without the parts that the operator does not read."""
    metadata = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
    kept: ApiObject = _shared({**raw, "metadata": metadata, **_PARTS[resource](raw)})
    if len(_strings) > MAX_STRINGS:
        _strings.clear()
    return kept


def _of_pod(raw: ApiObject) -> Manifest:
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    kept = _only(
        spec,
        (
            "nodeName",
            "overhead",
            "resources",
            "activeDeadlineSeconds",
            "priority",
            "preemptionPolicy",
            "schedulingGates",
        ),
    )
    if QUEUE_NAME in (raw["metadata"].get("labels") or {}):
        kept |= _only(spec, SCHEDULING_FIELDS)
    for kind in ("containers", "initContainers"):
        if kind in spec:
            kept[kind] = [_only(each, _POD_CONTAINER) for each in spec[kind] or ()]
    kept["volumes"] = [each for each in spec.get("volumes") or () if "persistentVolumeClaim" in each]
    metadata = _only(raw["metadata"], _POD_METADATA)
    for kind in ("labels", "annotations"):
        metadata[kind] = _only(raw["metadata"].get(kind) or {}, _POD_MARKS)
    found = _only(status, _POD_STATUS)
    for kind in ("containerStatuses", "initContainerStatuses"):
        if kind in found:
            found[kind] = [_only(each, _CONTAINER_STATUS) for each in found[kind] or ()]
    return {"metadata": metadata, "spec": kept, "status": found}


def _of_node(raw: ApiObject) -> Manifest:
    return {"status": _only(raw.get("status") or {}, ("allocatable", "conditions"))}


def _shared(value: Any) -> Any:
    """Return a value with equal strings as the same object."""
    if isinstance(value, str):
        return _strings.setdefault(value, value) if len(value) <= MAX_SHARED else value
    if isinstance(value, dict):
        return {_strings.setdefault(name, name): _shared(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_shared(member) for member in value]
    return value


def _only(members: Mapping[str, object], wanted: Collection[str]) -> Manifest:
    return {name: members[name] for name in wanted if name in members}


_PARTS: Final[Mapping[Resource, Callable[[ApiObject], Manifest]]] = {
    Resource.ADASCALEJOBS: lambda _: {},
    Resource.PODS: _of_pod,
    Resource.NODES: _of_node,
}
