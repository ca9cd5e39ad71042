"""Whether all replicas share the folder in `checkpoint.path`."""

from __future__ import annotations

import posixpath
from typing import Final

from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.worker_container import find_worker

_POD_LOCAL: Final = frozenset({"emptyDir", "ephemeral"})
"""Volumes that are created and deleted with a pod."""
_READ_ONLY: Final = frozenset({"configMap", "secret", "downwardAPI", "projected", "image", "gitRepo"})
"""Volumes that a container can't write to."""


def why_not_shared(template: ApiObject, path: str) -> str | None:
    """Return why a checkpoint saved by one replica in `path` is not visible to the others.

    None if it is visible, or if the template does not show it: for example, whether a claim can be mounted
    on several nodes.
    """
    spec = template["spec"]
    worker = spec["containers"][find_worker(template)]
    mounts = {posixpath.normpath(mount["mountPath"]): mount for mount in worker.get("volumeMounts") or ()}
    mount_path = next((folder for folder in _with_parents(path) if folder in mounts), None)
    if mount_path is None:
        return f"container {worker['name']} mounts no volume at {path} or above it"
    mount = mounts[mount_path]
    volumes = {volume.get("name"): volume for volume in spec.get("volumes") or ()}
    source = next((key for key in volumes.get(mount.get("name"), {}) if key != "name"), "")
    volume = f"volume {mount.get('name')}, mounted at {mount_path} by container {worker['name']},"
    if source in _POD_LOCAL:
        return f"{volume} is of type {source}: each pod has its own"
    if source in _READ_ONLY or mount.get("readOnly"):
        return f"{volume} is read-only"
    return None


def _with_parents(path: str) -> list[str]:
    """Return a folder and all its parents, the innermost first."""
    folders = [posixpath.normpath(path)]
    while folders[-1] not in ("/", "//"):
        folders.append(posixpath.dirname(folders[-1]))
    return folders
