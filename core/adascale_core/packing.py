"""A packing of replicas onto nodes.

Replicas that are placed on a node stay there. The others are packed in the order of decreasing size, each
onto the first node with enough free resources (first fit decreasing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PODS = "pods"
"""The resource of which every replica takes at least one unit."""

_REPACKING_BUDGET = 200_000
"""How many (job, node) pairs `Packing.resize` may examine in all to pack everything again."""

Request = tuple[tuple[int, int], ...]
"""(index of a resource, units) for each resource that one replica takes."""


@dataclass(frozen=True)
class Node:
    """A node and its free resources.

    Args:
        name: the node's name.
        free: resource -> whole units (cpu in thousandths, memory in bytes, other resources as counts) that
            the replicas of all jobs may take: what is allocatable, less what other pods take. A resource
            that is not named has 0 units.
    """

    name: str
    free: Mapping[str, int]


@dataclass(frozen=True)
class Demand:
    """The resources that a job requests.

    Args:
        request: resource -> whole units, as for `Node`, that one replica takes. A request of "pods" is at
            least 1.
        nodes: names of the nodes where a new replica may run; None if on all. A cordoned node is not among
            them, but keeps the replicas that are placed on it.
        placed: rank -> name of the node on which that replica is placed. A replica on a node that no longer
            exists is lost and has to be placed again.
        one_node: whether all replicas must share a node: the node with most placed replicas, or any
            if no replica is placed.
    """

    request: Mapping[str, int]
    nodes: frozenset[str] | None = None
    placed: Mapping[int, str] = field(default_factory=dict)
    one_node: bool = False


@dataclass(frozen=True)
class IndexedDemand:
    """A job's demand, with nodes and resources as indices.

    Args:
        job: the job id.
        request: the resources that one replica takes.
        node_order: the nodes that may get a new replica, in the order in which they are tried.
        placed: rank -> node, of the replicas that are placed on an existing node.
        shared_node: the node that new replicas must use; None if it is not decided yet, or not needed.
        one_node: whether all replicas must share a node.
        dominant_share: the largest share of a resource of all nodes that one replica requests, 0 to 1.
    """

    job: str
    request: Request
    node_order: tuple[int, ...]
    placed: Mapping[int, int]
    shared_node: int | None
    one_node: bool
    dominant_share: float


@dataclass(frozen=True)
class PackingProblem:
    """Nodes and demands, with nodes and resources as indices.

    Args:
        node_names: the nodes' names, ascending.
        free: for each node, the free units of each resource.
        demands: job id -> demand.
    """

    node_names: Sequence[str]
    free: Sequence[Sequence[int]]
    demands: Mapping[str, IndexedDemand]

    @classmethod
    def of(cls, nodes: Iterable[Node], demands: Mapping[str, Demand]) -> PackingProblem:
        """Return the problem of packing jobs with `demands` onto `nodes`."""
        ordered = sorted(nodes, key=lambda node: node.name)
        node_names = [node.name for node in ordered]
        requests = {
            job: dict(demand.request) | {PODS: max(demand.request.get(PODS, 1), 1)}
            for job, demand in demands.items()
        }
        resources = sorted(
            {name for request in requests.values() for name, units in request.items() if units}
        )
        free = [[node.free.get(name, 0) for name in resources] for node in ordered]
        totals = [sum(max(units[i], 0) for units in free) for i in range(len(resources))]
        node_index = {name: i for i, name in enumerate(node_names)}
        orders: dict[object, tuple[int, ...]] = {}
        indexed: dict[str, IndexedDemand] = {}
        for job, demand in demands.items():
            units_of = requests[job]
            request = tuple((i, units_of[name]) for i, name in enumerate(resources) if units_of.get(name))
            kind = (request, demand.nodes)
            if kind not in orders:
                orders[kind] = _node_order(node_names, free, request, demand.nodes)
            placed = {rank: node_index[name] for rank, name in demand.placed.items() if name in node_index}
            indexed[job] = IndexedDemand(
                job=job,
                request=request,
                node_order=orders[kind],
                placed=placed,
                shared_node=_most_used_node(placed) if demand.one_node else None,
                one_node=demand.one_node,
                dominant_share=max((units / max(totals[i], 1) for i, units in request), default=0.0),
            )
        return cls(node_names, free, indexed)

    def slots(self, demand: IndexedDemand) -> dict[int, int]:
        """Return how many replicas each node of `demand.node_order` holds when it is empty."""
        return {node: slots(self.free[node], demand.request) for node in demand.node_order}


def _node_order(
    node_names: Sequence[str], free: Sequence[Sequence[int]], request: Request, allowed: frozenset[str] | None
) -> tuple[int, ...]:
    """Return the nodes that can hold a replica, those with the fewest resources it does not request first.

    Otherwise replicas without accelerators would take the processors of nodes with accelerators.
    """
    requested = {i for i, _ in request}

    def unrequested(node: int) -> int:
        return sum(units > 0 for i, units in enumerate(free[node]) if i not in requested)

    able = [
        i
        for i, name in enumerate(node_names)
        if (allowed is None or name in allowed) and slots(free[i], request)
    ]
    return tuple(sorted(able, key=lambda i: (unrequested(i), i)))


def _most_used_node(placed: Mapping[int, int]) -> int | None:
    """Return the node with the most replicas; of several, that of the lowest rank."""
    nodes = [placed[rank] for rank in sorted(placed)]
    return Counter(nodes).most_common(1)[0][0] if nodes else None


def slots(free: Sequence[int], request: Request) -> int:
    """Return how many replicas fit into the free units of a node."""
    return max(min([free[i] // units for i, units in request], default=0), 0)


def pack(problem: PackingProblem, counts: Mapping[str, int]) -> Packing | None:
    """Return the packing of all `counts` (job id -> replicas); None if none is found."""
    packing = Packing(problem)
    demands = [problem.demands[job] for job, count in counts.items() if count > 0]
    for demand in demands:
        packing.keep_placed(demand, counts[demand.job])
    sizes = {
        demand.job: demand.dominant_share * (counts[demand.job] if demand.one_node else 1)
        for demand in demands
    }
    demands.sort(key=lambda demand: (-sizes[demand.job], len(demand.node_order), demand.job))
    return packing if all(packing.place_new(demand, counts[demand.job]) for demand in demands) else None


class Packing:
    """An assignment of replicas to nodes, changed job by job.

    Args:
        problem: the nodes and demands.
    """

    def __init__(self, problem: PackingProblem) -> None:
        self._problem = problem
        self._free = [list(free) for free in problem.free]
        self._new = [0] * len(self._free)
        """For each node, the number of its replicas that are not placed there yet."""
        self._nodes: dict[str, dict[int, int]] = {}
        self._budget = _REPACKING_BUDGET

    @property
    def counts(self) -> dict[str, int]:
        """Job id -> number of replicas, of the jobs that have any."""
        return {job: len(ranks) for job, ranks in self._nodes.items() if ranks}

    @property
    def placements(self) -> dict[str, dict[int, str]]:
        """Job id -> rank -> name of the node, of the jobs that have replicas."""
        names = self._problem.node_names
        return {
            job: {rank: names[node] for rank, node in sorted(ranks.items())}
            for job, ranks in self._nodes.items()
            if ranks
        }

    def resize(self, job: str, count: int, *, always_repack: bool = False) -> bool:
        """Change the number of a job's replicas, if nodes are found for them; otherwise change nothing.

        If they do not fit beside the others, all replicas are packed again.

        Args:
            job: the job id.
            count: the new number of replicas.
            always_repack: whether to pack again even if the budget for it is used up.

        Returns:
            whether the job has `count` replicas now.
        """
        demand = self._problem.demands[job]
        before = dict(self._nodes.get(job, {}))
        if count <= len(before):
            self._remove(demand, [rank for rank in before if rank >= count])
            return True
        if demand.one_node and not demand.placed:
            # No replica is placed yet, so all of them may use another node.
            self._remove(demand, list(before))
        if self.keep_placed(demand, count) and self.place_new(demand, count):
            return True
        self._remove(demand, list(self._nodes.get(job, {})))
        for rank, node in before.items():
            self._add(demand, rank, node)
        work = (len(self._nodes) + 1) * len(self._free)
        if not always_repack and work > self._budget:
            return False
        self._budget -= work
        repacked = pack(self._problem, self.counts | {job: count})
        if repacked is None:
            return False
        self._free, self._new, self._nodes = repacked._free, repacked._new, repacked._nodes
        return True

    def keep_placed(self, demand: IndexedDemand, count: int) -> bool:
        """Add the replicas below rank `count` that are placed on a node.

        Returns:
            False if new replicas take resources that the placed ones need.
        """
        ranks = self._nodes.setdefault(demand.job, {})
        fits = True
        for rank, node in demand.placed.items():
            if rank < count and rank not in ranks:
                self._add(demand, rank, node)
                free = self._free[node]
                fits = fits and not (self._new[node] and any(free[i] < 0 for i, _ in demand.request))
        return fits

    def place_new(self, demand: IndexedDemand, count: int) -> bool:
        """Add the other replicas below rank `count`, and return whether nodes are found for all of them."""
        assigned = self._nodes.setdefault(demand.job, {})
        ranks = [rank for rank in range(count) if rank not in assigned]
        if not ranks:
            return True
        candidates: Iterable[int] = demand.node_order
        if demand.shared_node is not None:
            candidates = [demand.shared_node] if demand.shared_node in demand.node_order else []
        for node in candidates:
            available = slots(self._free[node], demand.request)
            if demand.one_node and available < len(ranks):
                continue
            for rank in ranks[:available]:
                self._add(demand, rank, node)
            ranks = ranks[available:]
            if not ranks:
                return True
        return False

    def _add(self, demand: IndexedDemand, rank: int, node: int) -> None:
        self._nodes[demand.job][rank] = node
        self._new[node] += demand.placed.get(rank) != node
        free = self._free[node]
        for i, units in demand.request:
            free[i] -= units

    def _remove(self, demand: IndexedDemand, ranks: Iterable[int]) -> None:
        for rank in ranks:
            node = self._nodes[demand.job].pop(rank)
            self._new[node] -= demand.placed.get(rank) != node
            free = self._free[node]
            for i, units in demand.request:
                free[i] += units
