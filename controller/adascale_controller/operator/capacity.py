"""What nodes have left for our jobs, and which nodes a pod may go to, by the rules of the scheduler.

Pods that are not ours take what they request; what a node has beyond that is for the decision to share out.
Not looked at: affinity between pods, topology spread, host ports, volumes that are bound to a node, devices
claimed by ResourceClaims, defaults of a LimitRange, requests resized in place. Where one of these keeps a
replica from a node that seems to have room, the pod itself tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from math import ceil
from typing import Any, Final

from kubernetes.utils import parse_quantity

from adascale_core import names
from adascale_core.packing import PODS, Node

Raw = Mapping[str, Any]
"""An object of the Kubernetes API, or a part of one, as its JSON."""

_CPU: Final = "cpu"
_CORDON: Final = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
"""A cordoned node has this taint too, but a moment later."""
_KEEPING_OUT: Final = ("NoSchedule", "NoExecute")
"""The effects of taints that keep new pods away; the third is a wish only."""


def amount(resource: str, quantity: object) -> int:
    """A quantity in whole units: cpu in thousandths, memory in bytes, the rest as counts; rounded up.

    What is no quantity is 0: the API server refuses it in its own words.
    """
    return _amount(1000 if resource == _CPU else 1, str(quantity))


@lru_cache(maxsize=4096)
def _amount(parts: int, quantity: str) -> int:
    try:
        value: Decimal = parse_quantity(quantity)
    except ValueError:
        return 0
    return ceil(value * parts) if value.is_finite() else 0


# -- what pods take ----------------------------------------------------------------------------------------


def pod_request(spec: Raw) -> dict[str, int]:
    """What a pod of this specification takes of its node, by resource, in the units of `amount`.

    The sum of its containers, or what the most demanding init container takes beside the sidecars that run
    by then, if that is more; plus its overhead; and one of "pods".
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


def _request(container: Raw) -> dict[str, int]:
    resources = _object(container.get("resources"))
    # Where only a limit is given, the API server takes it for the request too.
    return _amounts(resources, "limits") | _amounts(resources, "requests")


def _amounts(parent: Raw, key: str) -> dict[str, int]:
    return {name: amount(name, quantity) for name, quantity in _object(parent.get(key)).items()}


# -- what nodes have ---------------------------------------------------------------------------------------


def lost_nodes(nodes: Iterable[Raw]) -> frozenset[str]:
    """The nodes that are not ready, or not heard of any more."""
    return frozenset(_name(node) for node in nodes if not _is_ready(node))


def free_nodes(nodes: Iterable[Raw], pods: Iterable[Raw], jobs: Collection[str] | None = None) -> list[Node]:
    """The nodes that are ready, each with what it has for our jobs.

    Args:
        nodes: all nodes.
        pods: all pods of the cluster.
        jobs: ids of the jobs that the room is for, whose pods take nothing; none: of all AdaScaleJobs.
    """
    taken: dict[str, Counter[str]] = {}
    for pod in pods:
        node = _object(pod.get("spec")).get("nodeName")
        if node and not _is_over(pod) and not _is_ours(pod, jobs):
            taken.setdefault(node, Counter()).update(pod_request(pod["spec"]))
    free = []
    for node in nodes:
        if _is_ready(node):
            name = _name(node)
            used = taken.get(name, Counter())
            has = _amounts(_object(node.get("status")), "allocatable")
            free.append(Node(name, {resource: units - used[resource] for resource, units in has.items()}))
    return free


def _is_over(pod: Raw) -> bool:
    return _object(pod.get("status")).get("phase") in ("Succeeded", "Failed")


def _is_ours(pod: Raw, jobs: Collection[str] | None) -> bool:
    meta = pod["metadata"]
    job = _object(meta.get("labels")).get(names.LABEL_JOB)
    return job is not None and (jobs is None or f"{meta['namespace']}.{job}" in jobs)


def _is_ready(node: Raw) -> bool:
    conditions = _objects(_object(node.get("status")).get("conditions"))
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _name(node: Raw) -> str:
    return str(node["metadata"]["name"])


# -- which nodes a pod may go to ---------------------------------------------------------------------------


def eligible_nodes(spec: Raw, nodes: Iterable[Raw]) -> frozenset[str]:
    """The nodes that would take a new pod of this specification, if they had room.

    Args:
        spec: of the pod, as in a template.
        nodes: all nodes.
    """
    return frozenset(_name(node) for node in nodes if _takes(node, spec))


def _takes(node: Raw, spec: Raw) -> bool:
    return (
        _is_ready(node)
        and spec.get("nodeName") in (None, "", _name(node))
        and _is_selected(node, spec)
        and all(_is_tolerated(taint, spec) for taint in _taints(node))
    )


def _taints(node: Raw) -> list[Raw]:
    spec = _object(node.get("spec"))
    taints = [one for one in _objects(spec.get("taints")) if one.get("effect") in _KEEPING_OUT]
    return [*taints, _CORDON] if spec.get("unschedulable") else taints


def _is_tolerated(taint: Raw, spec: Raw) -> bool:
    return any(_tolerates(one, taint) for one in _objects(spec.get("tolerations")))


def _tolerates(toleration: Raw, taint: Raw) -> bool:
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
    return False


def _is_selected(node: Raw, spec: Raw) -> bool:
    labels = _object(_object(node.get("metadata")).get("labels"))
    if any(labels.get(key) != value for key, value in _object(spec.get("nodeSelector")).items()):
        return False
    affinity = _object(_object(spec.get("affinity")).get("nodeAffinity"))
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    terms = _objects(_object(required).get("nodeSelectorTerms"))
    return any(_matches(term, labels, {"metadata.name": _name(node)}) for term in terms)


def _matches(term: Raw, labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    """Whether a node meets all requirements of a term; one without any is met by no node."""
    met = [
        *(_meets(one, labels) for one in _objects(term.get("matchExpressions"))),
        *(_meets(one, fields) for one in _objects(term.get("matchFields"))),
    ]
    return bool(met) and all(met)


def _meets(requirement: Raw, values: Mapping[str, str]) -> bool:
    key, texts = requirement.get("key"), requirement.get("values")
    has = values.get(key) if isinstance(key, str) else None
    asked: Sequence[str] = texts if isinstance(texts, list) else []
    match requirement.get("operator"):
        case "In":
            return has in asked
        case "NotIn":
            return has not in asked
        case "Exists":
            return has is not None
        case "DoesNotExist":
            return has is None
        case "Gt" | "Lt" as operator:
            numbers = _integers([has, *asked])
            return numbers is not None and (numbers[0] - numbers[1]) * (1 if operator == "Gt" else -1) > 0
    return False


def _integers(texts: Sequence[str | None]) -> list[int] | None:
    """Two texts as integers; none unless they are two, and both integers."""
    if len(texts) != 2:
        return None
    try:
        return [int(text or "") for text in texts]
    except (ValueError, TypeError):
        return None


# -- parts of an object that may be absent, or, in what users write, anything ------------------------------


def _object(value: object) -> Raw:
    return value if isinstance(value, Mapping) else {}


def _objects(value: object) -> list[Raw]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list | tuple) else []
