"""What the metrics service answers about the time of a job's replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from adascale_core.messages import Message
from adascale_core.messages.replica_seconds import Cause, ReplicaSeconds


@dataclass(frozen=True)
class GoodputPoint(Message):
    """The seconds of a job's replicas at a time.

    Args:
        time: in seconds since 1970, by the clock of the service.
        replica_seconds: the seconds of all its replicas until then, by `Cause`.
    """

    time: float
    replica_seconds: ReplicaSeconds


@dataclass(frozen=True)
class GoodputView(Message):
    """Where the time of a job's replicas went.

    In JSON `useful_ratio` stands beside the members.

    Args:
        job: the full job id.
        replica_seconds: the seconds of all its replicas, by `Cause`; together the time of their pods.
        history: earlier values, spread over the time of the job.
    """

    job: str
    replica_seconds: ReplicaSeconds
    history: Sequence[GoodputPoint] = ()

    @property
    def total(self) -> float:
        """The seconds of all causes."""
        return sum(self.replica_seconds.values())

    @property
    def useful_ratio(self) -> float | None:
        """The share of the time that is useful; None if there is none."""
        return self.replica_seconds.get(Cause.USEFUL, 0.0) / self.total if self.total else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**super().to_json(), "useful_ratio": self.useful_ratio}


@dataclass(frozen=True)
class GoodputList(Message):
    """Where the time of the replicas of all jobs went.

    Args:
        jobs: a page of jobs, by id, without their history.
        next: the `after` of the next page; None on the last page.
        replica_seconds: the seconds of the replicas of all jobs by `Cause`, also of those that were deleted.
    """

    jobs: Sequence[GoodputView]
    next: str | None
    replica_seconds: ReplicaSeconds

    @classmethod
    def of(cls, jobs: Sequence[GoodputView]) -> Self:
        """The list of all jobs."""
        seconds = {str(cause): sum(job.replica_seconds.get(cause, 0.0) for job in jobs) for cause in Cause}
        return cls(jobs, None, seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**super().to_json(), "jobs": [each.to_json() for each in self.jobs]}
