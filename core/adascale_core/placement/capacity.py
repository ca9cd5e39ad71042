"""Whether replicas of several jobs fit at the same time, into a number or onto the nodes of a cluster.

`ReplicaCapacity` is a number of interchangeable replicas, `NodeCapacity` packs replicas onto nodes (see
`packing`). Finding the best packing of unlike replicas is NP-hard (vector bin packing), so `NodeCapacity` may
reject counts that another packing would hold; it never accepts counts that it has not packed. For a single
job, and for jobs with equal replicas, the answer is exact, and fewer replicas fit wherever more do. For
unlike replicas neither holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from adascale_core.placement.kind_shares import Floats, Kind
from adascale_core.placement.packing import (
    MAX_KINDS,
    PODS,
    Demand,
    IndexedDemand,
    Node,
    NodeTable,
    Packing,
    pack,
)

MIN_UNIFORM_NODES = 4
"""On fewer nodes every single slot counts."""


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

    def total_for(self, jobs: Sequence[str]) -> int:
        """Return how many replicas of these jobs fit in any shares."""
        del jobs
        return max(self.total, 0)

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
        nodes = tuple(nodes)
        names = {name for demand in demands.values() for name, units in demand.request.items() if units}
        resources = tuple(sorted(names | {PODS}))
        self._table: NodeTable
        known: Mapping[str, IndexedDemand] = {}
        if (
            before is not None
            and (before._table.nodes, before._table.resources) == (nodes, resources)
            and len(before._table.kinds) <= MAX_KINDS + len(demands)
        ):
            self._table, known = before._table, before._demands
        else:
            self._table = NodeTable(nodes, resources)
        self._demands: dict[str, IndexedDemand] = {}
        for job, demand in demands.items():
            same = known.get(job)
            if same is None or (same.demand is not demand and same.demand != demand):
                same = self._table.indexed(job, demand)
            self._demands[job] = same

    def fits(self, counts: Mapping[str, int]) -> bool:
        """Whether a packing of all `counts` (job id -> replicas) is found."""
        return self.pack(counts) is not None

    def max_replicas(self, job: str) -> int:
        """Return how many replicas of `job` fit if no other job runs."""
        demand = self._demands[job]
        slots = demand.kind.slots
        total = int(slots.sum())

        def fits(count: int) -> bool:
            if demand.demand.one_node:
                return self.fits({job: count})
            # Without a search on all nodes: replicas that are placed stay, the others take any free slots.
            placed = Counter(node for rank, node in demand.placed.items() if rank < count)
            taken = sum(min(int(slots[node]), replicas) for node, replicas in placed.items())
            return count - placed.total() <= total - taken

        counts = range(1, len(demand.placed) + total + 1)
        return bisect_left(counts, True, key=lambda count: not fits(count))

    def total_for(self, jobs: Sequence[str]) -> int | None:
        """Return how many replicas of these jobs fit in any shares; None if no such number exists.

        A number exists for a single job, and for jobs with equal replicas that may run on the same nodes.
        """
        if len(jobs) == 1:
            return self.max_replicas(jobs[0])
        slots = self.slots_for(jobs)
        return None if slots is None else sum(slots)

    def slots_for(self, jobs: Sequence[str]) -> Sequence[int] | None:
        """Return how many replicas of these jobs each node holds; None if their replicas are not equal.

        Their replicas are equal if they request the same, may run on the same nodes, and need not share one.
        """
        demands = [self._demands[job] for job in jobs]
        if not demands:
            return []
        kind = demands[0].kind
        if any(demand.demand.one_node or demand.kind is not kind for demand in demands):
            return None
        placed = list(chain.from_iterable(demand.placed.values() for demand in demands))
        if placed and (np.bincount(placed, minlength=len(kind.slots)) > kind.slots).any():
            return None
        return [count for count in kind.slots.tolist() if count]

    def node_sizes(self, jobs: Sequence[str], valid: Sequence[str]) -> tuple[list[int], bool]:
        """Return how many replicas of each job the largest node holds, and whether jobs get whole nodes.

        They do on several nodes of one size, if the replicas of all `valid` jobs are equal.
        """
        slots = self.slots_for(valid) or ()
        sizes = [max(slots) if slots else int(self._demands[job].kind.slots.max(initial=0)) for job in jobs]
        return sizes, len(slots) >= MIN_UNIFORM_NODES and len(set(slots)) == 1

    def independent(self, jobs: Sequence[str]) -> Sequence[Sequence[str]]:
        """Return `jobs` in groups, each in the same order, such that no two groups use the same node."""
        members: dict[Kind, list[str]] = {}
        for job in jobs:
            members.setdefault(self._demands[job].kind, []).append(job)
        groups: list[tuple[set[int], list[str]]] = []
        for kind, same in members.items():
            used = {*np.flatnonzero(kind.slots).tolist()}
            # A replica may be placed on a node that its job may no longer use.
            used.update(*(self._demands[job].placed.values() for job in same))
            apart = []
            for nodes, others in groups:
                if nodes.isdisjoint(used):
                    apart.append((nodes, others))
                else:
                    used, same = used | nodes, [*same, *others]
            groups = [*apart, (used, same)]
        position = {job: i for i, job in enumerate(jobs)}
        ordered = [sorted(same, key=position.__getitem__) for _, same in groups]
        return sorted(ordered, key=lambda same: position[same[0]])

    def empty_slots(self, job: str) -> int:
        """Return how many replicas of `job` the nodes hold when they are empty."""
        return int(self._demands[job].kind.slots.sum())

    def requests(self, jobs: Sequence[str]) -> tuple[Floats, Floats]:
        """Return what a replica of each job takes, of shape (jobs, resources), and the units of all nodes."""
        rows = [self._demands[job].kind.request for job in jobs]
        return np.array(rows, dtype=np.float64).reshape(len(jobs), -1), self._table.totals.astype(np.float64)

    def admission(self) -> Callable[[str, int], bool]:
        """Return a function that adds a smallest count of a job if it fits beside those that were added."""
        packing = self.packing()
        rejected: dict[object, int] = {}

        def add(job: str, count: int) -> bool:
            # A count that did not fit does not fit beside even more jobs.
            demand = self._demands[job]
            same = (job,) if demand.placed else (demand.kind, demand.demand.one_node)
            if count < rejected.get(same, count + 1) and packing.resize(job, count, always_repack=True):
                return True
            rejected[same] = min(count, rejected.get(same, count))
            return False

        return add

    def pack(self, counts: Mapping[str, int]) -> Packing | None:
        """Return the packing of all `counts`, a function of the counts alone; None if none is found."""
        return pack(self._table, self._demands, counts)

    def packing(self, placed: Mapping[str, int] | None = None) -> Packing:
        """Return a packing of the placed replicas below these counts, to be resized job by job."""
        return Packing(self._table, self._demands, placed)


Capacity = ReplicaCapacity | NodeCapacity
"""What the replicas of all jobs have to fit into."""
