"""The replicas that jobs have used over time, in intervals of equal length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

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


_Part = tuple[str, int, float, float]
"""The name of a group, its replicas, and from where to where it used them, in intervals."""


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
    parts: list[_Part] = []
    totals: dict[str, float] = defaultdict(float)
    for each in used:
        first, last = max(each.start, start), min(each.end, end)
        if last <= first:
            continue
        name = each.job if by is UsageGroup.JOB else namespace_of(each.job)
        parts.append((name, each.replicas, (first - start) / interval, (last - start) / interval))
        totals[name] += each.replicas * (last - first)
    ordered = sorted(totals, key=lambda name: (-totals[name], name))
    # Only for what is listed: all jobs have many intervals together.
    others = _Means(points)
    listed = {name: _Means(points) for name in ordered[:largest]}
    for name, replicas, begin, stop in parts:
        listed.get(name, others).add(replicas, begin, stop)
    return UsageView(
        start,
        interval,
        [GroupUsage(name, means.values()) for name, means in listed.items()],
        others.values(),
        len(ordered) - len(listed),
    )


class _Means:
    """Mean numbers of replicas in intervals of length 1, as the differences between successive ones.

    A part takes the same time, however many intervals it has.
    """

    def __init__(self, points: int) -> None:
        # The end of a part may be the end of the last interval, and changes the one after too.
        self._changes = [0.0] * (points + 2)

    def add(self, replicas: int, begin: float, stop: float) -> None:
        """Add replicas from `begin` to `stop`."""
        for place, change in ((begin, replicas), (stop, -replicas)):
            index = int(place)
            after = (place - index) * change
            self._changes[index] += change - after
            self._changes[index + 1] += after

    def values(self) -> list[float]:
        """Return the means."""
        # The sum with 0.0 makes 0.0 of -0.0, which small errors of the differences leave.
        return [round(mean, 3) + 0.0 for mean in accumulate(self._changes[:-2])]
