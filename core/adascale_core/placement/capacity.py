"""Whether replicas of several jobs fit at the same time, into a number or onto the nodes of a cluster.

`ReplicaCapacity` is a number of interchangeable replicas. `SlotCapacity` has nodes with slots for replicas
that all request the same. `NodeCapacity` packs replicas onto nodes (see `packing`). Finding the best packing
of unlike replicas is NP-hard (vector bin packing), so `NodeCapacity` may reject counts that another packing
would hold; it never accepts counts that it has not packed. For a single job, and for jobs with equal
replicas, the answer is exact, and fewer replicas fit wherever more do. For unlike replicas neither holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain
from typing import Protocol

from adascale_core.placement.packing import Demand, Node, Packing, PackingProblem, pack

MIN_UNIFORM_NODES = 4


@dataclass(frozen=True)
class SlotCapacity:
    """Nodes with slots for equal replicas."""

    slots: Sequence[int]  # for each node, how many replicas it holds
    # job id -> the node of each placed replica, by rank
    placed: Mapping[str, Sequence[int]]

    @property
    def total(self) -> int:
        """How many replicas fit."""
        return sum(self.slots)

    @property
    def is_uniform(self) -> bool:
        """Whether there are several nodes, all of one size, so that whole nodes can be given to jobs.

        On fewer nodes every single slot counts.
        """
        return len(self.slots) >= MIN_UNIFORM_NODES and len(set(self.slots)) == 1

    @cached_property
    def node_size(self) -> int:
        """How many replicas fit on the largest node."""
        return max(self.slots, default=0)


def free_slots(slots: Sequence[int], placed: Iterable[Iterable[int]]) -> list[int]:
    """Return the free slots of each node, negative where too many replicas are placed."""
    free = list(slots)
    for nodes in placed:
        for node in nodes:
            free[node] -= 1
    return free


class NodeSlots:
    """The free slots of some nodes, and where new replicas go.

    A replica goes to a node of its own job that has room, else to the fullest node that holds all new ones of
    the job, else to the emptiest. Affinity to the pods of the same job gives about the same on a cluster.
    """

    def __init__(self, free: Sequence[int]) -> None:
        self._free = list(free)
        self._total = sum(units for units in self._free if units > 0)

    @cached_property
    def _by_free(self) -> dict[int, list[int]]:
        """Free slots -> a heap of nodes that have, or had, as many."""
        heaps: dict[int, list[int]] = {}
        for node, units in enumerate(self._free):
            heaps.setdefault(units, []).append(node)
        return heaps

    def __getitem__(self, node: int) -> int:
        return self._free[node]

    @property
    def total(self) -> int:
        """How many replicas all nodes can take."""
        return self._total

    def take(self, nodes: Iterable[int]) -> None:
        """Take a slot for each element of `nodes`."""
        for node, count in Counter(nodes).items():
            self._set(node, self._free[node] - count)

    def give(self, nodes: Iterable[int]) -> None:
        """Free a slot for each element of `nodes`."""
        for node, count in Counter(nodes).items():
            self._set(node, self._free[node] + count)

    def _set(self, node: int, units: int) -> None:
        by_free = self._by_free
        self._total += max(units, 0) - max(self._free[node], 0)
        self._free[node] = units
        heappush(by_free.setdefault(units, []), node)

    def _first(self, units: int) -> int | None:
        """Return the first node with exactly this many free slots."""
        nodes = self._by_free[units]
        while nodes and self._free[nodes[0]] != units:
            heappop(nodes)
        if not nodes:
            del self._by_free[units]
            return None
        return nodes[0]

    def find(self, wanted: int) -> int | None:
        """Return the fullest node with at least `wanted` free slots; None if there is none."""
        for units in sorted(units for units in self._by_free if units >= wanted):
            node = self._first(units)
            if node is not None:
                return node
        return None

    def emptiest(self) -> int | None:
        """Return the node with the most free slots; None if no node has any."""
        for units in sorted((units for units in self._by_free if units > 0), reverse=True):
            node = self._first(units)
            if node is not None:
                return node
        return None

    def place(self, own: Sequence[int], wanted: int) -> list[int] | None:
        """Return the nodes for new replicas and take their slots; None, and take none, if they do not fit."""
        placed: list[int] = []
        used = Counter(own)
        for node in sorted(used, key=lambda node: (-self._free[node], node)):
            count = min(max(self._free[node], 0), wanted - len(placed))
            placed += [node] * count
        self.take(placed)
        while len(placed) < wanted:
            missing = wanted - len(placed)
            found = self.find(missing)
            if found is None:
                found = self.emptiest()
            if found is None:
                self.give(placed)
                return None
            new = [found] * min(self._free[found], missing)
            self.take(new)
            placed += new
        return placed


class Capacity(Protocol):
    """What the replicas of all jobs have to fit into."""

    def fits(self, counts: Mapping[str, int]) -> bool:
        """Whether all `counts` (job id -> replicas) fit at the same time."""

    def max_replicas(self, job: str) -> int:
        """Return how many replicas of `job` fit if no other job runs."""

    def simplified_for(self, jobs: Iterable[str]) -> int | NodeCapacity:
        """Return how many replicas of these jobs fit in any shares; the nodes if no such number exists."""

    def node_size(self, job: str) -> int | None:
        """Return how many replicas of `job` fit on the largest node; None if nodes are not known."""

    def independent(self, jobs: Sequence[str]) -> Sequence[Sequence[str]]:
        """Return `jobs` in groups, each in the same order, such that no two groups share capacity."""


@dataclass(frozen=True)
class ReplicaCapacity:
    """Capacity for a number of replicas, of any job."""

    total: int  # the number of replicas; a negative number stands for 0

    def fits(self, counts: Mapping[str, int]) -> bool:
        """Whether all `counts` (job id -> replicas) fit at the same time."""
        return sum(counts.values()) <= max(self.total, 0)

    def max_replicas(self, job: str) -> int:
        """Return how many replicas of `job` fit if no other job runs."""
        del job
        return max(self.total, 0)

    def simplified_for(self, jobs: Iterable[str]) -> int:
        """Return how many replicas of these jobs fit in any shares."""
        del jobs
        return max(self.total, 0)

    def node_size(self, job: str) -> int | None:
        """Return None: nodes are not known."""
        del job
        return None

    def independent(self, jobs: Sequence[str]) -> Sequence[Sequence[str]]:
        """Return all `jobs` in one group."""
        return [jobs] if jobs else []


class NodeCapacity:
    """Capacity on the nodes of a cluster. What has not changed is taken from the capacity `before`.

    A placed replica stays and fits, even if its node has less than it requests (devices may be missing for a
    moment while a device plugin restarts). Such a node takes no other replica.
    """

    def __init__(
        self, nodes: Iterable[Node], demands: Mapping[str, Demand], before: NodeCapacity | None = None
    ) -> None:
        earlier = None if before is None else before._problem
        self._problem: PackingProblem = PackingProblem.of(nodes, demands, earlier)

    def fits(self, counts: Mapping[str, int]) -> bool:
        """Whether a packing of all `counts` (job id -> replicas) is found."""
        return self.pack(counts) is not None

    def max_replicas(self, job: str) -> int:
        """Return how many replicas of `job` fit if no other job runs."""
        demand = self._problem.demands[job]
        slots = self._problem.nodes.slots[demand.kind]
        total = sum(slots.values())

        def fits(count: int) -> bool:
            if demand.one_node:
                return self.fits({job: count})
            # Without a search on all nodes: replicas that are placed stay, the others take any free slots.
            placed = Counter(node for rank, node in demand.placed.items() if rank < count)
            taken = sum(min(slots.get(node, 0), replicas) for node, replicas in placed.items())
            return count - placed.total() <= total - taken

        lower, upper = 0, len(demand.placed) + total
        while lower < upper:
            count = (lower + upper + 1) // 2
            lower, upper = (count, upper) if fits(count) else (lower, count - 1)
        return lower

    def simplified_for(self, jobs: Iterable[str]) -> int | NodeCapacity:
        """Return how many replicas of these jobs fit in any shares; these nodes if no such number exists.

        A number exists for a single job, and for jobs with equal replicas that may run on the same nodes.
        """
        demands = [self._problem.demands[job] for job in jobs]
        if not demands:
            return 0
        first = demands[0]
        if len(demands) == 1:
            return self.max_replicas(first.job)
        if any(demand.one_node or demand.kind != first.kind for demand in demands):
            return self
        slots = self._problem.nodes.slots[first.kind]
        placed = Counter(node for demand in demands for node in demand.placed.values())
        if any(count > slots.get(node, 0) for node, count in placed.items()):
            return self
        return sum(slots.values())

    def equal_slots(self, jobs: Sequence[str]) -> SlotCapacity | None:
        """Return the slots of the nodes for these jobs; None if their replicas are not equal.

        Their replicas are equal if they request the same, may run on the same nodes, and need not share one.
        """
        if not jobs:
            return None
        demands = [self._problem.demands[job] for job in jobs]
        first = demands[0]
        if any(demand.one_node or demand.kind != first.kind for demand in demands):
            return None
        slots = self._problem.nodes.slots[first.kind]
        placed = Counter(chain.from_iterable(demand.placed.values() for demand in demands))
        if any(count > slots.get(node, 0) for node, count in placed.items()):
            return None
        sizes, index = self._problem.nodes.slots_by_node[first.kind]
        return SlotCapacity(
            sizes, {demand.job: [index[node] for node in demand.placed.values()] for demand in demands}
        )

    def node_size(self, job: str) -> int | None:
        """Return how many replicas of `job` fit on the largest node that it may use, when it is empty."""
        return self._problem.nodes.most_slots[self._problem.demands[job].kind]

    def independent(self, jobs: Sequence[str]) -> Sequence[Sequence[str]]:
        """Return `jobs` in groups, each in the same order, such that no two groups use the same node."""
        demands = [self._problem.demands[job] for job in jobs]
        if len({demand.kind for demand in demands}) < 2:
            return [jobs] if jobs else []
        nodes = self._problem.nodes
        groups = nodes.groups(tuple(sorted({demand.kind for demand in demands})))
        for demand in demands:
            # A replica may be placed on a node that its job may no longer use.
            others = {node for node in demand.placed.values() if node not in nodes.slots[demand.kind]}
            if others:
                groups.join([("kind", demand.kind), *(("node", node) for node in others)])
        found: dict[object, list[str]] = {}
        for demand in demands:
            found.setdefault(groups.of(("kind", demand.kind)), []).append(demand.job)
        return list(found.values())

    def empty_slots(self, job: str) -> int:
        """Return how many replicas of `job` the nodes hold when they are empty."""
        return sum(self._problem.nodes.slots[self._problem.demands[job].kind].values())

    @property
    def totals(self) -> Sequence[int]:
        """The free units of each resource on all nodes."""
        return self._problem.nodes.totals

    def request(self, job: str) -> tuple[int, ...]:
        """Return the units of each resource that a replica of `job` takes."""
        units = [0] * len(self.totals)
        for i, number in self._problem.demands[job].request:
            units[i] = number
        return tuple(units)

    def dominant_share(self, job: str) -> float:
        """Return the largest share of a resource of all nodes that one replica of `job` requests, 0 to 1."""
        return self._problem.demands[job].dominant_share

    def equivalence_class(self, job: str) -> object:
        """Return a key that is equal for jobs of which equally many replicas fit.

        Jobs without placed replicas that request the same on the same nodes share a key.
        """
        demand = self._problem.demands[job]
        return (demand.job,) if demand.placed else (demand.kind, demand.one_node)

    def pack(self, counts: Mapping[str, int]) -> Packing | None:
        """Return the packing of all `counts`, a function of the counts alone; None if none is found."""
        return pack(self._problem, counts)

    def empty_packing(self) -> Packing:
        """Return a packing without replicas, to be resized job by job."""
        return Packing(self._problem)
