"""Which nodes accept the pods of a template, computed once for equal templates and unchanged nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from adascale_controller.operator.observe.observer import is_ready
from adascale_controller.operator.schedule.nodes import describe_obstacles, eligible_nodes, is_kept_from_nodes
from adascale_controller.operator.types.kubernetes import ApiObject

_SELECTING_FIELDS = ("nodeName", "nodeSelector", "tolerations")
"""Fields of a PodSpec on which `eligible_nodes` depends, besides its node affinity."""


class NodeSelection:
    """Remembers the eligible nodes of each kind of template, until a node changes in what selects it.

    What a node can hold counts too: it decides on which types of accelerators a job may run.
    """

    def __init__(self) -> None:
        self._nodes: Sequence[ApiObject] = ()
        self._attributes: dict[str, tuple[str, str]] = {}
        """Name of a node -> its resource version, and what selects it."""
        self._present: tuple[str, ...] = ()
        self._eligible: dict[str, frozenset[str]] = {}
        self._obstacles: dict[str, str] = {}

    def update(self, nodes: Sequence[ApiObject]) -> bool:
        """Use these nodes from now on, which are all nodes of the cluster."""
        known, self._attributes = self._attributes, {}
        for node in nodes:
            name, version = str(node["metadata"]["name"]), str(node["metadata"]["resourceVersion"])
            before = known.get(name)
            attributes = before[1] if before is not None and before[0] == version else _attributes(node)
            self._attributes[name] = (version, attributes)
        present = tuple(attributes for _, attributes in self._attributes.values())
        is_changed = present != self._present
        if is_changed:
            self._eligible.clear()
            self._obstacles.clear()
        self._nodes, self._present = nodes, present
        return is_changed

    def eligible(self, spec: ApiObject) -> frozenset[str]:
        """As `eligible_nodes`."""
        key = _key(spec)
        found = self._eligible.get(key)
        if found is None:
            found = self._eligible[key] = eligible_nodes(spec, self._nodes)
        return found

    def obstacles(self, spec: ApiObject, request: Mapping[str, int]) -> str:
        """As `describe_obstacles`."""
        key = f"{_key(spec)} {sorted(request.items())}"
        found = self._obstacles.get(key)
        if found is None:
            found = self._obstacles[key] = describe_obstacles(spec, request, self._nodes)
        return found

    def is_kept_from_nodes(self, spec: ApiObject, request: Mapping[str, int]) -> bool:
        """As the function `is_kept_from_nodes`."""
        return is_kept_from_nodes(spec, request, self._nodes)


def _key(spec: ApiObject) -> str:
    """Return a key that is equal for PodSpecs with the same eligible nodes."""
    selecting = [spec.get(field) for field in (*_SELECTING_FIELDS, "affinity")]
    return json.dumps(selecting, sort_keys=True, default=str)


def _attributes(node: ApiObject) -> str:
    spec = node.get("spec") or {}
    selecting = [
        node["metadata"]["name"],
        node["metadata"].get("labels"),
        spec.get("taints"),
        spec.get("unschedulable"),
        is_ready(node),
        (node.get("status") or {}).get("allocatable"),
    ]
    return json.dumps(selecting, sort_keys=True, default=str)
