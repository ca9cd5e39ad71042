"""The objects of the cluster as they were last seen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from adascale_core import names


class Kind(StrEnum):
    """The kinds that are watched, by their plural."""

    ADASCALEJOBS = names.PLURAL
    JOBS = "jobs"
    PODS = "pods"
    NODES = "nodes"


_Name = tuple[str, str]
"""Namespace (empty for what has none) and name."""


class Store:
    """The newest version of each object.

    News comes from watches, from lists, and from answers to what was written; some of it late. So an object
    is only ever replaced by a newer version. (The API server numbers versions of one kind in order; see
    KEP-5504.) Used from the event loop alone.
    """

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[_Name, Mapping[str, Any]]] = {kind: {} for kind in Kind}
        self._gone: dict[Kind, dict[_Name, int]] = {kind: {} for kind in Kind}
        """Versions in which objects were deleted: a late answer must not bring them back."""
        self.changed = asyncio.Event()
        """Set with each change; whoever takes notice clears it."""

    def all(self, kind: Kind) -> list[Mapping[str, Any]]:
        """All objects of a kind, by namespace and name."""
        objects = self._objects[kind]
        return [objects[name] for name in sorted(objects)]

    def put(self, kind: Kind, raw: Mapping[str, Any]) -> None:
        """Take in an object."""
        name = _name(raw)
        known = self._objects[kind].get(name)
        newest = self._gone[kind].get(name, -1) if known is None else _version(known)
        if newest >= _version(raw):
            return
        self._objects[kind][name] = raw
        self.changed.set()

    def remove(self, kind: Kind, raw: Mapping[str, Any]) -> None:
        """Take in that an object was deleted, of which `raw` is the last version."""
        name = _name(raw)
        known = self._objects[kind].get(name)
        if known is not None and _version(known) > _version(raw):
            return
        self._gone[kind][name] = max(self._gone[kind].get(name, -1), _version(raw))
        if self._objects[kind].pop(name, None) is not None:
            self.changed.set()

    def replace(self, kind: Kind, listed: Iterable[Mapping[str, Any]], version: int) -> None:
        """Take in a list of all objects of a kind, as of `version`: what isn't in it, is no more."""
        present = set()
        for raw in listed:
            present.add(_name(raw))
            self.put(kind, raw)
        for name, known in list(self._objects[kind].items()):
            if name not in present and _version(known) <= version:
                del self._objects[kind][name]
                self.changed.set()
        gone = self._gone[kind].items()
        self._gone[kind] = {name: deleted for name, deleted in gone if deleted > version}


def _name(raw: Mapping[str, Any]) -> _Name:
    meta = raw["metadata"]
    return meta.get("namespace", ""), meta["name"]


def _version(raw: Mapping[str, Any]) -> int:
    return int(raw["metadata"]["resourceVersion"])
