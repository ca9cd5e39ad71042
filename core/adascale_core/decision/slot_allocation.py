"""Replica counts of the highest total utility, for jobs whose replicas all request the same.

If capacity is a number of replicas, dynamic programming finds the optimum (`allocate_replicas`). For many
jobs and replicas it is too slow; a greedy choice by utility per replica is then near the optimum, because it
is at most the last improvement of one job away from it.

On nodes (`allocate_slots`), counts are first chosen in the same way, with the utility that each count has on
the nodes where it is likely to run. Then they are placed: jobs shrink, the others grow to the best count, up
to the chosen one, that the free slots allow, and what remains free goes to jobs that it helps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from adascale_core.decision.job_utility import JobUtility, UtilityTables
from adascale_core.placement.capacity import NodeSlots, SlotCapacity, free_slots

IMPOSSIBLE = -(10**18)
"""Below each sum of utilities."""
MAX_EXACT_WORK = 10_000_000
"""Above this product of jobs, counts and replicas, the choice is greedy."""


def allocate_replicas(
    jobs: Sequence[JobUtility], utilities: Sequence[Mapping[int, int]], total: int
) -> list[int]:
    """Return one replica count per job, with the highest total utility that `total` replicas allow."""
    return maximize(admitted_utilities(jobs, total, utilities), total)


def admitted_utilities(
    jobs: Sequence[JobUtility], total: int, utilities: Sequence[Mapping[int, int]]
) -> list[Mapping[int, int]]:
    """Return count -> utility for each job; only the count 0 for a job that is not admitted.

    A job is admitted if its smallest count fits beside the smallest counts of the admitted jobs before it.
    """
    admitted: list[Mapping[int, int]] = []
    free = total
    for job, utility in zip(jobs, utilities, strict=True):
        smallest = job.counts[0] if job.counts else None
        if smallest is None or smallest > free:
            admitted.append({0: 0})
            continue
        free -= smallest
        admitted.append(utility)
    return admitted


def maximize(utilities: Sequence[Mapping[int, int]], total: int) -> list[int]:
    """Return one count per job, with a high total utility and a sum of at most `total`.

    It is the highest total utility up to `MAX_EXACT_WORK`. The sum of the smallest counts must fit.
    """
    if sum(map(len, utilities)) * total <= MAX_EXACT_WORK:
        return maximize_exactly(utilities, total)
    return maximize_greedily(utilities, total)


def maximize_greedily(utilities: Sequence[Mapping[int, int]], total: int) -> list[int]:
    """Return one count per job, with a high total utility and a sum of at most `total`.

    Each job starts at its smallest count. The steps of each job's concave envelope are made in the order of
    utility per replica, as far as they fit; what remains free goes to the jobs in their order.
    """
    chosen = [min(counts) for counts in utilities]
    free = total - sum(chosen)
    steps = [
        (-slope, i, before, after)
        for i, counts in enumerate(utilities)
        for slope, before, after in envelope(counts)
    ]
    for _, i, before, after in sorted(steps):
        if chosen[i] == before and after - before <= free:
            chosen[i] = after
            free -= after - before
    for i, counts in enumerate(utilities):
        if not free:
            break
        most = chosen[i] + free
        best = max((count for count in counts if count <= most), key=lambda count: (counts[count], -count))
        if counts[best] > counts[chosen[i]]:
            free += chosen[i] - best
            chosen[i] = best
    return chosen


def envelope(counts: Mapping[int, int]) -> list[tuple[float, int, int]]:
    """Return the rising steps of the concave envelope: (utility per replica, count before, count after)."""
    hull: list[tuple[int, int]] = []
    for point in sorted(counts.items()):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    steps = [(_slope(a, b), a[0], b[0]) for a, b in pairwise(hull)]
    return [step for step in steps if step[0] > 0]


def _slope(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


def maximize_exactly(utilities: Sequence[Mapping[int, int]], total: int) -> list[int]:
    """Return one count per job, with the highest total utility and a sum of at most `total`.

    Of several solutions with the same utility, the solution with more replicas for earlier jobs is returned.
    """
    best = best_utilities(utilities, total)
    return counts_of_best(utilities, best, len(best[0]) - 1)


def best_utilities(utilities: Sequence[Mapping[int, int]], total: int) -> list[npt.NDArray[np.int64]]:
    """Return `best`: `best[i][free]` is the highest total utility of the last i jobs with `free` replicas."""
    total = max(0, min(total, sum(max(counts) for counts in utilities)))
    best = [np.zeros(total + 1, dtype=np.int64)]
    for counts in reversed(utilities):
        rest = best[-1]
        table = np.full((len(counts), total + 1), IMPOSSIBLE, dtype=np.int64)
        for row, (count, utility) in zip(table, counts.items(), strict=True):
            if count <= total:
                row[count:] = rest[: total + 1 - count] + utility
        best.append(table.max(axis=0))
    return best


def counts_of_best(
    utilities: Sequence[Mapping[int, int]], best: Sequence[npt.NDArray[np.int64]], free: int
) -> list[int]:
    """Return the counts that have the utility `best[-1][free]`."""
    chosen = []
    for counts, rest in zip(utilities, reversed(best[:-1]), strict=True):
        fitting = [count for count in counts if count <= free]
        chosen.append(max(fitting, key=lambda count: (rest[free - count] + counts[count], count)))
        free -= chosen[-1]
    return chosen


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

    nodes: Sequence[int]  # its present nodes, by rank
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
