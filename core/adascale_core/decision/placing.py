"""Replica counts of jobs on the nodes of a cluster.

Counts are first chosen as if all nodes were one, with the utility that each count has on the nodes where it
is likely to run (`solver`). Then they are placed: jobs shrink, the others grow to the best count, up to the
chosen one, that the nodes allow, and what remains free goes to jobs that it helps.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from adascale_core.decision.job_utility import JobUtility, UtilityTables
from adascale_core.decision.solver import IMPOSSIBLE, Floats, Options, solve
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Packing

MAX_ROUNDS = 8
"""How often the counts of all jobs are improved."""


def choose_counts(
    tables: Sequence[Mapping[int, int]],
    totals: int | Floats,
    requests: Floats | None = None,
    present: Sequence[int] | None = None,
) -> list[int]:
    """Return a count of each job, with the highest total utility that the resources allow.

    `tables` have count -> utility, ascending; the first counts fit. A replica takes what `requests` has for
    its job, or one unit of the only resource. `present` counts are changed only for a higher utility.
    """
    if not tables:
        return []
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    job = np.repeat(np.arange(len(tables)), lengths)
    counts = np.fromiter(chain.from_iterable(tables), np.int64)
    usage = counts[:, None] * (np.ones((len(tables), 1)) if requests is None else requests)[job]
    least = np.cumsum(lengths) - lengths
    utility = np.fromiter(chain.from_iterable(table.values() for table in tables), np.int64)
    # Replicas that are placed may take more than there is.
    options = Options(job, utility, usage, least, np.maximum(totals, usage[least].sum(axis=0)))
    kept = None if present is None else np.flatnonzero(counts == np.array(present)[job])
    chosen: list[int] = counts[solve(options, kept)].tolist()
    return chosen


def admitted(jobs: Sequence[JobUtility], capacity: int | NodeCapacity) -> list[int]:
    """Return the indices of the jobs whose smallest count fits beside those of the admitted jobs before."""
    runnable = [i for i, job in enumerate(jobs) if job.counts]
    smallest = {jobs[i].job.id: jobs[i].counts[0] for i in runnable}
    if isinstance(capacity, int):
        found = []
        for i in runnable:
            if jobs[i].counts[0] <= capacity:
                capacity -= jobs[i].counts[0]
                found.append(i)
        return found
    if capacity.fits(smallest):
        return runnable
    fits = capacity.admission()
    found = [i for i in runnable if fits(jobs[i].job.id, jobs[i].counts[0])]
    fitting = {jobs[i].job.id: jobs[i].counts[0] for i in found}
    if capacity.fits(fitting):
        return found
    # They fit only when they are packed in this order; `fits`, on which the next decision relies, packs in
    # another order.
    fitting = {}
    for i in found:
        counts = fitting | {jobs[i].job.id: jobs[i].counts[0]}
        if capacity.fits(counts):
            fitting = counts
    return [i for i in found if jobs[i].job.id in fitting]


def allocate_on_nodes(
    jobs: Sequence[JobUtility], tables: Sequence[UtilityTables], capacity: NodeCapacity
) -> list[int]:
    """Return the replica count of each job, in the order of admission, of a high total utility."""
    names = [job.job.id for job in jobs if job.counts]
    total = capacity.total_for(names)
    running = admitted(jobs, capacity if total is None else total)
    if not running:
        return [0] * len(jobs)
    placing = _Placing([jobs[i] for i in running], [tables[i] for i in running], capacity)
    if total is None:
        found = placing.search()
    elif capacity.slots_for(names) is None:
        found = choose_counts([tables[i][0] for i in running], total)
    else:
        found = placing.place(total)
    counts = dict(zip(running, found, strict=True))
    return [counts.get(i, 0) for i in range(len(jobs))]


class _Placing:
    """Chooses counts and places them on nodes, job by job."""

    def __init__(
        self, jobs: Sequence[JobUtility], tables: Sequence[UtilityTables], capacity: NodeCapacity
    ) -> None:
        self._jobs, self._tables, self._capacity = jobs, tables, capacity
        self._names = [job.job.id for job in jobs]
        self._changes: list[tuple[int, int]] = []
        """The indices of the jobs that were changed, and their counts."""

    def place(self, total: int) -> list[int]:
        """Return the counts of equal replicas."""
        free = self._capacity.packing(dict.fromkeys(self._names, sys.maxsize))
        planned = []
        for name, (one_node, several_nodes) in zip(self._names, self._tables, strict=True):
            most = free.most_on_one_node(name)
            planned.append(
                {count: (one_node if count <= most else several_nodes)[count] for count in one_node}
            )
        chosen = choose_counts(planned, total)
        packing = self._capacity.packing(dict(zip(self._names, chosen, strict=True)))
        self._improve(packing, chosen)
        return [packing.count(name) for name in self._names]

    def search(self) -> list[int]:
        """Return the counts of unlike replicas, which are not known to fit before they are placed."""
        # Where their replicas will be is less certain, so all are taken to share a node.
        tables = [one_node for one_node, _ in self._tables]
        self._tables = [(one_node, one_node) for one_node in tables]
        smallest = [job.counts[0] for job in self._jobs]
        present = [job.present_count or job.counts[0] for job in self._jobs]
        requests, totals = self._capacity.requests(self._names)
        planned = choose_counts(tables, totals, requests, present)
        found: list[list[int]] = []
        starts = [present] if planned == present else [present, planned]
        for counts in (*starts, smallest):
            if counts is smallest and found:
                break
            packing = self._capacity.pack(dict(zip(self._names, counts, strict=True)))
            if packing is not None:
                self._changes = []
                self._improve(packing, planned)
                found.append(self._last_fitting(counts))
        return max(
            found,
            key=lambda counts: sum(table[count] for table, count in zip(tables, counts, strict=True)),
        )

    def _last_fitting(self, start: Sequence[int]) -> list[int]:
        """Return the last counts that fit when they are packed from scratch.

        Replicas that were placed one after the other may not fit when all are placed at the same time, and
        the next decision would then reject these counts.
        """

        def after(changes: int) -> list[int]:
            counts = dict(enumerate(start)) | dict(self._changes[:changes])
            return [counts[i] for i in range(len(start))]

        def fits(changes: int) -> bool:
            return self._capacity.fits(dict(zip(self._names, after(changes), strict=True)))

        number = len(self._changes)
        if number and not fits(number):
            number = bisect_left(range(1, number), True, key=lambda i: not fits(i))
        return after(number)

    def _improve(self, packing: Packing, planned: Sequence[int]) -> None:
        """Bring the jobs to the planned counts as far as they fit, then to any that are worth more."""
        counts = [packing.count(name) for name in self._names]
        # In the order in which new replicas are placed.
        for i in sorted(range(len(planned)), key=lambda i: counts[i] - planned[i]):
            if counts[i] < planned[i]:
                self._change(packing, i, planned[i])
        for _ in range(MAX_ROUNDS):
            counts = [packing.count(name) for name in self._names]
            order = sorted(range(len(planned)), key=lambda i: (counts[i] == planned[i], i))
            if not [i for i in order if self._change(packing, i, counts[i] + packing.room(self._names[i]))]:
                return

    def _change(self, packing: Packing, i: int, most: int) -> bool:
        """Give a job the best count up to `most` that fits, if it is worth more than the present one."""
        name, (one_node, several_nodes) = self._names[i], self._tables[i]
        before = packing.nodes(name)

        def worth(nodes: Mapping[int, int]) -> int:
            table = one_node if len(set(nodes.values())) < 2 else several_nodes
            return table.get(len(nodes), IMPOSSIBLE)

        highest = {count: max(one_node[count], several_nodes[count]) for count in one_node if count <= most}
        best, value = before, worth(before)
        better = sorted((-utility, count) for count, utility in highest.items() if utility > value)
        for utility, count in better:
            if -utility <= value:
                break
            if packing.resize(name, count):
                found = packing.nodes(name)
                if worth(found) > value:
                    best, value = found, worth(found)
                if value == -utility:
                    break
                packing.restore(name, before)
        if best is before:
            return False
        packing.restore(name, best)
        self._changes.append((i, len(best)))
        return True
