"""Remembered eligible nodes equal those that are computed for the present nodes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from adascale_controller.operator.schedule.nodes import NodeSelection, eligible_nodes

GPU = {"key": "gpu", "effect": "NoSchedule"}
AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
        }
    }
}
SPECS: list[dict[str, Any]] = [
    {},
    {"nodeName": "node1"},
    {"nodeSelector": {"zone": "a"}},
    {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
    {"affinity": AFFINITY},
    {"affinity": AFFINITY, "tolerations": [{"operator": "Exists"}]},
]


@st.composite
def clusters(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Nodes, of which any may have changed; the version of a node rises with each change."""
    return [
        {
            "metadata": {"name": f"node{number}", "labels": {"zone": draw(st.sampled_from("ab"))}},
            "spec": {
                "taints": [GPU] if draw(st.booleans()) else [],
                "unschedulable": draw(st.booleans()),
            },
            "status": {
                "conditions": [{"type": "Ready", "status": draw(st.sampled_from(["True", "False"]))}],
            },
        }
        for number in range(draw(st.integers(0, 4)))
    ]


@given(st.lists(clusters(), min_size=1, max_size=4))
def test_eligible_nodes_are_those_of_the_present_nodes(history: list[list[dict[str, Any]]]) -> None:
    selection = NodeSelection()
    versions: dict[str, tuple[int, dict[str, Any]]] = {}
    for nodes in history:
        for node in nodes:
            name = node["metadata"]["name"]
            version, before = versions.get(name, (0, {}))
            versions[name] = (version + (before != node), node)
        present = [
            {**node, "metadata": {**node["metadata"], "resourceVersion": str(versions[name][0])}}
            for node in nodes
            for name in [node["metadata"]["name"]]
        ]
        selection.update(present)
        for spec in [*SPECS, *SPECS]:
            assert selection.eligible(spec) == eligible_nodes(spec, present)
