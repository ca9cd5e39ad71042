"""The cache of watched objects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from adascale_controller.operator.types.kubernetes import ApiObject, Resource, object_key

_Key = tuple[str, str]


class ObjectCache:
    """The newest version of each watched object.

    Versions come from watches, from lists, and from answers to writes, and may come late. An object is only
    replaced by a newer version. (The API server numbers the versions of one resource in order: KEP-5504.)
    To be used from the event loop only.
    """

    def __init__(self) -> None:
        self._objects: dict[Resource, dict[_Key, ApiObject]] = {resource: {} for resource in Resource}
        self._deleted: dict[Resource, dict[_Key, int]] = {resource: {} for resource in Resource}
        """Versions in which objects were deleted: an older version must not bring them back."""
        self.changed = asyncio.Event()
        """Is set by each change. The reader clears it."""

    def all(self, resource: Resource) -> list[ApiObject]:
        """Return all objects of a resource, by namespace and name."""
        objects = self._objects[resource]
        return [objects[key] for key in sorted(objects)]

    def put(self, resource: Resource, raw: ApiObject, *, is_news: bool = True) -> None:
        """Store an object unless the cache has it in a newer version.

        Args:
            resource: its resource.
            raw: the object.
            is_news: whether a reader has to look at it now. A heartbeat of a node never is.
        """
        key = object_key(raw)
        cached = self._objects[resource].get(key)
        newest = self._deleted[resource].get(key, -1) if cached is None else _version(cached)
        if newest >= _version(raw):
            return
        self._objects[resource][key] = raw
        if is_news and not (resource is Resource.NODES and cached is not None and _is_heartbeat(cached, raw)):
            self.changed.set()

    def remove(self, resource: Resource, raw: ApiObject) -> None:
        """Remove a deleted object, of which `raw` is the last version."""
        key = object_key(raw)
        cached = self._objects[resource].get(key)
        if cached is not None and _version(cached) > _version(raw):
            return
        self._deleted[resource][key] = max(self._deleted[resource].get(key, -1), _version(raw))
        if self._objects[resource].pop(key, None) is not None:
            self.changed.set()

    def replace(self, resource: Resource, objects: Iterable[ApiObject], version: int) -> None:
        """Store a list of all objects of a resource as of `version`, and remove what it does not contain."""
        listed = set()
        for raw in objects:
            listed.add(object_key(raw))
            self.put(resource, raw)
        for key, cached in list(self._objects[resource].items()):
            if key not in listed and _version(cached) <= version:
                del self._objects[resource][key]
                self.changed.set()
        deleted = self._deleted[resource].items()
        self._deleted[resource] = {key: in_version for key, in_version in deleted if in_version > version}


def _is_heartbeat(before: ApiObject, node: ApiObject) -> bool:
    """Whether a node has changed in nothing that concerns its pods."""
    return _without_heartbeat(before) == _without_heartbeat(node)


def _without_heartbeat(node: ApiObject) -> list[object]:
    metadata, status = node["metadata"], node.get("status") or {}
    conditions = {raw["type"]: raw["status"] for raw in status.get("conditions") or ()}
    return [metadata.get("labels"), node.get("spec"), status.get("allocatable"), conditions]


def _version(raw: ApiObject) -> int:
    return int(raw["metadata"]["resourceVersion"])
