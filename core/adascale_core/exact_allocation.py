"""The replica counts of the highest total utility, by dynamic programming.

It is exact where replicas are interchangeable, so that capacity is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from adascale_core.job_utility import JobUtility

_IMPOSSIBLE = -(10**18)


def allocate_replicas(jobs: Sequence[JobUtility], total: int, now: float) -> list[int]:
    """Return one replica count per job, with the highest total utility that `total` replicas allow.

    Args:
        jobs: the jobs, in the order of their arrival.
        total: how many replicas fit.
        now: the time, in seconds.
    """
    utilities = [job.utilities(now)[0] if job.counts else {0: 0} for job in jobs]
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
    """Return one count per job, with the highest total utility and a sum of at most `total`.

    `best[i][free]` is the highest total utility of the last i jobs with `free` replicas. Of several solutions
    with the same utility, the solution with more replicas for earlier jobs is returned.

    Args:
        utilities: count -> utility for each job.
        total: at least the sum of the smallest counts.
    """
    total = max(0, min(total, sum(max(counts) for counts in utilities)))
    best = [np.zeros(total + 1, dtype=np.int64)]
    for counts in reversed(utilities):
        rest = best[-1]
        table = np.full((len(counts), total + 1), _IMPOSSIBLE, dtype=np.int64)
        for row, (count, utility) in zip(table, counts.items(), strict=True):
            if count <= total:
                row[count:] = rest[: total + 1 - count] + utility
        best.append(table.max(axis=0))
    chosen = []
    free = total
    for counts, rest in zip(utilities, reversed(best[:-1]), strict=True):
        fitting = [count for count in counts if count <= free]
        chosen.append(max(fitting, key=lambda count: (rest[free - count] + counts[count], count)))
        free -= chosen[-1]
    return chosen
