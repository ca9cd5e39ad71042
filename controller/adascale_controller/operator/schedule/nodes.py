"""The free resources of nodes, and which nodes accept a pod, by the rules of the Kubernetes scheduler.

Pods that do not belong to AdaScaleJobs take what they request; the decision shares out the rest. Not
considered: affinity between pods, topology spread, host ports, volumes bound to a node, ResourceClaims,
requests resized in place. Where one of these keeps a replica from a node that seems
to have room, the pod's own status shows it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from math import ceil
from types import MappingProxyType
from typing import Final

from kubernetes.utils import parse_quantity

from adascale_controller.formatting import plural
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, is_ready
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_core.decision.decide import TypedDemands
from adascale_core.names import NO_ACCELERATOR_LABEL
from adascale_core.placement.packing import PODS, Demand, Node

_CPU: Final = "cpu"
_CORDON: Final = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
"""The taint of a cordoned node, which the node controller adds a moment after the cordon."""
_MAX_OBSTACLES: Final = 4
"""Reasons why nodes can't run a pod that a message has at most."""
_EXCLUDING_EFFECTS: Final = ("NoSchedule", "NoExecute")
"""The effects of taints that keep new pods away. PreferNoSchedule does not."""


def amount(resource: str, quantity: object) -> int:
    """Return a quantity in whole units, rounded up: cpu in thousandths, memory in bytes, the rest as counts.

    An invalid quantity is 0: the API server rejects it with a message of its own.
    """
    return _amount(1000 if resource == _CPU else 1, str(quantity))


@lru_cache(maxsize=4096)
def _amount(parts: int, quantity: str) -> int:
    try:
        value: Decimal = parse_quantity(quantity)
    except ValueError:
        return 0
    return ceil(value * parts) if value.is_finite() else 0


# -- requests of pods ----------------------------------------------------------------------------------------


def pod_request(spec: ApiObject) -> dict[str, int]:
    """Return the resources that a pod requests, in the units of `amount`.

    The sum of its containers, or the largest request of an init container together with the sidecars started
    before it, if that is more; plus the pod's overhead; and 1 of "pods".
    """
    running = Counter[str]()
    for container in _objects(spec.get("containers")):
        running.update(_request(container))
    sidecars = Counter[str]()
    peak = Counter[str]()
    for container in _objects(spec.get("initContainers")):
        request = _request(container)
        if container.get("restartPolicy") == "Always":
            running.update(request)
            sidecars.update(request)
        else:
            peak |= sidecars + Counter(request)
    total = running | peak
    of_pod = _object(spec.get("resources"))
    limits = {name: units for name, units in _amounts(of_pod, "limits").items() if name not in total}
    total = Counter({**total, **limits, **_amounts(of_pod, "requests")})
    total.update(_amounts(spec, "overhead"))
    return {**{name: units for name, units in total.items() if units > 0}, PODS: 1}


def _request(container: ApiObject) -> dict[str, int]:
    resources = _object(container.get("resources"))
    # The API server copies a limit to a request that is not set.
    return _amounts(resources, "limits") | _amounts(resources, "requests")


def _amounts(parent: ApiObject, key: str) -> dict[str, int]:
    return {name: amount(name, quantity) for name, quantity in _object(parent.get(key)).items()}


# -- free resources ----------------------------------------------------------------------------------------


def free_nodes(nodes: Iterable[ApiObject], pods: Iterable[Pod]) -> list[Node]:
    """Return the ready nodes, each with the resources that these pods leave."""
    taken: dict[str, Counter[str]] = {}
    for pod in pods:
        if pod.node and not pod.has_ended:
            taken.setdefault(pod.node, Counter()).update(pod_request(pod.requests))
    free = []
    for node in nodes:
        if is_ready(node):
            name = _name(node)
            used = taken.get(name, Counter())
            units = {resource: units - used[resource] for resource, units in allocatable(node).items()}
            free.append(Node(name, units))
    return free


def allocatable(node: ApiObject) -> dict[str, int]:
    """Return the resources of a node that pods may take, in the units of `amount`."""
    return _amounts(_object(node.get("status")), "allocatable")


def _name(node: ApiObject) -> str:
    return str(node["metadata"]["name"])


# -- which nodes accept a pod --------------------------------------------------------------------------------


def eligible_nodes(spec: ApiObject, nodes: Iterable[ApiObject]) -> frozenset[str]:
    """Return the names of the nodes that accept a new pod if they have the resources."""
    return frozenset(_name(node) for node in nodes if _obstacle(node, spec) is None)


def _obstacle(
    node: ApiObject, spec: ApiObject, request: Mapping[str, int] = MappingProxyType({})
) -> str | None:
    """Return why a node can't run a pod that requests this, even if it is empty. None if it can."""
    if not is_ready(node):
        return "not ready"
    if spec.get("nodeName") not in (None, "", _name(node)) or not _is_selected(node, spec):
        return "not selected by nodeName, nodeSelector or node affinity"
    for taint in _taints(node):
        if not _is_tolerated(taint, spec):
            return _describe_taint(taint)
    small = _lacking(node, request)
    return f"too small, even when empty ({', '.join(small)})" if small else None


def _lacking(node: ApiObject, request: Mapping[str, int]) -> list[str]:
    """Return of which resources a node has too few for a pod, even if it is empty."""
    units = allocatable(node)
    return sorted(name for name, wanted in request.items() if units.get(name, 0) < wanted)


def _describe_taint(taint: ApiObject) -> str:
    if taint is _CORDON:
        return "cordoned"
    value = f"={taint['value']}" if taint.get("value") else ""
    text = f"{taint.get('key')}{value}:{taint['effect']}"
    return f"taint {text}, and the pods have no toleration of it (spec.template.spec.tolerations)"


def _taints(node: ApiObject) -> list[ApiObject]:
    spec = _object(node.get("spec"))
    taints = [taint for taint in _objects(spec.get("taints")) if taint.get("effect") in _EXCLUDING_EFFECTS]
    return [*taints, _CORDON] if spec.get("unschedulable") else taints


def _is_tolerated(taint: ApiObject, spec: ApiObject) -> bool:
    return any(_tolerates(toleration, taint) for toleration in _objects(spec.get("tolerations")))


def _tolerates(toleration: ApiObject, taint: ApiObject) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    match toleration.get("operator") or "Equal":
        case "Exists":
            return True
        case "Equal":
            return bool(toleration.get("key")) and (toleration.get("value") or "") == (
                taint.get("value") or ""
            )
        case "Gt" | "Lt" as operator:
            return _is_beyond(operator, taint.get("value"), [toleration.get("value")])
    return False


def _is_selected(node: ApiObject, spec: ApiObject) -> bool:
    labels = _object(_object(node.get("metadata")).get("labels"))
    if any(labels.get(key) != value for key, value in _object(spec.get("nodeSelector")).items()):
        return False
    affinity = _object(_object(spec.get("affinity")).get("nodeAffinity"))
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    terms = _objects(_object(required).get("nodeSelectorTerms"))
    return any(_matches(term, labels, {"metadata.name": _name(node)}) for term in terms)


def _matches(term: ApiObject, labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    """Whether a node meets all requirements of a term. An empty term matches no node."""
    met = [
        *(_meets(requirement, labels) for requirement in _objects(term.get("matchExpressions"))),
        *(_meets(requirement, fields) for requirement in _objects(term.get("matchFields"))),
    ]
    return bool(met) and all(met)


def _meets(requirement: ApiObject, attributes: Mapping[str, str]) -> bool:
    key, values = requirement.get("key"), requirement.get("values")
    actual = attributes.get(key) if isinstance(key, str) else None
    accepted: Sequence[str] = values if isinstance(values, list) else []
    match requirement.get("operator"):
        case "In":
            return actual in accepted
        case "NotIn":
            return actual not in accepted
        case "Exists":
            return actual is not None
        case "DoesNotExist":
            return actual is None
        case "Gt" | "Lt" as operator:
            return _is_beyond(operator, actual, accepted)
    return False


def _is_beyond(operator: str, actual: str | None, bounds: Sequence[str | None]) -> bool:
    """Whether an integer is greater (`Gt`) or less (`Lt`) than the only bound."""
    try:
        number, bound = (int(text or "") for text in (actual, *bounds))
    except (ValueError, TypeError):
        return False
    return number > bound if operator == "Gt" else number < bound


# -- parts of an object that may be absent or, where users write them, of any type --------------------------


def _object(value: object) -> ApiObject:
    return value if isinstance(value, Mapping) else {}


def _objects(value: object) -> list[ApiObject]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


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
        """Use these nodes, all of the cluster. Returns whether others may be eligible than before."""
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
        if key not in self._eligible:
            self._eligible[key] = eligible_nodes(spec, self._nodes)
        return self._eligible[key]

    def obstacles(self, spec: ApiObject, request: Mapping[str, int]) -> str:
        """Return why nodes can't run a pod, even if they are empty; an empty text if all nodes can."""
        key = f"{_key(spec)} {sorted(request.items())}"
        if key not in self._obstacles:
            found = Counter(filter(None, (_obstacle(node, spec, request) for node in self._nodes)))
            most = sorted(found.items(), key=lambda each: (-each[1], each[0]))
            parts = [f"{plural(count, 'node')}: {reason}" for reason, count in most[:_MAX_OBSTACLES]]
            if rest := sum(count for _, count in most[_MAX_OBSTACLES:]):
                parts.append(f"{plural(rest, 'node')}: other reasons")
            self._obstacles[key] = "; ".join(parts)
        return self._obstacles[key]


def _key(spec: ApiObject) -> str:
    """Return a key that is equal for PodSpecs with the same eligible nodes."""
    selecting = [spec.get(field) for field in ("nodeName", "nodeSelector", "tolerations", "affinity")]
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
            return TypedDemands(demand)
        found = {name: self._on(demand, name, names) for name, names in others.items()}
        required = {*others} if len(others) > 1 else set()
        if present is not None:
            # Pods that don't require the type may stay where they are, but new ones have to.
            elsewhere = any(self._types.get(node, present) != present for node in demand.placed.values())
            if pinned or (len(others) > 1 and (elsewhere or not job.live_pods)):
                required.add(present)
            else:
                required.discard(present)
            found[present] = self._on(demand, present, nodes.get(present, frozenset()))
        return TypedDemands(demand, found, frozenset(required), present)

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
