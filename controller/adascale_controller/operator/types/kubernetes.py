"""Objects of the Kubernetes API as JSON, and the names in them that several phases read."""

from __future__ import annotations

from collections.abc import Mapping
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

COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
"""Annotation and label of a pod of an Indexed Job: its rank."""
SCHEDULING_FIELDS: Final = ("nodeSelector", "tolerations")
"""Fields of a PodSpec that another program may set in an Indexed Job that is suspended."""
TRACKING_FINALIZER: Final = "batch.kubernetes.io/job-tracking"
"""The finalizer that the Job controller removes once it has counted a pod and created its replacement."""

ORPHAN_FINALIZER: Final = "orphan"
"""The finalizer of an object that is deleted without the objects that it owns, until these have no owner."""


class Resource(StrEnum):
    """The resources that the operator watches, by their plural name."""

    ADASCALEJOBS = names.PLURAL
    JOBS = "jobs"
    PODS = "pods"
    NODES = "nodes"


def seconds(timestamp: str | None) -> float | None:
    """Return a timestamp of the Kubernetes API in seconds since 1970."""
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()


def timestamp(moment: float) -> str:
    """Return seconds since 1970 as a timestamp of the Kubernetes API."""
    return datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def object_key(raw: ApiObject) -> JobKey:
    """Return namespace (empty for cluster-scoped objects) and name of an object."""
    meta = raw["metadata"]
    return meta.get("namespace", ""), meta["name"]


def first_replica(meta: ApiObject) -> int:
    """Return the index of the replica of the first pod of an Indexed Job, from its metadata or a pod's."""
    first = (meta.get("annotations") or {}).get(names.ANNOTATION_FIRST_REPLICA)
    return int(first) if first is not None and first.isdecimal() else 0


def replica_index(meta: ApiObject) -> int:
    """Return the index of the replica of a pod, from the pod's metadata; -1 without an index.

    It is that of the pod in its Indexed Job, after the replicas of the core if it is an extra pod.
    """
    index = (meta.get("annotations") or {}).get(COMPLETION_INDEX)
    if index is None:
        index = (meta.get("labels") or {}).get(COMPLETION_INDEX)
    return first_replica(meta) + int(index) if index is not None and index.isdecimal() else -1
