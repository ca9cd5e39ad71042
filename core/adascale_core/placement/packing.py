"""A packing of replicas onto nodes.

Replicas that are placed on a node stay there. The others are packed in the order of decreasing size, each
onto the first node with enough free resources (first fit decreasing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter

import numpy as np

from adascale_core.placement.kind_shares import Integers, Kind, Request, as_int64, even_shares, mixed_shares

Element = tuple[str, int]


class Groups:
    """Disjoint groups of elements, which can be joined (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[Element, Element] = {}

    def of(self, element: Element) -> Element:
        """Return an element that is the same for all elements of a group."""
        parent = self._parents.setdefault(element, element)
        while parent != element:
            above = self._parents[parent]
            self._parents[element] = above
            element, parent = parent, above
        return element

    def join(self, elements: Sequence[Element]) -> None:
        """Join the groups of some elements."""
        first = self.of(elements[0])
        for element in elements[1:]:
            self._parents[self.of(element)] = first

    def copy(self) -> Groups:
        """Return the same groups."""
        copied = Groups()
        copied._parents = dict(self._parents)
        return copied


PODS = "pods"
"""The resource of which every replica takes at least one unit."""

MAX_KINDS = 1024
"""Kinds of demands beyond the number of jobs that are remembered."""

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


@dataclass(frozen=True)
class IndexedDemand:
    """A job's demand, with nodes and resources as indices."""

    job: str
    demand: Demand
    request: Request  # the resources that one replica takes
    node_order: tuple[int, ...]  # the nodes that may get a new replica, in the order in which they are tried
    kind: int  # equal for jobs with the same `request` and `node_order`
    placed: Mapping[int, int]  # rank -> node, of the replicas that are placed on an existing node, by rank
    # the node that new replicas must use; None if it is not decided yet, or not needed
    shared_node: int | None
    dominant_share: float  # the largest share of a resource of all nodes that one replica requests, 0 to 1

    @property
    def one_node(self) -> bool:
        """Whether all replicas must share a node."""
        return self.demand.one_node

    @cached_property
    def end(self) -> int:
        """The rank after the highest that is placed; 0 if none is."""
        return max(self.placed, default=-1) + 1

    def is_placed(self, count: int) -> bool:
        """Whether all ranks below `count` are placed. May be False where they are, if a rank is missing."""
        return count <= self.end == len(self.placed)


class NodeTable:
    """Nodes, with nodes and resources as indices, and what is known of the kinds of demands for them."""

    def __init__(self, nodes: Sequence[Node], resources: Sequence[str]) -> None:
        self.nodes, self.resources = nodes, resources
        ordered = sorted(nodes, key=lambda node: node.name)
        self.names = [node.name for node in ordered]
        """The nodes' names, ascending."""
        self.free = [[node.free.get(name, 0) for name in resources] for node in ordered]
        """For each node, the free units of each resource."""
        self.totals = [sum(max(units[i], 0) for units in self.free) for i in range(len(resources))]
        """The free units of each resource on all nodes."""
        self.slots: list[dict[int, int]] = []
        """For each kind of demand, in the order in which nodes are tried: how many replicas each node holds
        when it is empty."""
        self.most_slots: list[int] = []
        """For each kind of demand, the largest number of replicas that one node holds when it is empty."""
        self.slots_by_node: list[tuple[list[int], dict[int, int]]] = []
        """For each kind of demand: how many replicas each node holds that holds any, ascending by node, and
        node -> its position in this order."""
        self.positions: list[dict[int, int]] = []
        """For each kind of demand, node -> its position in this order."""
        self.orders: list[tuple[int, ...]] = []
        """For each kind of demand, the nodes that hold any replica, in the order in which they are tried."""
        self._index = {name: i for i, name in enumerate(self.names)}
        self._matrix = np.array([[as_int64(units) for units in row] for row in self.free], dtype=np.int64)
        self._groups: tuple[tuple[int, ...], Groups] | None = None
        self._kinds: dict[tuple[Request, frozenset[str] | None], int] = {}
        self._kinds_by_order: dict[tuple[Request, tuple[int, ...]], int] = {}

    def groups(self, kinds: tuple[int, ...]) -> Groups:
        """Return groups of these kinds and the nodes that they may use, such that no two share a node."""
        if self._groups is None or self._groups[0] != kinds:
            groups = Groups()
            for kind in kinds:
                groups.join([("kind", kind), *(("node", node) for node in self.slots[kind])])
            self._groups = kinds, groups
        return self._groups[1].copy()

    def indexed(self, job: str, demand: Demand) -> IndexedDemand:
        """Return the demand of a job with nodes and resources as indices."""
        units_of = requested(demand)
        request = tuple((i, units_of[name]) for i, name in enumerate(self.resources) if units_of.get(name))
        kind = self._kind(request, demand.nodes)
        index = self._index
        placed = {rank: index[name] for rank, name in sorted(demand.placed.items()) if name in index}
        return IndexedDemand(
            job=job,
            demand=demand,
            request=request,
            node_order=self.orders[kind],
            kind=kind,
            placed=placed,
            shared_node=_most_used_node(placed) if demand.one_node else None,
            dominant_share=max((units / max(self.totals[i], 1) for i, units in request), default=0.0),
        )

    def _kind(self, request: Request, allowed: frozenset[str] | None) -> int:
        key = request, allowed
        if key not in self._kinds:
            found = _slots_in_order(self.names, self._matrix, request, allowed)
            order = tuple(found)
            kind = self._kinds[key] = self._kinds_by_order.setdefault((request, order), len(self.orders))
            if kind == len(self.orders):
                self.orders.append(order)
                self.slots.append(found)
                self.most_slots.append(max(found.values(), default=0))
                nodes = sorted(found)
                index = {node: i for i, node in enumerate(nodes)}
                self.slots_by_node.append(([found[node] for node in nodes], index))
                self.positions.append({node: i for i, node in enumerate(order)})
        return self._kinds[key]


def requested(demand: Demand) -> dict[str, int]:
    """Return resource -> units that one replica takes."""
    return {**demand.request, PODS: max(demand.request.get(PODS, 1), 1)}


@dataclass(frozen=True)
class PackingProblem:
    """Nodes and demands, with nodes and resources as indices."""

    nodes: NodeTable
    demands: Mapping[str, IndexedDemand]

    @cached_property
    def with_all_placed(self) -> Packing:
        """A packing of all replicas that are placed."""
        packing = Packing(self)
        for demand in self.demands.values():
            packing.keep_placed(demand, demand.end)
        return packing

    @classmethod
    def of(
        cls, nodes: Iterable[Node], demands: Mapping[str, Demand], before: PackingProblem | None = None
    ) -> PackingProblem:
        """Return the problem of packing jobs with `demands` onto `nodes`."""
        nodes = tuple(nodes)
        names = {name for demand in demands.values() for name, units in demand.request.items() if units}
        resources = tuple(sorted(names | {PODS} if demands else ()))
        before = before or cls(NodeTable((), ()), {})
        table, known = before.nodes, before.demands
        if (table.nodes, table.resources) != (nodes, resources) or (
            len(table.slots) > MAX_KINDS + len(demands)
        ):
            table, known = NodeTable(nodes, resources), {}
        indexed = {}
        for job, demand in demands.items():
            same = known.get(job)
            if same is None or (same.demand is not demand and same.demand != demand):
                same = table.indexed(job, demand)
            indexed[job] = same
        problem = cls(table, indexed)
        if known and "with_all_placed" in vars(before):
            vars(problem)["with_all_placed"] = before.with_all_placed.moved_to(problem)
        return problem


def _slots_in_order(
    node_names: Sequence[str], free: Integers, request: Request, allowed: frozenset[str] | None
) -> dict[int, int]:
    """Return how many replicas each node holds that holds any, in the order in which nodes are tried.

    Nodes with the fewest resources that a replica does not request are first. Otherwise replicas without
    accelerators would take the processors of nodes with accelerators.
    """
    if not len(free):
        return {}
    requested = [i for i, _ in request]
    slots = np.min(free[:, requested] // np.array([as_int64(units) for _, units in request]), axis=1)
    if allowed is not None:
        slots = np.where([name in allowed for name in node_names], slots, 0)
    unrequested = np.count_nonzero(np.delete(free, requested, axis=1) > 0, axis=1)
    able = np.flatnonzero(slots > 0)
    order = able[np.argsort(unrequested[able], kind="stable")]
    return dict(zip(order.tolist(), slots[order].tolist(), strict=True))


def _most_used_node(placed: Mapping[int, int]) -> int | None:
    """Return the node with the most replicas; of several, the node with the lowest rank."""
    return Counter(placed.values()).most_common(1)[0][0] if placed else None


def slots(free: Sequence[int], request: Request) -> int:
    """Return how many replicas fit into the free units of a node."""
    least = min([free[i] // units for i, units in request], default=0)
    return least if least > 0 else 0


def pack(problem: PackingProblem, counts: Mapping[str, int]) -> Packing | None:
    """Return the packing of all `counts` (job id -> replicas); None if none is found."""
    # Most jobs keep their places, so only the others are looked at one by one.
    demands = [
        demand
        for demand, count in ((problem.demands[job], count) for job, count in counts.items() if count > 0)
        if not demand.is_placed(count)
    ]
    sizes = {
        demand.job: demand.dominant_share * (counts[demand.job] if demand.one_node else 1)
        for demand in demands
    }
    demands.sort(key=lambda demand: (-sizes[demand.job], len(demand.node_order), demand.job))
    packing = _with_placed(problem, counts)
    if not packing.may_hold(demands, counts):
        return None
    if all(packing.place_new(demand, counts[demand.job]) for demand in demands):
        return packing
    if len({problem.demands[job].kind for job, count in counts.items() if count > 0}) == 1:
        return None
    for shares_of in (even_shares, mixed_shares):
        packing = _with_placed(problem, counts)
        if _place_by_kind(packing, demands, counts, shares_of):
            return packing
    return None


def _with_placed(problem: PackingProblem, counts: Mapping[str, int]) -> Packing:
    """Return a packing of the replicas that are placed."""
    packing = problem.with_all_placed.copy()
    for job, demand in problem.demands.items():
        count = counts.get(job, 0)
        if count < demand.end:
            packing.keep_below(demand, count)
    return packing


def _place_by_kind(
    packing: Packing,
    demands: Sequence[IndexedDemand],
    counts: Mapping[str, int],
    shares_of: Callable[[Integers, Sequence[Kind]], Sequence[Integers] | None],
) -> bool:
    """Add the new replicas of all jobs such that unlike replicas share nodes.

    First fit fills the first nodes with the largest replicas, which leaves resources there that only other
    replicas could use. Here the number of each kind of replicas on each node is chosen first.
    """
    jobs: dict[int, list[IndexedDemand]] = {}
    for demand in demands:
        if demand.one_node:
            if not packing.place_new(demand, counts[demand.job]):
                return False
        else:
            jobs.setdefault(demand.kind, []).append(demand)
    ranks = [[packing.missing(demand, counts[demand.job]) for demand in same] for same in jobs.values()]
    kinds = [
        Kind(same[0].request, np.array(same[0].node_order, dtype=np.int64), sum(map(len, missing)))
        for same, missing in zip(jobs.values(), ranks, strict=True)
    ]
    chosen = shares_of(packing.free, [kind for kind in kinds if kind.number])
    if chosen is None:
        return False
    shares = iter(chosen)
    return all(
        _hand_out(packing, kind.nodes.tolist(), next(shares).tolist(), same, missing)
        for kind, same, missing in zip(kinds, jobs.values(), ranks, strict=True)
        if kind.number
    )


def _hand_out(
    packing: Packing,
    nodes: Sequence[int],
    shares: Sequence[int],
    demands: Sequence[IndexedDemand],
    ranks: Sequence[Sequence[int]],
) -> bool:
    """Give each job of a kind the next places, and return whether the nodes have them."""
    places = ((node, share) for node, share in zip(nodes, shares, strict=True) if share)
    node, free = 0, 0
    for demand, missing in zip(demands, ranks, strict=True):
        placed = 0
        while placed < len(missing):
            if not free:
                node, free = next(places)
                if packing.room(demand, node) < free:
                    return False
            number = min(free, len(missing) - placed)
            packing.add(demand, missing[placed : placed + number], node)
            placed, free = placed + number, free - number
    return True


class _OpenNodes:
    """The nodes that may have room for the replicas of a kind, by their position in its order."""

    def __init__(self) -> None:
        self._next = 0
        """The nodes from this position on were never closed."""
        self._reopened: list[int] = []
        """A heap of the others that are open; a node may be there more than once."""
        self.seen = 0
        """How many elements of `Packing._freed` it has taken into account."""

    @property
    def first(self) -> int:
        """The position of the first open node."""
        return self._reopened[0] if self._reopened else self._next

    def close(self) -> None:
        """Close the first node: it has no room."""
        if self._reopened:
            heappop(self._reopened)
        else:
            self._next += 1

    def reopen(self, position: int) -> None:
        """Open a node that may have room again."""
        if position < self._next:
            heappush(self._reopened, position)


class Packing:
    """An assignment of replicas to nodes, changed job by job."""

    def __init__(self, problem: PackingProblem) -> None:
        self._problem = problem
        self._free = [list(free) for free in problem.nodes.free]
        self._new = [0] * len(self._free)
        """For each node, the number of its replicas that are not placed there yet."""
        self._nodes: dict[str, dict[int, int]] = {}
        self._shared: set[str] = set()
        """The jobs whose places another packing has too: they are copied before they are changed."""
        self._budget = _REPACKING_BUDGET
        self._total = list(problem.nodes.totals)
        """The free units of each resource on all nodes; overcommitted nodes have none."""
        self._open: dict[int, _OpenNodes] = {}
        """Kind -> the nodes that may have room for its replicas."""
        self._closed: list[int] = []
        """The positions of the nodes that the last attempt to place replicas has filled."""
        self._freed: list[int] = []
        """The nodes from which replicas were removed, in the order of time."""
        self._room: dict[int, tuple[int, int]] = {}
        """Kind -> how many replicas found room in an attempt that failed, and the length of `_freed` then."""

    @property
    def counts(self) -> dict[str, int]:
        """Job id -> number of replicas, of the jobs that have any."""
        return {job: len(ranks) for job, ranks in self._nodes.items() if ranks}

    @property
    def placements(self) -> dict[str, dict[int, str]]:
        """Job id -> rank -> name of the node, of the jobs that have replicas."""
        names = self._problem.nodes.names
        return {
            job: {rank: names[node] for rank, node in sorted(ranks.items())}
            for job, ranks in self._nodes.items()
            if ranks
        }

    def resize(self, job: str, count: int, *, always_repack: bool = False) -> bool:
        """Change the number of a job's replicas, if nodes are found for them; otherwise change nothing.

        If they do not fit beside the others, all replicas are packed again, within `_REPACKING_BUDGET` unless
        `always_repack`.
        """
        demand = self._problem.demands[job]
        before = dict(self._nodes.get(job, {}))
        if count <= len(before):
            self._remove(demand, [rank for rank in before if rank >= count])
            return True
        new = count - len(before) - sum(rank < count and rank not in before for rank in demand.placed)
        if any(self._total[i] < new * units for i, units in demand.request):
            return False
        if demand.one_node and not demand.placed:
            # No replica is placed yet, so all of them may use another node.
            self._remove(demand, list(before))
        room, seen = self._room.get(demand.kind, (0, -1))
        if seen != len(self._freed) or new <= room or demand.one_node:
            self._closed.clear()
            if self.keep_placed(demand, count) and self.place_new(demand, count):
                return True
            self._restore(demand, before)
        work = (len(self._nodes) + 1) * len(self._free)
        if not always_repack and work > self._budget:
            return False
        self._budget -= work
        repacked = pack(self._problem, self.counts | {job: count})
        if repacked is None:
            return False
        self._free, self._new, self._nodes = repacked._free, repacked._new, repacked._nodes
        self._total, self._open, self._freed = repacked._total, repacked._open, repacked._freed
        self._room, self._shared = repacked._room, repacked._shared
        return True

    def _restore(self, demand: IndexedDemand, before: Mapping[int, int]) -> None:
        """Undo a failed attempt to give a job more replicas."""
        ranks = self._own_nodes(demand.job)
        changed = [rank for rank, node in ranks.items() if before.get(rank) != node]
        if not demand.one_node and not demand.placed:
            self._room[demand.kind] = len(changed), len(self._freed)
        freed = len(self._freed)
        self._remove(demand, changed)
        for rank, node in before.items():
            if rank not in ranks:
                self.add(demand, (rank,), node)
        # All nodes are as before, so no kind has to look at them again.
        del self._freed[freed:]
        for position in self._closed:
            self._open[demand.kind].reopen(position)

    def copy(self) -> Packing:
        """Return a packing of the same replicas."""
        copied = Packing(self._problem)
        copied._free = [list(free) for free in self._free]
        copied._total = list(self._total)
        copied._new = list(self._new)
        copied._nodes = dict(self._nodes)
        copied._shared, self._shared = set(self._nodes), set(self._nodes)
        return copied

    def moved_to(self, problem: PackingProblem) -> Packing:
        """Return a packing of all placed replicas of a later problem on the same nodes, from one of this."""
        moved = self.copy()
        before, moved._problem = self._problem.demands, problem
        for job, demand in before.items():
            if problem.demands.get(job) is not demand:
                moved.keep_below(demand, 0)
        for job, demand in problem.demands.items():
            if before.get(job) is not demand:
                moved.keep_placed(demand, demand.end)
        return moved

    def _own_nodes(self, job: str) -> dict[int, int]:
        """Return rank -> node of a job, to be changed."""
        nodes = self._nodes.setdefault(job, {})
        if job in self._shared:
            self._shared.remove(job)
            nodes = self._nodes[job] = dict(nodes)
        return nodes

    def keep_below(self, demand: IndexedDemand, count: int) -> None:
        """Remove the replicas from rank `count` on."""
        ranks = [rank for rank in self._nodes.get(demand.job, ()) if rank >= count]
        if ranks:
            self._remove(demand, ranks)

    def keep_placed(self, demand: IndexedDemand, count: int) -> bool:
        """Add the replicas below rank `count` that are placed on a node.

        Returns False if new replicas take resources that the placed ones need.
        """
        ranks = self._nodes.setdefault(demand.job, {})
        missing = [(node, rank) for rank, node in demand.placed.items() if rank < count and rank not in ranks]
        fits = True
        for node, group in groupby(missing, key=itemgetter(0)):
            self.add(demand, [rank for _, rank in group], node)
            free = self._free[node]
            fits = fits and not (self._new[node] and any(free[i] < 0 for i, _ in demand.request))
        return fits

    def missing(self, demand: IndexedDemand, count: int) -> Sequence[int]:
        """Return the ranks below `count` that have no node."""
        assigned = self._nodes.setdefault(demand.job, {})
        return [rank for rank in range(count) if rank not in assigned] if assigned else range(count)

    def may_hold(self, demands: Iterable[IndexedDemand], counts: Mapping[str, int]) -> bool:
        """Whether all nodes together have the free units that these jobs still need."""
        needed = [0] * len(self._total)
        for demand in demands:
            missing = len(self.missing(demand, counts[demand.job]))
            for i, units in demand.request:
                needed[i] += missing * units
        return all(need <= free for need, free in zip(needed, self._total, strict=True))

    def room(self, demand: IndexedDemand, node: int) -> int:
        """Return how many more replicas of a job fit on a node."""
        return slots(self._free[node], demand.request)

    @property
    def free(self) -> Integers:
        """The free units of the nodes, of shape (nodes, resources)."""
        rows = [[as_int64(units) for units in row] for row in self._free]
        return np.array(rows, dtype=np.int64).reshape(len(rows), len(self._problem.nodes.resources))

    def place_new(self, demand: IndexedDemand, count: int) -> bool:
        """Add the other replicas below rank `count`, and return whether nodes are found for all of them."""
        ranks = self.missing(demand, count)
        self._closed.clear()
        if not ranks:
            return True
        if demand.one_node:
            return self._place_on_one_node(demand, ranks)
        order, nodes, placed = demand.node_order, self._open_nodes(demand.kind), 0
        while placed < len(ranks):
            position = nodes.first
            if position == len(order):
                return False
            node = order[position]
            available = slots(self._free[node], demand.request)
            if available:
                self.add(demand, ranks[placed : placed + available], node)
            placed += available
            if placed < len(ranks) or available == 0:
                nodes.close()
                if available:
                    self._closed.append(position)
        return True

    def _place_on_one_node(self, demand: IndexedDemand, ranks: Sequence[int]) -> bool:
        order: Sequence[int] = demand.node_order
        if demand.shared_node is not None:
            order = (demand.shared_node,) if demand.shared_node in order else ()
        for node in order:
            if slots(self._free[node], demand.request) >= len(ranks):
                self.add(demand, ranks, node)
                return True
        return False

    def _open_nodes(self, kind: int) -> _OpenNodes:
        """Return the nodes that may have room for a replica of a kind."""
        nodes = self._open.setdefault(kind, _OpenNodes())
        positions = self._problem.nodes.positions[kind]
        for node in self._freed[nodes.seen :]:
            position = positions.get(node)
            if position is not None:
                nodes.reopen(position)
        nodes.seen = len(self._freed)
        return nodes

    def add(self, demand: IndexedDemand, ranks: Sequence[int], node: int) -> None:
        """Add replicas of a job to a node."""
        self._own_nodes(demand.job).update(dict.fromkeys(ranks, node))
        self._new[node] += _new_on(demand, ranks, node)
        self._use(demand.request, node, len(ranks))

    def _remove(self, demand: IndexedDemand, ranks: Iterable[int]) -> None:
        nodes = self._own_nodes(demand.job)
        removed = [(nodes.pop(rank), rank) for rank in ranks]
        for node, group in groupby(removed, key=itemgetter(0)):
            on_node = [rank for _, rank in group]
            self._new[node] -= _new_on(demand, on_node, node)
            self._use(demand.request, node, -len(on_node))
            self._freed.append(node)

    def _use(self, request: Request, node: int, count: int) -> None:
        """Take the resources of replicas of a node, or give them back if `count` is negative."""
        free, total = self._free[node], self._total
        for i, units in request:
            before = free[i]
            free[i] = after = before - units * count
            total[i] += (after if after > 0 else 0) - (before if before > 0 else 0)


def _new_on(demand: IndexedDemand, ranks: Sequence[int], node: int) -> int:
    """Return how many of these replicas are not placed on the node yet."""
    if not demand.placed:
        return len(ranks)
    return sum(demand.placed.get(rank) != node for rank in ranks)
