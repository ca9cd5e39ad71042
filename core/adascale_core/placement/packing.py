"""A packing of replicas onto nodes.

Replicas that are placed on a node stay there. The others are packed in the order of decreasing size. If they
do not fit, the numbers of unlike replicas on each node are chosen first (`kind_shares`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from adascale_core.placement.kind_shares import Integers, Kind, mixed_shares

PODS = "pods"
"""The resource of which every replica takes at least one unit."""

MAX_KINDS = 1024
"""Kinds of demands beyond the number of jobs that are remembered."""

_MOST_UNITS = 2**52
"""Units of a resource are limited to this number, so that the sums of many fit into 64 bits."""
_REPACKING_BUDGET = 50_000
"""How many (job, node) pairs `Packing.resize` may examine in all to pack everything again."""


@dataclass(frozen=True)
class Node:
    """A node and its free resources."""

    name: str
    # resource -> whole units (cpu in thousandths, memory in bytes, other resources as counts) that the
    # replicas of all jobs may take: what is allocatable, less what other pods take. A resource that is
    # not named has 0 units.
    free: Mapping[str, int]


@dataclass(frozen=True)
class Demand:
    """The resources that a job requests."""

    # resource -> whole units, as for `Node`, that one replica takes. A request of "pods" is at least 1.
    request: Mapping[str, int]
    # names of the nodes where a new replica may run; None if on all. A cordoned node is not among them,
    # but keeps the replicas that are placed on it.
    nodes: frozenset[str] | None = None
    # rank -> name of the node on which that replica is placed. A replica on a node that no longer exists
    # is lost and has to be placed again.
    placed: Mapping[int, str] = field(default_factory=dict)
    # whether all replicas must share a node: the node with most placed replicas, or any if no replica is
    # placed
    one_node: bool = False


@dataclass(frozen=True, eq=False)
class IndexedDemand:
    """A job's demand, with nodes and resources as indices."""

    job: str
    demand: Demand
    kind: Kind
    placed: Mapping[int, int]  # rank -> node, of the replicas that are placed on an existing node, by rank

    @cached_property
    def shared_node(self) -> int | None:
        """The node that new replicas must use; None if it is not decided yet, or not needed."""
        if not self.demand.one_node or not self.placed:
            return None
        return Counter(self.placed.values()).most_common(1)[0][0]


class NodeTable:
    """Nodes, with nodes and resources as indices, and the kinds of demands for them."""

    def __init__(self, nodes: Sequence[Node], resources: Sequence[str]) -> None:
        self.nodes, self.resources = nodes, resources
        ordered = sorted(nodes, key=lambda node: node.name)
        self.names = [node.name for node in ordered]
        self.index = {name: i for i, name in enumerate(self.names)}
        rows = [[_limited(node.free.get(name, 0)) for name in resources] for node in ordered]
        self.free: Integers = np.array(rows, dtype=np.int64).reshape(len(ordered), len(resources))
        self.totals: Integers = np.maximum(self.free, 0).sum(axis=0)
        self.kinds: dict[object, Kind] = {}

    def indexed(self, job: str, demand: Demand) -> IndexedDemand:
        """Return the demand of a job with nodes and resources as indices."""
        index = self.index
        placed = {rank: index[name] for rank, name in sorted(demand.placed.items()) if name in index}
        units = requested(demand)
        request = tuple(_limited(units.get(name, 0)) for name in self.resources)
        key = request, demand.nodes
        if key not in self.kinds:
            self.kinds[key] = self._kind(np.array(request, dtype=np.int64), demand.nodes)
        return IndexedDemand(job, demand, self.kinds[key], placed)

    def _kind(self, request: Integers, allowed: frozenset[str] | None) -> Kind:
        slots = free_slots(self.free, request)
        if allowed is not None:
            slots = np.where([name in allowed for name in self.names], slots, 0)
        same = request.tobytes(), slots.tobytes()
        if same not in self.kinds:
            # Nodes with the fewest resources that a replica does not request are first. Otherwise replicas
            # without accelerators would take the processors of nodes with accelerators.
            unrequested = np.count_nonzero(self.free[:, request == 0] > 0, axis=1)
            able = np.flatnonzero(slots > 0)
            groups = [able[unrequested[able] == number] for number in np.unique(unrequested[able])]
            share = float((request / np.maximum(self.totals, 1)).max(initial=0.0))
            self.kinds[same] = Kind(request, slots, groups, share)
        return self.kinds[same]


def _limited(units: int) -> int:
    return min(max(units, -_MOST_UNITS), _MOST_UNITS)


def requested(demand: Demand) -> dict[str, int]:
    """Return resource -> units that one replica takes."""
    return {**demand.request, PODS: max(demand.request.get(PODS, 1), 1)}


def free_slots(free: Integers, request: Integers) -> Integers:
    """Return how many replicas fit into the free units of each node, of shape (nodes, resources)."""
    used = np.flatnonzero(request)
    slots: Integers = np.maximum((free[:, used] // request[used]).min(axis=1, initial=_MOST_UNITS), 0)
    return slots


def choose_nodes(
    slots: Integers, own: Iterable[int], wanted: int, groups: Sequence[Integers] = ()
) -> dict[int, int] | None:
    """Return node -> how many of a job's `wanted` new replicas it gets; None if they do not fit.

    A replica goes to a node of its own job, else to the fullest node that holds all new ones, else to the
    emptiest. Affinity to the pods of the same job gives about the same on a cluster.
    """
    chosen: dict[int, int] = {}
    slots = slots.copy()

    def take(node: int) -> bool:
        nonlocal wanted
        number = min(max(int(slots[node]), 0), wanted)
        if number:
            chosen[node] = number
            wanted -= number
            slots[node] = 0
        return number > 0

    for node in sorted(set(own), key=lambda node: (-slots[node], node)):
        take(node)
    for group in groups or (np.arange(len(slots)),):
        while wanted and len(group):
            room = slots[group]
            i = int(np.where(room >= wanted, room, _MOST_UNITS).argmin())
            if not take(int(group[i if room[i] >= wanted else room.argmax()])):
                break
    return None if wanted else chosen


class Packing:
    """An assignment of replicas to nodes, changed job by job."""

    def __init__(
        self, table: NodeTable, demands: Mapping[str, IndexedDemand], placed: Mapping[str, int] | None = None
    ) -> None:
        """Begin with the replicas below these counts that are placed on a node."""
        self._table, self._demands = table, demands
        self._free = table.free.copy()
        self._new = np.zeros(len(self._free), dtype=np.int64)
        """For each node, the number of its replicas that are not placed there yet."""
        self._nodes: dict[str, dict[int, int]] = {}
        self._slots: dict[Kind, tuple[Integers, int]] = {}
        """Kind -> the slots of the nodes, and the length of `_changed` when they were computed."""
        self._changed: list[int] = []
        """The nodes whose free units have changed, in the order of time."""
        self._budget = _REPACKING_BUDGET
        used: dict[Kind, list[int]] = {}
        for job, count in (placed or {}).items():
            demand = demands[job]
            own = {rank: node for rank, node in demand.placed.items() if rank < count}
            self._nodes[job] = own
            used.setdefault(demand.kind, []).extend(own.values())
        for kind, nodes in used.items():
            if nodes:
                self._free -= np.bincount(nodes, minlength=len(self._free))[:, None] * kind.request

    @property
    def counts(self) -> dict[str, int]:
        """Job id -> number of replicas, of the jobs that have any."""
        return {job: len(ranks) for job, ranks in self._nodes.items() if ranks}

    @property
    def placements(self) -> dict[str, dict[int, str]]:
        """Job id -> rank -> name of the node, of the jobs that have replicas."""
        names = self._table.names
        return {
            job: {rank: names[node] for rank, node in sorted(ranks.items())}
            for job, ranks in self._nodes.items()
            if ranks
        }

    def nodes(self, job: str) -> Mapping[int, int]:
        """Return rank -> node of the replicas of a job."""
        return dict(self._nodes.get(job, ()))

    def count(self, job: str) -> int:
        """Return the number of replicas of a job."""
        return len(self._nodes.get(job, ()))

    def resize(self, job: str, count: int, *, always_repack: bool = False) -> bool:
        """Change the number of a job's replicas, if nodes are found for them; otherwise change nothing.

        If they do not fit beside the others, all replicas are packed again, within `_REPACKING_BUDGET` unless
        `always_repack`.
        """
        demand, before = self._demands[job], dict(self._nodes.get(job, {}))
        if count <= len(before):
            self._remove(demand, [rank for rank in before if rank >= count])
            return True
        if demand.demand.one_node and not demand.placed:
            # No replica is placed yet, so all of them may use another node.
            self._remove(demand, list(before))
        if self._keep_placed(demand, count) and self.add_missing(demand, count):
            return True
        self.restore(job, before)
        work = (len(self._nodes) + 1) * len(self._free)
        if not always_repack and work > self._budget:
            return False
        self._budget -= work
        repacked = pack(self._table, self._demands, self.counts | {job: count})
        if repacked is None:
            return False
        vars(self).update({**vars(repacked), "_budget": self._budget})
        return True

    def restore(self, job: str, nodes: Mapping[int, int]) -> None:
        """Put the replicas of a job where they were before: rank -> node."""
        demand, own = self._demands[job], self.nodes(job)
        self._remove(demand, [rank for rank, node in list(own.items()) if nodes.get(rank) != node])
        own = self.nodes(job)
        self.add(demand, {rank: node for rank, node in nodes.items() if rank not in own})

    def room(self, job: str) -> int:
        """Return how many more replicas of a job all nodes hold."""
        return int(self.slots(self._demands[job].kind).sum())

    def most_on_one_node(self, job: str) -> int:
        """Return how many replicas a job can have on a single node."""
        nodes, slots = list(self.nodes(job).values()), self.slots(self._demands[job].kind)
        if not nodes:
            return int(self._demands[job].kind.slots.max(initial=0))
        others = [i for i, node in enumerate(nodes) if node != nodes[0]]
        return others[0] if others else len(nodes) + int(slots[nodes[0]])

    def _keep_placed(self, demand: IndexedDemand, count: int) -> bool:
        """Add the replicas below rank `count` that are placed on a node.

        Returns False if new replicas take resources that the placed ones need.
        """
        own = self.nodes(demand.job)
        added = {rank: node for rank, node in demand.placed.items() if rank < count and rank not in own}
        self.add(demand, added)
        shared = [node for node in {*added.values()} if self._new[node]]
        return bool((self._free[shared][:, demand.kind.request > 0] >= 0).all())

    def missing(self, demand: IndexedDemand, count: int) -> list[int]:
        """Return the ranks below `count` that have no node."""
        own = self._nodes.get(demand.job, {})
        return [rank for rank in range(count) if rank not in own]

    def add_missing(self, demand: IndexedDemand, count: int) -> bool:
        """Add the replicas below rank `count` that have no node, if nodes are found for all of them."""
        ranks, own = self.missing(demand, count), self._nodes.setdefault(demand.job, {})
        if not ranks:
            return True
        slots, groups = self.slots(demand.kind), demand.kind.groups
        if demand.demand.one_node:
            fitting = slots >= len(ranks)
            if demand.shared_node is not None:
                fitting &= np.arange(len(slots)) == demand.shared_node
            slots = np.where(fitting, slots, 0)
        chosen = choose_nodes(slots, own.values(), len(ranks), groups)
        if chosen is None:
            return False
        places = [node for node, number in chosen.items() for _ in range(number)]
        self.add(demand, dict(zip(ranks, places, strict=True)))
        return True

    def slots(self, kind: Kind) -> Integers:
        """Return how many more replicas of a kind each node holds."""
        slots, seen = self._slots.get(kind, (None, 0))
        if slots is None:
            slots = np.where(kind.slots > 0, free_slots(self._free, kind.request), 0)
        elif seen < len(self._changed):
            nodes = np.unique(self._changed[seen:])
            slots[nodes] = np.where(kind.slots[nodes] > 0, free_slots(self._free[nodes], kind.request), 0)
        self._slots[kind] = slots, len(self._changed)
        return slots

    def may_hold(self, kinds: Iterable[tuple[Kind, int]]) -> bool:
        """Whether all nodes together have the free units for these numbers of new replicas."""
        needed = sum((number * kind.request.astype(np.float64) for kind, number in kinds), start=np.zeros(1))
        return bool(np.all(needed <= self.free.sum(axis=0, dtype=np.float64) * (1 + 1e-9)))

    @property
    def free(self) -> Integers:
        """The free units of the nodes, of shape (nodes, resources); overcommitted nodes have none."""
        return np.maximum(self._free, 0)

    def add(self, demand: IndexedDemand, nodes: Mapping[int, int]) -> None:
        """Add replicas of a job: rank -> node."""
        self._nodes.setdefault(demand.job, {}).update(nodes)
        self._change(demand, nodes, 1)

    def _remove(self, demand: IndexedDemand, ranks: Iterable[int]) -> None:
        own = self._nodes.get(demand.job, {})
        self._change(demand, {rank: own.pop(rank) for rank in ranks}, -1)

    def _change(self, demand: IndexedDemand, nodes: Mapping[int, int], sign: int) -> None:
        for node, number in Counter(nodes.values()).items():
            self._free[node] -= sign * number * demand.kind.request
            self._changed.append(node)
        for rank, node in nodes.items():
            self._new[node] += sign * (demand.placed.get(rank) != node)


def pack(table: NodeTable, demands: Mapping[str, IndexedDemand], counts: Mapping[str, int]) -> Packing | None:
    """Return the packing of all `counts` (job id -> replicas); None if none is found."""
    counts = {job: counts[job] for job in sorted(counts) if counts[job] > 0}
    packing = Packing(table, demands, counts)
    # Most jobs keep their places, so only the others are looked at one by one.
    new = [demands[job] for job, count in counts.items() if packing.count(job) < count]
    missing = Counter[Kind]()
    for demand in new:
        missing[demand.kind] += counts[demand.job] - packing.count(demand.job)
    if not packing.may_hold(missing.items()):
        return None
    sizes = {each.job: each.kind.share * (counts[each.job] if each.demand.one_node else 1) for each in new}
    new.sort(key=lambda demand: (-sizes[demand.job], len(demand.kind.nodes), demand.job))
    if all(packing.add_missing(demand, counts[demand.job]) for demand in new):
        return packing
    if len({demands[job].kind for job in counts}) == 1:
        return None
    packing = Packing(table, demands, counts)
    return packing if _place_by_kind(packing, new, counts) else None


def _place_by_kind(packing: Packing, demands: Sequence[IndexedDemand], counts: Mapping[str, int]) -> bool:
    """Add the new replicas of all jobs such that unlike replicas share nodes, and return whether they fit."""
    jobs: dict[Kind, list[IndexedDemand]] = {}
    for demand in demands:
        if not demand.demand.one_node:
            jobs.setdefault(demand.kind, []).append(demand)
        elif not packing.add_missing(demand, counts[demand.job]):
            return False
    ranks = [[packing.missing(each, counts[each.job]) for each in same] for same in jobs.values()]
    numbers = [sum(map(len, each)) for each in ranks]
    chosen = mixed_shares(packing.free, list(zip(jobs, numbers, strict=True)))
    if chosen is None:
        return False
    for (kind, same), missing, shares in zip(jobs.items(), ranks, chosen, strict=True):
        places = iter(np.repeat(kind.nodes, shares).tolist())
        for demand, each in zip(same, missing, strict=True):
            packing.add(demand, dict(zip(each, places, strict=False)))
    return True
