"""The replicas that jobs have used over time, in intervals of equal length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adascale_core.messages import Message


@dataclass(frozen=True)
class UsedReplicas:
    """The replicas of a job from `start` to `end`, in seconds since 1970."""

    job: str
    replicas: int
    start: float
    end: float


@dataclass(frozen=True)
class JobUsage(Message):
    """The mean number of replicas of a job in each interval."""

    job: str
    replicas: Sequence[float]


@dataclass(frozen=True)
class UsageView(Message):
    """The replicas of jobs over time.

    Args:
        start: the beginning of the first interval, in seconds since 1970.
        interval: the length of an interval, in seconds.
        jobs: the jobs that have used most, by their use.
        others: the mean number of replicas of all other jobs together, in each interval.
        other_jobs: the number of these jobs.
    """

    start: float
    interval: float
    jobs: Sequence[JobUsage]
    others: Sequence[float]
    other_jobs: int


def usage(used: Iterable[UsedReplicas], start: float, end: float, points: int, largest: int) -> UsageView:
    """Return the mean numbers of replicas in `points` intervals from `start` to `end`.

    Args:
        used: what was used; parts outside of the time are ignored.
        start, end: the time, in seconds since 1970.
        points: the number of intervals.
        largest: the number of jobs that are listed, those that have used most.
    """
    interval = (end - start) / points
    jobs: dict[str, list[float]] = defaultdict(lambda: [0.0] * points)
    for part in used:
        first, last = max(part.start, start), min(part.end, end)
        if last <= first:
            continue
        means = jobs[part.job]
        begin, stop = (first - start) / interval, (last - start) / interval
        for index in range(int(begin), min(int(stop) + 1, points)):
            means[index] += part.replicas * max(min(stop, index + 1) - max(begin, index), 0.0)
    ordered = sorted(jobs, key=lambda job: (-sum(jobs[job]), job))
    others = [sum(values) for values in zip(*(jobs[job] for job in ordered[largest:]), strict=True)]
    return UsageView(
        start,
        interval,
        [JobUsage(job, [round(mean, 3) for mean in jobs[job]]) for job in ordered[:largest]],
        [round(mean, 3) for mean in others] or [0.0] * points,
        max(len(ordered) - largest, 0),
    )
