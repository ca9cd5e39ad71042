"""Which container of a pod template trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from adascale_core import names

DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
"""The annotation of a pod that names the container which kubectl uses by default."""


def worker_name(containers: Sequence[str], annotations: Mapping[str, Any]) -> str | None:
    """Return the name of the container that trains. None if it can't be known.

    It is the only container, the container named `worker`, or the container that the annotation
    `kubectl.kubernetes.io/default-container` names.
    """
    named = annotations.get(DEFAULT_CONTAINER)
    for name in (names.WORKER_CONTAINER, named):
        if name in containers:
            return name
    return containers[0] if len(containers) == 1 else None


def find_worker(template: Mapping[str, Any]) -> int:
    """Return the index of the container that trains, in a pod template as JSON that was validated."""
    containers = [str(container.get("name") or "") for container in template["spec"]["containers"]]
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    name = worker_name(containers, annotations)
    return containers.index(name) if name is not None else 0
