"""Jobs and nodes for tests of decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from adascale_core.decision.decide import decide
from adascale_core.decision.job_utility import JobState
from adascale_core.placement.capacity import Capacity, NodeCapacity
from adascale_core.placement.packing import Demand, Node
from support.job_states import NOW


def counts(jobs: Sequence[JobState], capacity: int | Capacity) -> dict[str, int]:
    return {name: decision.replicas for name, decision in decide(jobs, capacity, NOW).items()}


GPU = "nvidia.com/gpu"


def gpus(name: str, count: int) -> Node:
    return Node(name, {GPU: count, "pods": 100})


def on(request: int, placed: str = "", *, one_node: bool = False) -> Demand:
    """Return a demand with replicas placed on nodes; `placed` has a one-letter node name for each rank."""
    return Demand({GPU: request}, None, dict(enumerate(placed)), one_node)


Demands = dict[str, Demand]


def placed(nodes: Sequence[Node], demands: Mapping[str, Demand], replicas: Mapping[str, int]) -> Demands:
    """Return the demands with as many placed replicas as fit, job after job."""
    packing = NodeCapacity(nodes, demands).packing()
    for name, count in replicas.items():
        while count and not packing.resize(name, count):
            count -= 1
    return {
        name: replace(demand, placed=packing.placements.get(name, {})) for name, demand in demands.items()
    }
