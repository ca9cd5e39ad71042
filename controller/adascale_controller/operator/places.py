"""Whether the folder that a user names for the state is one that all replicas share."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any, Final

from adascale_core import names

_OF_ONE_POD: Final = frozenset({"emptyDir", "ephemeral"})
"""Volumes that are made with a pod and go with it."""
_NOT_WRITTEN: Final = frozenset({"configMap", "secret", "downwardAPI", "projected", "image", "gitRepo"})
"""Volumes that nothing can be saved in."""


def why_not_shared(template: Mapping[str, Any], path: str) -> str | None:
    """Why state that one replica saves in `path` would not be found by the others; none if it would.

    What cannot be told from the template, as whether a claim can be mounted on several nodes, is let pass.

    Args:
        template: `spec.template` as the user wrote it, each of its containers with a name.
        path: of a folder, in the container that trains.
    """
    spec = template["spec"]
    containers = spec["containers"]
    worker = next((one for one in containers if one.get("name") == names.WORKER_CONTAINER), containers[0])
    mounts = {posixpath.normpath(one["mountPath"]): one for one in worker.get("volumeMounts") or ()}
    place = next((one for one in _from_within(path) if one in mounts), None)
    if place is None:
        return f"container {worker['name']} mounts no volume at {path} or above it"
    mount = mounts[place]
    volumes = {one.get("name"): one for one in spec.get("volumes") or ()}
    kind = next((key for key in volumes.get(mount.get("name"), {}) if key != "name"), "")
    told = f"volume {mount.get('name')}, which container {worker['name']} mounts at {place}, is "
    if kind in _OF_ONE_POD:
        return f"{told}an {kind} volume: each pod has one of its own"
    if kind in _NOT_WRITTEN or mount.get("readOnly"):
        return f"{told}one that nothing can be saved in"
    return None


def _from_within(path: str) -> list[str]:
    """The folder, and all that it is in, the nearest first."""
    found = [posixpath.normpath(path)]
    while found[-1] not in ("/", "//"):
        found.append(posixpath.dirname(found[-1]))
    return found
