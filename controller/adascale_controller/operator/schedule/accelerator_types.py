"""The types of accelerators in a cluster, by a label of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.schedule.nodes import allocatable
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_core.decision.type_choice import Accelerator
from adascale_core.names import NO_ACCELERATOR_LABEL
from adascale_core.placement.packing import Demand


@dataclass(frozen=True)
class TypedDemand:
    """What a job requests of the nodes of one type."""

    accelerator: Accelerator  # the type, and whether its pods have to be kept from others
    demand: Demand


@dataclass(frozen=True)
class TypedDemands:
    """The types that a job may run on."""

    # type -> what it requests there. Empty if it is not tied to a type.
    by_type: Mapping[str, TypedDemand] = field(default_factory=lambda: MappingProxyType({}))
    present: str | None = None  # the type of its replicas. None if it has none, or is not tied to a type.


class AcceleratorTypes:
    """The types of the accelerators of nodes.

    A job has a type if its replicas request a device, or all nodes that they may use have the label. Its pods
    require the type if there was another to choose from when they were created.
    """

    def __init__(self, label: str, nodes: Sequence[ApiObject] = ()) -> None:
        self._types: dict[str, str] = {}
        self._allocatable: dict[str, Mapping[str, int]] = {}
        if label:
            for node in nodes:
                name = str(node["metadata"]["name"])
                self._types[name] = (node["metadata"].get("labels") or {}).get(label) or NO_ACCELERATOR_LABEL
                self._allocatable[name] = allocatable(node)
        self._found: dict[object, Mapping[str, frozenset[str]]] = {}

    def demands(self, job: ObservedJob, demand: Demand) -> TypedDemands:
        """Return what a job requests of the nodes of each type that it may run on."""
        nodes = self._nodes_by_type(demand)
        others = {} if NO_ACCELERATOR_LABEL in nodes and not _requests_device(demand.request) else nodes
        present, pinned = self._present(job, demand)
        if not others and not pinned:
            return TypedDemands()
        found = {
            name: TypedDemand(Accelerator(name, required=len(others) > 1), self._on(demand, name, names))
            for name, names in others.items()
        }
        if present is not None:
            # Pods that don't require the type may stay where they are, but new ones have to.
            elsewhere = any(self._types.get(node, present) != present for node in demand.placed.values())
            required = pinned or (len(others) > 1 and (elsewhere or not job.live_pods))
            on_present = self._on(demand, present, nodes.get(present, frozenset()))
            found[present] = TypedDemand(Accelerator(present, required), on_present)
        return TypedDemands(found, present)

    def _nodes_by_type(self, demand: Demand) -> Mapping[str, frozenset[str]]:
        """Return type -> the nodes that a job may use and that hold a replica when they are empty."""
        key = demand.nodes, tuple(sorted(demand.request.items()))
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._sort(demand)
        return found

    def _sort(self, demand: Demand) -> Mapping[str, frozenset[str]]:
        found: dict[str, set[str]] = {}
        for node in demand.nodes if demand.nodes is not None else self._types:
            units = self._allocatable.get(node, {})
            if node in self._types and all(
                units.get(name, 0) >= wanted for name, wanted in demand.request.items()
            ):
                found.setdefault(self._types[node], set()).add(node)
        return {name: frozenset(nodes) for name, nodes in sorted(found.items())}

    def _present(self, job: ObservedJob, demand: Demand) -> tuple[str | None, bool]:
        """Return the type of a job's replicas, and whether its pods require it."""
        current, required_type = job.current_allocation, job.accelerator
        if current is None or not current.replicas or not self._types:
            return None, False
        if required_type is not None:
            return required_type, True
        recorded = job.resource.status.get("accelerator")
        if recorded is not None:
            return str(recorded), False
        placed = Counter(self._types[node] for node in demand.placed.values() if node in self._types)
        return (min(placed, key=lambda name: (-placed[name], name)) if placed else None), False

    def _on(self, demand: Demand, name: str, nodes: frozenset[str]) -> Demand:
        """Return a demand for the nodes of one type."""
        placed = {rank: node for rank, node in demand.placed.items() if self._types.get(node, name) == name}
        return replace(demand, nodes=nodes, placed=placed)


def _requests_device(request: Mapping[str, int]) -> bool:
    """Whether a request is for extended resources, which is how devices are offered."""
    return any("/" in name and not name.startswith("kubernetes.io/") for name in request)
