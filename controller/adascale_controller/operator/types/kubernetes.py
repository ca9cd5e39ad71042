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

SCHEDULING_FIELDS: Final = ("nodeSelector", "tolerations")
"""Fields of a PodSpec to which Kueue adds those of a flavor."""


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


def object_key(raw: ApiObject) -> JobKey:
    """Return namespace (empty for cluster-scoped objects) and name of an object."""
    meta = raw["metadata"]
    return meta.get("namespace", ""), meta["name"]


def replica_index(meta: ApiObject) -> int:
    """Return the index of the replica of a pod, from the pod's metadata; -1 without an index."""
    index = (meta.get("labels") or {}).get(names.LABEL_REPLICA)
    return int(index) if index is not None and index.isdecimal() else -1
