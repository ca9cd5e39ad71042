"""The replica counts of the highest total utility, where capacity is a number of interchangeable replicas.

Dynamic programming finds the optimum. For many jobs and replicas it is too slow; a greedy choice by utility
per replica is then near the optimum, because it is at most the last improvement of one job away from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from adascale_core.decision.job_utility import JobUtility

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

    It is the highest total utility up to `MAX_EXACT_WORK`.
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
