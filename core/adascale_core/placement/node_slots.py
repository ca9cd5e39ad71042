"""Free slots on nodes, for replicas that all request the same, and where new replicas go.

A new replica goes to a node of its own job that has room; else to the fullest node that holds all new
replicas of the job; else to the emptiest node. On a cluster, affinity to the pods of the same job gives about
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

MIN_UNIFORM_NODES = 4


@dataclass(frozen=True)
class SlotCapacity:
    """Nodes with slots for equal replicas."""

    slots: Sequence[int]  # for each node, how many replicas it holds
    # job id -> the node of each replica, by rank, of the replicas that are placed
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
    """The free slots of some nodes."""

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
