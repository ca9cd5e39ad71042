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
TRACKING_FINALIZER: Final = "batch.kubernetes.io/job-tracking"
"""The finalizer that the Job controller removes once it has counted a pod and created its replacement."""


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
