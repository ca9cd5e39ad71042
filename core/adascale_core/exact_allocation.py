"""The replica counts of the highest total utility, by dynamic programming.

It is exact where replicas are interchangeable, so that capacity is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adascale_core.job_utility import JobUtility

_IMPOSSIBLE = -(10**30)


def allocate_replicas(jobs: Sequence[JobUtility], total: int, now: float) -> list[int]:
    """Return one replica count per job, with the highest total utility that `total` replicas allow.

    Args:
        jobs: the jobs, in the order of their arrival.
        total: how many replicas fit.
        now: the time, in seconds.
    """
    return _maximize(_admitted_utilities(jobs, total, now), total)


def _admitted_utilities(jobs: Sequence[JobUtility], total: int, now: float) -> list[dict[int, int]]:
    """Return count -> utility for each job; only the count 0 for a job that is not admitted.

    A job is admitted if its smallest count fits beside the smallest counts of the admitted jobs before it.
    """
    utilities = []
    free = total
    for job in jobs:
        smallest = job.counts[0] if job.counts else None
        if smallest is None or smallest > free:
            utilities.append({0: 0})
            continue
        free -= smallest
        utilities.append(job.utilities(now))
    return utilities


def _maximize(utilities: Sequence[Mapping[int, int]], total: int) -> list[int]:
    """Return one count per job, with the highest total utility and a sum of at most `total`.

    `best[i][free]` is the highest total utility of the last i jobs with `free` replicas. Of several solutions
    with the same utility, the solution with more replicas for earlier jobs is returned.

    Args:
        utilities: count -> utility for each job.
        total: at least the sum of the smallest counts.
    """
    total = max(0, min(total, sum(max(counts) for counts in utilities)))
    best = [[0] * (total + 1)]
    for counts in reversed(utilities):
        rest = best[-1]
        best.append(
            [
                max(
                    (rest[free - count] + utility for count, utility in counts.items() if count <= free),
                    default=_IMPOSSIBLE,
                )
                for free in range(total + 1)
            ]
        )
    chosen = []
    free = total
    for counts, rest in zip(utilities, reversed(best[:-1]), strict=True):
        fitting = [count for count in counts if count <= free]
        chosen.append(max(fitting, key=lambda count: (rest[free - count] + counts[count], count)))
        free -= chosen[-1]
    return chosen
