"""Whether replicas of several jobs fit at once: into a number of replicas, or onto the nodes of a cluster.

`ReplicaCapacity` is a number: replicas are alike, and so many fit. `NodeCapacity` has nodes as bins: replicas
that are placed on a node stay there, and the others are packed by decreasing size, each onto the first node
that has what it requests. The best packing of unlike replicas is hard to find, so a capacity may say no to
counts that another packing would hold; it never says yes to what it has not packed. For one job alone, and
for jobs whose replicas are alike, the answer is exact: there, fewer replicas fit wherever more do.
With unlike replicas neither is certain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PODS = "pods"
"""The resource of which every replica takes one at least."""

_REPACKING = 200_000
"""How many (job, node) pairs may be looked at to arrange a packing anew while counts are searched for."""


@dataclass(frozen=True)
class Node:
    """A node, and what of it is there for the jobs that are decided about.

    Args:
        name: of the node.
        free: resource -> whole units (cpu in thousandths, memory in bytes, the rest as counts) that may be
            allocated, less what others than the replicas of these jobs take. None of what is not named.
    """

    name: str
    free: Mapping[str, int]


@dataclass(frozen=True)
class Demand:
    """What a job asks of nodes.

    Args:
        request: resource -> whole units, as for `Node`, that one replica takes. One of "pods" if not named.
        nodes: names of the nodes where a new replica may run; none: on all. A node that takes no new
            replicas is not among them, and yet keeps those that stand on it.
        placed: rank -> name of the node on which that replica stands. Where that node is none of the
            room's, it is lost: the replica has to be placed anew.
        one_node: whether all replicas share one node: where the present ones stand, or any.
    """

    request: Mapping[str, int]
    nodes: frozenset[str] | None = None
    placed: Mapping[int, str] = field(default_factory=dict)
    one_node: bool = False


@dataclass(frozen=True)
class ReplicaCapacity:
    """Capacity for so many replicas, whatever job they are of."""

    total: int

    def fits(self, counts: Mapping[str, int]) -> bool:
        """Whether all `counts` (job id -> replicas) fit at once."""
        return sum(counts.values()) <= max(self.total, 0)

    def most(self, job: str) -> int:
        """How many replicas of `job` fit where no other job runs."""
        del job
        return max(self.total, 0)

    def number(self, jobs: Iterable[str]) -> int | None:
        """So many replicas of these jobs fit, in whatever shares."""
        del jobs
        return max(self.total, 0)


class NodeCapacity:
    """Capacity on nodes.

    A replica that stands on a node is a fact: it stays and fits, even where the node has less than it asks
    for (its devices may be gone for a moment while a plugin restarts); such a node takes nothing else.

    Args:
        nodes: all nodes, in any order.
        demands: job id -> demand, of every job that is asked about.
    """

    def __init__(self, nodes: Iterable[Node], demands: Mapping[str, Demand]) -> None:
        self._nodes = sorted(nodes, key=lambda node: node.name)
        requests = {
            job: dict(demand.request) | {PODS: max(demand.request.get(PODS, 1), 1)}
            for job, demand in demands.items()
        }
        names = sorted({name for request in requests.values() for name, units in request.items() if units})
        self._free = [[node.free.get(name, 0) for name in names] for node in self._nodes]
        totals = [sum(max(free[i], 0) for free in self._free) for i in range(len(names))]
        index = {node.name: i for i, node in enumerate(self._nodes)}
        orders: dict[object, tuple[int, ...]] = {}
        self._loads: dict[str, _Load] = {}
        for job, demand in demands.items():
            needs = tuple((i, requests[job][name]) for i, name in enumerate(names) if requests[job].get(name))
            alike = (needs, demand.nodes)
            if alike not in orders:
                orders[alike] = self._order(needs, demand.nodes)
            standing = {rank: index[name] for rank, name in demand.placed.items() if name in index}
            share = max((units / max(totals[i], 1) for i, units in needs), default=0.0)
            home = _home(standing) if demand.one_node else None
            self._loads[job] = _Load(job, needs, orders[alike], standing, home, demand.one_node, share)

    def _order(self, needs: Needs, names: frozenset[str] | None) -> tuple[int, ...]:
        """The nodes that can hold a replica; first those that have least of what it has no use for.

        Otherwise replicas without accelerators would take the processors beside accelerators.
        """
        asked = {i for i, _ in needs}

        def useless(node: int) -> int:
            return sum(units > 0 for i, units in enumerate(self._free[node]) if i not in asked)

        able = [
            i
            for i, node in enumerate(self._nodes)
            if (names is None or node.name in names) and _slots(self._free[i], needs)
        ]
        return tuple(sorted(able, key=lambda i: (useless(i), i)))

    def fits(self, counts: Mapping[str, int]) -> bool:
        """Whether all `counts` (job id -> replicas) fit at once."""
        return self.pack(counts) is not None

    def most(self, job: str) -> int:
        """How many replicas of `job` fit where no other job runs."""
        load = self._loads[job]
        least = 0
        most = len(load.standing) + sum(_slots(self._free[node], load.needs) for node in load.order)
        while least < most:
            count = (least + most + 1) // 2
            least, most = (count, most) if self.fits({job: count}) else (least, count - 1)
        return least

    def number(self, jobs: Iterable[str]) -> int | None:
        """How many replicas of these jobs fit in whatever shares; none where no number says it all."""
        loads = [self._loads[job] for job in jobs]
        if not loads:
            return 0
        first = loads[0]
        if len(loads) == 1:
            return self.most(first.job)
        if any(load.one_node or (load.needs, load.order) != (first.needs, first.order) for load in loads):
            return None
        slots = {node: _slots(self._free[node], first.needs) for node in first.order}
        standing = Counter(node for load in loads for node in load.standing.values())
        if any(count > slots.get(node, 0) for node, count in standing.items()):
            return None
        return sum(slots.values())

    def share(self, job: str) -> float:
        """The share of all nodes that one replica of `job` takes of what it takes most of, from 0 to 1."""
        return self._loads[job].share

    def equivalence_class(self, job: str) -> object:
        """Equal for two jobs that stand nowhere if as many replicas fit of the one as of the other."""
        load = self._loads[job]
        return (load.job,) if load.standing else (load.needs, load.order, load.one_node)

    def pack(self, counts: Mapping[str, int]) -> Packing | None:
        """The packing of all `counts`, which depends on nothing else; none if none is found."""
        packing = Packing(self)
        loads = [self._loads[job] for job, count in counts.items() if count > 0]
        for load in loads:
            packing.keep(load, counts[load.job])
        sizes = {load.job: load.share * (counts[load.job] if load.one_node else 1) for load in loads}
        loads.sort(key=lambda load: (-sizes[load.job], len(load.order), load.job))
        return packing if all(packing.place(load, counts[load.job]) for load in loads) else None

    def packing(self) -> Packing:
        """A packing of nothing, to try counts on."""
        return Packing(self)


Needs = tuple[tuple[int, int], ...]
"""(index of a resource, units) of what a replica takes."""


@dataclass(frozen=True)
class _Load:
    """A demand in indices of nodes and resources.

    Args:
        job: the job id.
        needs: what a replica takes.
        order: the nodes that may get a new replica, in the order in which they are tried.
        standing: rank -> node, of the replicas that stand on a node that is there.
        home: the node that new replicas have to share; none: no such node yet, or no need for one.
        one_node: whether they have to share one.
        share: size of a replica, to pack the largest first.
    """

    job: str
    needs: Needs
    order: tuple[int, ...]
    standing: Mapping[int, int]
    home: int | None
    one_node: bool
    share: float


def _home(standing: Mapping[int, int]) -> int | None:
    """The node on which most replicas stand; of equals the one of the lowest rank."""
    nodes = [standing[rank] for rank in sorted(standing)]
    return Counter(nodes).most_common(1)[0][0] if nodes else None


def _slots(free: list[int], needs: Needs) -> int:
    """How many replicas fit into what is free."""
    return max(min([free[i] // units for i, units in needs], default=0), 0)


class Packing:
    """Which replica goes to which node, changed job by job.

    Args:
        room: the nodes and demands.
    """

    def __init__(self, room: NodeCapacity) -> None:
        self._room = room
        self._left = [list(free) for free in room._free]
        self._new = [0] * len(self._left)
        """Per node, how many replicas it has that do not stand there yet."""
        self._places: dict[str, dict[int, int]] = {}
        self._repacking = _REPACKING

    @property
    def counts(self) -> dict[str, int]:
        """Job id -> replicas, of the jobs that have some."""
        return {job: len(places) for job, places in self._places.items() if places}

    @property
    def places(self) -> dict[str, dict[int, str]]:
        """Job id -> rank -> name of the node."""
        nodes = self._room._nodes
        return {
            job: {rank: nodes[node].name for rank, node in sorted(places.items())}
            for job, places in self._places.items()
            if places
        }

    def give(self, job: str, count: int, *, thorough: bool = False) -> bool:
        """Give a job `count` replicas if places are found for them; otherwise leave all as it is.

        Args:
            job: the job id.
            count: how many replicas it has then.
            thorough: arrange all replicas anew if need be, however long that takes in all.
        """
        load = self._room._loads[job]
        before = dict(self._places.get(job, {}))
        if count <= len(before):
            self._take_back(load, [rank for rank in before if rank >= count])
            return True
        if load.one_node and not load.standing:
            # It stands nowhere yet, so all of it may go elsewhere.
            self._take_back(load, list(before))
        if self.keep(load, count) and self.place(load, count):
            return True
        self._take_back(load, list(self._places.get(job, {})))
        for rank, node in before.items():
            self._put(load, rank, node)
        work = (len(self._places) + 1) * len(self._left)
        if not thorough and work > self._repacking:
            return False
        self._repacking -= work
        anew = self._room.pack(self.counts | {job: count})
        if anew is None:
            return False
        self._left, self._new, self._places = anew._left, anew._new, anew._places
        return True

    def keep(self, load: _Load, count: int) -> bool:
        """Place the replicas below rank `count` that stand on a node; whether none there is in their way."""
        places = self._places.setdefault(load.job, {})
        free = True
        for rank, node in load.standing.items():
            if rank < count and rank not in places:
                self._put(load, rank, node)
                left = self._left[node]
                free = free and not (self._new[node] and any(left[i] < 0 for i, _ in load.needs))
        return free

    def place(self, load: _Load, count: int) -> bool:
        """Place the other replicas below rank `count`; whether all have found a place."""
        places = self._places.setdefault(load.job, {})
        ranks = [rank for rank in range(count) if rank not in places]
        if not ranks:
            return True
        order: Iterable[int] = load.order
        if load.home is not None:
            order = [load.home] if load.home in load.order else []
        for node in order:
            slots = _slots(self._left[node], load.needs)
            if load.one_node and slots < len(ranks):
                continue
            for rank in ranks[:slots]:
                self._put(load, rank, node)
            ranks = ranks[slots:]
            if not ranks:
                return True
        return False

    def _put(self, load: _Load, rank: int, node: int) -> None:
        self._places[load.job][rank] = node
        self._new[node] += load.standing.get(rank) != node
        left = self._left[node]
        for i, units in load.needs:
            left[i] -= units

    def _take_back(self, load: _Load, ranks: Iterable[int]) -> None:
        for rank in ranks:
            node = self._places[load.job].pop(rank)
            self._new[node] -= load.standing.get(rank) != node
            left = self._left[node]
            for i, units in load.needs:
                left[i] += units


Capacity = ReplicaCapacity | NodeCapacity
"""What replicas have to fit into: `fits(counts)`, `most(job)`."""
