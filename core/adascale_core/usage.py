"""The replicas that jobs have used over time, in intervals of equal length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from adascale_core.job_id import namespace_of
from adascale_core.messages import Message


class UsageGroup(StrEnum):
    """What replicas are summed by."""

    JOB = "job"
    NAMESPACE = "namespace"


@dataclass(frozen=True)
class UsedReplicas:
    """The replicas of a job from `start` to `end`, in seconds since 1970."""

    job: str
    replicas: int
    start: float
    end: float


@dataclass(frozen=True)
class GroupUsage(Message):
    """The mean number of replicas in each interval of a job, by its id, or of a namespace, by its name."""

    name: str
    replicas: Sequence[float]


@dataclass(frozen=True)
class UsageView(Message):
    """The replicas of jobs or namespaces over time.

    Args:
        start: the beginning of the first interval, in seconds since 1970.
        interval: the length of an interval, in seconds.
        largest: the jobs or namespaces that have used most, by their use.
        others: the mean number of replicas of all others together, in each interval.
        other_count: the number of these others.
    """

    start: float
    interval: float
    largest: Sequence[GroupUsage]
    others: Sequence[float]
    other_count: int


def usage(
    used: Iterable[UsedReplicas],
    start: float,
    end: float,
    points: int,
    largest: int,
    by: UsageGroup = UsageGroup.JOB,
) -> UsageView:
    """Return the mean numbers of replicas in `points` intervals from `start` to `end`.

    Args:
        used: what was used; parts outside of the time are ignored.
        start, end: the time, in seconds since 1970.
        points: the number of intervals.
        largest: the number of jobs or namespaces that are listed, those that have used most.
        by: whether replicas are summed by job or by namespace.
    """
    interval = (end - start) / points
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0] * points)
    for part in used:
        first, last = max(part.start, start), min(part.end, end)
        if last <= first:
            continue
        means = groups[part.job if by is UsageGroup.JOB else namespace_of(part.job)]
        begin, stop = (first - start) / interval, (last - start) / interval
        for index in range(int(begin), min(int(stop) + 1, points)):
            means[index] += part.replicas * max(min(stop, index + 1) - max(begin, index), 0.0)
    ordered = sorted(groups, key=lambda name: (-sum(groups[name]), name))
    others = [sum(values) for values in zip(*(groups[name] for name in ordered[largest:]), strict=True)]
    return UsageView(
        start,
        interval,
        [GroupUsage(name, [round(mean, 3) for mean in groups[name]]) for name in ordered[:largest]],
        [round(mean, 3) for mean in others] or [0.0] * points,
        max(len(ordered) - largest, 0),
    )
