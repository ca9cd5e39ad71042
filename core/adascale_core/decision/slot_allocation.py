"""Replica counts on nodes, for jobs whose replicas all request the same.

Counts are first chosen as for interchangeable replicas, with the utility that each count has on the nodes
where it is likely to run. Then they are placed: jobs shrink, the others grow to the best count, up to the
chosen one, that the free slots allow, and what remains free goes to jobs that it helps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adascale_core.decision.exact_allocation import admitted_utilities, maximize
from adascale_core.decision.job_utility import JobUtility, UtilityTables
from adascale_core.placement.node_slots import NodeSlots, SlotCapacity, free_slots


def allocate_slots(
    jobs: Sequence[JobUtility], tables: Sequence[UtilityTables], capacity: SlotCapacity
) -> list[int]:
    """Return one replica count per job, of a high total utility on the nodes."""
    free = free_slots(capacity.slots, (capacity.placed.get(job.job.id, ()) for job in jobs))
    options = [_Options.of(job.job.id, *each, capacity, free) for job, each in zip(jobs, tables, strict=True)]
    planned = maximize(
        admitted_utilities(jobs, capacity.total, [each.planned for each in options]), capacity.total
    )
    return _Placing(options, capacity).run(planned)


@dataclass(frozen=True)
class _Options:
    """The counts of a job."""

    nodes: Sequence[int]
    planned: Mapping[int, int]  # count -> utility where it is likely to run
    one_node: Mapping[int, int]
    several_nodes: Mapping[int, int]

    @classmethod
    def of(
        cls,
        job: str,
        one_node: Mapping[int, int],
        several_nodes: Mapping[int, int],
        capacity: SlotCapacity,
        free: Sequence[int],
    ) -> _Options:
        nodes = tuple(capacity.placed.get(job, ()))
        if not one_node:
            return cls(nodes, {0: 0}, {}, {})
        most = _most_on_one_node(nodes, capacity.node_size, free)
        planned = {count: one_node[count] if count <= most else several_nodes[count] for count in one_node}
        return cls(nodes, planned, one_node, several_nodes)

    def highest_utility(self, count: int) -> int:
        """Return the utility of a count on the nodes where it is highest."""
        return max(self.one_node[count], self.several_nodes[count])

    def utility(self, count: int, nodes: Sequence[int]) -> int:
        return (self.one_node if len(set(nodes)) < 2 else self.several_nodes)[count]


def _most_on_one_node(nodes: Sequence[int], node_size: int, free: Sequence[int]) -> int:
    """Return how many replicas a job with replicas on `nodes` can have on a single node."""
    if not nodes:
        return node_size
    first = nodes[0]
    shared = next((rank for rank, node in enumerate(nodes) if node != first), None)
    return len(nodes) + max(free[first], 0) if shared is None else shared


class _Placing:
    """Places counts on nodes, job by job."""

    def __init__(self, options: Sequence[_Options], capacity: SlotCapacity) -> None:
        self._options = options
        self._capacity = capacity
        self._nodes = [list(each.nodes) for each in options]
        self._slots = NodeSlots(())

    def run(self, planned: Sequence[int]) -> list[int]:
        """Return the counts."""
        for i, count in enumerate(planned):
            del self._nodes[i][count:]
        self._slots = NodeSlots(free_slots(self._capacity.slots, self._nodes))
        missing = [count - len(nodes) for count, nodes in zip(planned, self._nodes, strict=True)]
        # In the order in which new replicas are placed.
        for i in sorted(range(len(planned)), key=lambda i: -missing[i]):
            if missing[i]:
                self._grow(i, planned[i])
        self._use_free_slots(planned)
        return [len(nodes) for nodes in self._nodes]

    def _grow(self, i: int, most: int) -> None:
        """Place the best count from the present one to `most` that fits."""
        each, own = self._options[i], self._nodes[i]
        wanted = max(each.planned.values())
        if len(own) < most in each.planned and each.highest_utility(most) >= wanted:
            new = self._slots.place(own, most - len(own))
            if new is not None:
                if each.utility(most, [*own, *new]) >= wanted:
                    own.extend(new)
                    return
                self._slots.give(new)
        best: tuple[int, int, list[int]] | None = None
        if len(own) in each.one_node:
            best = each.utility(len(own), own), -len(own), []
        for count in each.one_node:
            if not len(own) < count <= most:
                continue
            if best is not None and each.highest_utility(count) <= best[0]:
                continue
            new = self._slots.place(own, count - len(own))
            if new is None:
                continue
            self._slots.give(new)
            found = each.utility(count, [*own, *new]), -count, new
            if best is None or found[:2] > best[:2]:
                best = found
        if best is not None:
            self._slots.take(best[2])
            own.extend(best[2])

    def _use_free_slots(self, planned: Sequence[int]) -> None:
        for i in sorted(range(len(planned)), key=lambda i: (len(self._nodes[i]) == planned[i], i)):
            if self._slots.total == 0:
                return
            if self._nodes[i]:
                most = max(self._options[i].one_node, default=0)
                self._grow(i, min(most, len(self._nodes[i]) + self._slots.total))
