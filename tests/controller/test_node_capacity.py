"""What nodes have left, and which of them a pod may go to."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_controller.operator.observe.pods import Pod, lost_nodes, read_pod
from adascale_controller.operator.schedule.nodes import amount, eligible_nodes, free_nodes, pod_request
from adascale_core import names
from adascale_core.placement.packing import Node

GI = 2**30

# -- builders ----------------------------------------------------------------------------------------------


def node(
    name: str = "node1",
    ready: str | None = "True",
    labels: dict[str, str] | None = None,
    taints: list[dict[str, str]] | None = None,
    cordoned: bool = False,
    has: dict[str, str] | None = None,
) -> dict[str, Any]:
    spec = ({"taints": taints} if taints else {}) | ({"unschedulable": True} if cordoned else {})
    conditions = [{"type": "MemoryPressure", "status": "False"}]
    if ready is not None:
        conditions.append({"type": "Ready", "status": ready})
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name} | (labels or {})},
        "spec": spec,
        "status": {
            "conditions": conditions,
            "capacity": {"cpu": "64"},
            "allocatable": has or {"cpu": "4", "memory": "8Gi", "pods": "110"},
        },
    }


def container(limits: dict[str, str] | None = None, /, **requests: str) -> dict[str, Any]:
    resources = {"requests": requests} | ({"limits": limits} if limits else {})
    return {"name": "c", "resources": resources}


def sidecar(**requests: str) -> dict[str, Any]:
    return container(**requests) | {"restartPolicy": "Always"}


def pod(
    on: str | None = "node1",
    phase: str = "Running",
    job: str | None = None,
    /,
    **requests: str,
) -> Pod:
    raw = {
        "metadata": {
            "name": "p",
            "namespace": "team",
            "uid": "p",
            "labels": {"app": "x"} | ({names.LABEL_JOB: job} if job else {}),
        },
        "spec": {"containers": [container(**requests)]} | ({"nodeName": on} if on else {}),
        "status": {"phase": phase},
    }
    return read_pod(raw)


def eligible(spec: dict[str, Any], *nodes: dict[str, Any]) -> set[str]:
    return set(eligible_nodes(spec, nodes))


# -- quantities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "quantity", "units"),
    [
        ("cpu", "500m", 500),
        ("cpu", "1.5", 1500),
        ("cpu", "2", 2000),
        ("cpu", 2, 2000),
        ("cpu", 0.1, 100),
        ("cpu", "2e3", 2_000_000),
        ("cpu", "100u", 1),
        ("memory", "1Gi", GI),
        ("memory", "1G", 10**9),
        ("memory", "1.5Ki", 1536),
        ("memory", "1500m", 2),
        ("memory", "128974848", 128974848),
        ("memory", "129e6", 129_000_000),
        ("memory", "1E", 10**18),
        ("nvidia.com/gpu", "8", 8),
        ("hugepages-2Mi", "4Mi", 4 * 2**20),
        ("pods", "110", 110),
        ("cpu", "a lot", 0),
        ("cpu", "NaN", 0),
        ("cpu", "Infinity", 0),
        ("cpu", "", 0),
        ("cpu", None, 0),
        ("cpu", ["1"], 0),
    ],
)
def test_quantities(resource: str, quantity: object, units: int) -> None:
    assert amount(resource, quantity) == units


SUFFIXES = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1)} | {
    suffix: Fraction(base**power)
    for base, suffixes in ((1000, ("k", "M", "G", "T")), (1024, ("Ki", "Mi", "Gi", "Ti")))
    for power, suffix in enumerate(suffixes, 1)
}


@given(
    st.integers(0, 10**6),
    st.integers(0, 3),
    st.sampled_from(sorted(SUFFIXES)),
    st.sampled_from(["cpu", "memory"]),
)
def test_quantities_are_exact_and_rounded_up(digits: int, decimals: int, suffix: str, resource: str) -> None:
    text = f"{digits // 10**decimals}.{digits % 10**decimals:0{decimals}d}" if decimals else str(digits)
    exact = Fraction(digits, 10**decimals) * SUFFIXES[suffix] * (1000 if resource == "cpu" else 1)
    assert amount(resource, text + suffix) == -(-exact.numerator // exact.denominator)


# -- what pods take ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "request_"),
    [
        ({"containers": [container()]}, {}),
        ({"containers": [{"name": "c"}]}, {}),
        ({"containers": [container(cpu="1", memory="1Gi"), container(cpu="250m")]},
         {"cpu": 1250, "memory": GI}),
        # what has only a limit, requests it
        ({"containers": [container({"nvidia.com/gpu": "1", "cpu": "2"}, cpu="1")]},
         {"nvidia.com/gpu": 1, "cpu": 1000}),
        # init containers run one after the other, before the others
        ({"containers": [container(cpu="1")], "initContainers": [container(cpu="3"), container(cpu="2")]},
         {"cpu": 3000}),
        ({"containers": [container(cpu="4")], "initContainers": [container(cpu="3")]}, {"cpu": 4000}),
        # sidecars run beside all that start after them
        ({"containers": [container(cpu="1")], "initContainers": [sidecar(cpu="1")]}, {"cpu": 2000}),
        ({"containers": [container(cpu="1")],
          "initContainers": [sidecar(cpu="1"), container(cpu="3"), sidecar(cpu="1")]}, {"cpu": 4000}),
        ({"containers": [container(cpu="1")], "initContainers": [container(cpu="2"), sidecar(cpu="2")]},
         {"cpu": 3000}),
        ({"containers": [container(cpu="1")], "overhead": {"cpu": "100m", "memory": "1Ki"}},
         {"cpu": 1100, "memory": 1024}),
        # resources of the pod as a whole
        ({"containers": [container(cpu="1")], "resources": {"requests": {"cpu": "3"}}}, {"cpu": 3000}),
        ({"containers": [container()], "resources": {"limits": {"cpu": "3"}}}, {"cpu": 3000}),
        ({"containers": [container(cpu="1")], "resources": {"limits": {"cpu": "3"}}}, {"cpu": 1000}),
        # what the API server would refuse
        ({"containers": [{"resources": "x"}, "y", {"resources": {"requests": ["cpu"]}}]}, {}),
        ({}, {}),
    ],
)  # fmt: skip
def test_the_request_of_a_pod(spec: dict[str, Any], request_: dict[str, int]) -> None:
    assert pod_request(spec) == request_ | {"pods": 1}


milli = st.integers(0, 4000)


@given(
    st.lists(milli, max_size=3),
    st.lists(st.tuples(milli, st.booleans()), max_size=4),
)
def test_a_pod_requests_the_maximum_of_what_runs_at_the_same_time(
    mains: list[int], inits: list[tuple[int, bool]]
) -> None:
    moments, running = [0], 0
    for cpu, stays in inits:
        moments.append(running + cpu)
        running += cpu if stays else 0
    moments.append(running + sum(mains))
    made = {
        "containers": [container(cpu=f"{cpu}m") for cpu in mains],
        "initContainers": [(sidecar if stays else container)(cpu=f"{cpu}m") for cpu, stays in inits],
    }
    assert pod_request(made).get("cpu", 0) == max(moments)


# -- what nodes have ---------------------------------------------------------------------------------------


def test_free_resources_are_allocatable_minus_the_requests_of_others() -> None:
    pods = [
        pod(cpu="500m", memory="1Gi"),
        pod(),
        pod("node2", cpu="1"),
        pod("node1", "Running", "digits", cpu="0.5"),
        pod("node1", "Succeeded", cpu="1"),
        pod("node1", "Failed", cpu="1"),
        pod(None, "Pending", cpu="1"),
        pod("node1", "Pending", cpu="250m"),
    ]
    assert free_nodes([node(), node("node2", has={"cpu": "8", "nvidia.com/gpu": "2"})], pods) == [
        Node("node1", {"cpu": 2750, "memory": 7 * GI, "pods": 106}),
        Node("node2", {"cpu": 7000, "nvidia.com/gpu": 2}),
    ]


def test_free_resources_may_be_negative() -> None:
    assert free_nodes([node(has={"cpu": "1"})], [pod(cpu="2")]) == [Node("node1", {"cpu": -1000})]


@pytest.mark.parametrize("ready", ["False", "Unknown", None])
def test_a_node_that_is_not_ready_has_no_free_resources(ready: str | None) -> None:
    nodes = [node(), node("node2", ready=ready)]
    assert [item.name for item in free_nodes(nodes, [])] == ["node1"]
    assert lost_nodes(nodes) == {"node2"}
    assert eligible({}, *nodes) == {"node1"}


def test_a_cordoned_node_keeps_its_replicas() -> None:
    assert [item.name for item in free_nodes([node(cordoned=True)], [])] == ["node1"]


pods = st.lists(
    st.builds(
        lambda on, phase, job, cpu: pod(on, phase, job, cpu=f"{cpu}m"),
        st.sampled_from([None, "node1", "node2", "missing"]),
        st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        st.sampled_from([None, "a", "b"]),
        milli,
    ),
    max_size=8,
)


@given(pods, st.randoms(use_true_random=False))
def test_free_and_requested_resources_add_up_to_allocatable(made: list[Pod], random: Any) -> None:
    nodes = [node(name, has={"cpu": "64", "pods": "10"}) for name in ("node1", "node2")]
    free = {item.name: item.free for item in free_nodes(nodes, made)}
    for name in ("node1", "node2"):
        there = [item for item in made if item.node == name and item.phase not in ("Succeeded", "Failed")]
        assert free[name]["cpu"] == 64000 - sum(pod_request(item.requests).get("cpu", 0) for item in there)
        assert free[name]["pods"] == 10 - len(there)
    shuffled = list(made)
    random.shuffle(shuffled)
    assert {item.name: item.free for item in free_nodes(reversed(nodes), shuffled)} == free


# -- which nodes a pod may go to ---------------------------------------------------------------------------

GPU = {"key": "gpu", "value": "a100", "effect": "NoSchedule"}
MEMORY = {"key": "memory", "value": "80", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("tolerations", "taint", "tolerated"),
    [
        ([], None, True),
        ([], GPU, False),
        ([], GPU | {"effect": "NoExecute"}, False),
        ([], GPU | {"effect": "PreferNoSchedule"}, True),
        ([{"key": "gpu", "operator": "Exists"}], GPU, True),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}], GPU, True),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], GPU, False),
        ([{"key": "gpu", "value": "a100"}], GPU, True),
        ([{"key": "gpu", "operator": "Equal", "value": "h100"}], GPU, False),
        ([{"key": "gpu"}], GPU, False),
        ([{"key": "gpu"}], {"key": "gpu", "effect": "NoSchedule"}, True),
        ([{"key": "other", "operator": "Exists"}], GPU, False),
        ([{"operator": "Exists"}], GPU, True),
        ([{"operator": "Equal"}], GPU, False),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}],
         GPU | {"effect": "NoExecute"}, True),
        ([{"key": "gpu", "operator": "Gt", "value": "1"}], GPU, False),
        ([{"key": "memory", "operator": "Gt", "value": "40"}], MEMORY, True),
        ([{"key": "memory", "operator": "Gt", "value": "80"}], MEMORY, False),
        ([{"key": "memory", "operator": "Lt", "value": "100"}], MEMORY, True),
        ([{"key": "memory", "operator": "Lt", "value": "80"}], MEMORY, False),
        ([{"key": "memory", "operator": "Gt", "value": "forty"}], MEMORY, False),
        ([{"key": "memory", "operator": "Gt"}], MEMORY, False),
        ([{"key": "memory", "operator": "Gt", "value": "40", "effect": "NoExecute"}], MEMORY, False),
    ],
)  # fmt: skip
def test_taints(tolerations: list[dict[str, Any]], taint: dict[str, str] | None, tolerated: bool) -> None:
    tainted = node(taints=[taint] if taint else None)
    assert eligible({"tolerations": tolerations}, tainted) == ({"node1"} if tolerated else set())


def test_all_taints_must_be_tolerated() -> None:
    both = node(taints=[GPU, {"key": "spot", "effect": "NoExecute"}])
    tolerant = [{"key": "gpu", "operator": "Exists"}]
    assert eligible({"tolerations": tolerant}, both) == set()
    assert eligible({"tolerations": [*tolerant, {"key": "spot", "operator": "Exists"}]}, both) == {"node1"}


def test_a_cordoned_node_accepts_only_pods_that_tolerate_it() -> None:
    assert eligible({}, node(cordoned=True)) == set()
    tolerant = {"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]}
    assert eligible(tolerant, node(cordoned=True)) == {"node1"}


def test_node_selectors_and_names() -> None:
    nodes = [node(labels={"zone": "a", "disk": "ssd"}), node("node2", labels={"zone": "a"})]
    assert eligible({"nodeSelector": {"zone": "a"}}, *nodes) == {"node1", "node2"}
    assert eligible({"nodeSelector": {"zone": "a", "disk": "ssd"}}, *nodes) == {"node1"}
    assert eligible({"nodeSelector": None, "nodeName": "node2"}, *nodes) == {"node2"}


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": list(terms)}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def label(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator} | ({"values": list(values)} if values else {})


@pytest.mark.parametrize(
    ("requirement", "goes_to"),
    [
        (label("gpus", "In", "4", "8"), {"four", "eight"}),
        (label("gpus", "NotIn", "4"), {"eight", "none", "many"}),
        (label("gpus", "Exists"), {"four", "eight", "many"}),
        (label("gpus", "DoesNotExist"), {"none"}),
        (label("gpus", "Gt", "4"), {"eight"}),
        (label("gpus", "Lt", "8"), {"four"}),
        (label("gpus", "Gt", "x"), set()),
        (label("gpus", "Gt"), set()),
        (label("gpus", "Near", "4"), set()),
    ],
)
def test_operators_of_node_affinity(requirement: dict[str, Any], goes_to: set[str]) -> None:
    nodes = [
        node("four", labels={"gpus": "4"}),
        node("eight", labels={"gpus": "8"}),
        node("many", labels={"gpus": "many"}),
        node("none"),
    ]
    assert eligible(affinity({"matchExpressions": [requirement]}), *nodes) == goes_to


@pytest.mark.parametrize(
    ("terms", "goes_to"),
    [
        ([{"matchExpressions": [label("zone", "In", "a")]}], {"node1", "node2"}),
        ([{"matchExpressions": [label("zone", "In", "a"), label("disk", "Exists")]}], {"node1"}),
        ([{"matchExpressions": [label("zone", "In", "b")]}, {"matchExpressions": [label("disk", "Exists")]}],
         {"node1", "node3"}),
        ([{"matchFields": [label("metadata.name", "In", "node3")]}], {"node3"}),
        ([{"matchFields": [label("metadata.name", "NotIn", "node3")],
           "matchExpressions": [label("disk", "DoesNotExist")]}], {"node2"}),
        ([{}], set()),
        ([{}, {"matchExpressions": [label("zone", "Exists")]}], {"node1", "node2", "node3"}),
        ([], set()),
    ],
)  # fmt: skip
def test_terms_of_node_affinity(terms: list[dict[str, Any]], goes_to: set[str]) -> None:
    nodes = [
        node(labels={"zone": "a", "disk": "ssd"}),
        node("node2", labels={"zone": "a"}),
        node("node3", labels={"zone": "b"}),
    ]
    assert eligible(affinity(*terms), *nodes) == goes_to


def test_a_preferred_affinity_excludes_no_node() -> None:
    preferred = [{"weight": 1, "preference": {"matchExpressions": [label("zone", "In", "b")]}}]
    spec = {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}},
        "nodeSelector": {},
    }
    assert eligible(spec, node()) == {"node1"}


@given(
    st.dictionaries(st.sampled_from("ab"), st.sampled_from("123")),
    st.sampled_from("ab"),
    st.lists(st.sampled_from("123"), min_size=1),
)
def test_an_operator_and_its_opposite_match_complementary_nodes(
    labels: dict[str, str], key: str, values: list[str]
) -> None:
    def is_eligible(operator: str, *operands: str) -> bool:
        return bool(
            eligible(affinity({"matchExpressions": [label(key, operator, *operands)]}), node(labels=labels))
        )

    assert is_eligible("In", *values) != is_eligible("NotIn", *values)
    assert is_eligible("Exists") != is_eligible("DoesNotExist")
    assert is_eligible("Gt", values[0]) + is_eligible("Lt", values[0]) + is_eligible(
        "In", values[0]
    ) == is_eligible("Exists")
