"""Places replicas onto the nodes of a simulated cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

from adascale_controller.simulation.application import Placement
from adascale_core.placement.node_slots import NodeSlots, free_slots


class PlacementMode(StrEnum):
    """How new replicas are placed.

    `packed` is a scheduler that sees all new replicas of a job. `affinity` is the default scheduler of
    Kubernetes with a preference for the nodes of the job's other pods, one pod after the other, and `spread`
    the same without this preference.
    """

    PACKED = "packed"
    AFFINITY = "affinity"
    SPREAD = "spread"


def shape(nodes: Sequence[int]) -> Placement:
    """Return the number of replicas on each node, in the order of the first replica of each node."""
    return tuple(Counter(nodes).values())


def place(
    present: Mapping[str, Sequence[int]],
    counts: Mapping[str, int],
    capacity: Sequence[int],
    mode: PlacementMode = PlacementMode.PACKED,
) -> dict[str, tuple[int, ...]]:
    """Return the nodes of the replicas of each job, by rank.

    Replicas that stay keep their node, those of the highest ranks stop first, and new replicas are placed
    job by job, those with the most new replicas first.
    """
    placed = {job: list(present.get(job, ()))[:count] for job, count in counts.items()}
    missing = {job: counts[job] - len(nodes) for job, nodes in placed.items() if counts[job] > len(nodes)}
    slots = NodeSlots(free_slots(capacity, placed.values()) if missing else ())
    for job, wanted in sorted(missing.items(), key=lambda item: -item[1]):
        nodes = placed[job]
        if mode is PlacementMode.PACKED:
            new = slots.place(nodes, wanted)
            if new is None:
                raise ValueError(f"{sum(counts.values())} replicas do not fit on {len(capacity)} nodes")
            nodes.extend(new)
            continue
        for _ in range(wanted):
            own = Counter(node for node in nodes if slots[node] > 0) if mode is PlacementMode.AFFINITY else {}
            node = max(own, key=lambda node: (own[node], -node)) if own else slots.emptiest()
            if node is None:
                raise ValueError(f"{sum(counts.values())} replicas do not fit on {len(capacity)} nodes")
            slots.take([node])
            nodes.append(node)
    return {job: tuple(nodes) for job, nodes in placed.items() if nodes}
