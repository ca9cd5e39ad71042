"""What the metrics service answers about the decision on a job's replica count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from adascale_core.messages import Message

OTHER_JOBS = "other jobs"
"""In place of job ids. It is not a valid job id."""


@dataclass(frozen=True)
class GivenReplicas(Message):
    """Replicas that a job would have to give up.

    Args:
        job: the job id; `OTHER_JOBS` for all other jobs together.
        replicas: how many.
    """

    job: str
    replicas: int


class Verdict(StrEnum):
    """Why a replica count was chosen or not."""

    CHOSEN = "chosen"
    NOT_MEASURED = "not_measured"
    """The job grows step by step, to counts near those that were measured."""
    NO_CAPACITY = "no_capacity"
    """It does not fit beside the smallest counts of the other jobs."""
    NO_CHANGE = "no_change"
    """The job does not change at present."""
    NOT_WORTH = "not_worth"
    """It is not faster, or not by enough for its restart and its replicas."""
    OTHER_JOBS = "other_jobs"
    """Other jobs would lose more than this job would gain."""
    NODES = "nodes"
    """The free places on nodes do not allow it, or make it slower."""


@dataclass(frozen=True)
class CountView(Message):
    """What a replica count would give.

    Args:
        replicas: the count.
        goodput: predicted steps at `batch_size` per second; None if not predicted.
        seconds_left: predicted seconds to the end of the job, the restart included; None if not known.
        given: the replicas that other jobs would have to give up for it, the cheapest that were found.
        verdict: why it was chosen or not.
        reason: the same for people.
        gain, gain_low, gain_high: the predicted gain, and those at one standard error of the estimate; None
            if not predicted.
    """

    replicas: int
    goodput: float | None
    seconds_left: float | None
    given: Sequence[GivenReplicas]
    verdict: Verdict
    reason: str
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None


class LimitKind(StrEnum):
    """What limits a replica count."""

    BOUNDS = "bounds"
    SCHEDULING = "scheduling"
    CAPACITY = "capacity"
    NODES = "nodes"
    TYPES = "types"
    """What each type of accelerator is worth to the job."""
    MEASUREMENTS = "measurements"
    CHANGE = "change"
    PRIORITY = "priority"
    DEADLINE = "deadline"
    """Which count meets the deadline of the job, if one does."""
    EFFICIENCY = "efficiency"
    """On which counts a sample is worth too little for a job whose length is in samples."""
    OTHER = "other"
    """Something that this version does not know. Its reason says what it is."""


@dataclass(frozen=True)
class LimitView(Message):
    """Something that limits a replica count.

    Args:
        kind: what it is.
        reason: the limit, for people.
    """

    kind: LimitKind
    reason: str

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The view from a JSON object's members. A kind of a later version is `LimitKind.OTHER`."""
        name = members["kind"]
        kind = LimitKind(name) if name in set(LimitKind) else LimitKind.OTHER
        return super().from_json({**members, "kind": kind})


@dataclass(frozen=True)
class DecisionView(Message):
    """A decision about a job, explained.

    Args:
        job: the full job id.
        replicas: the count that was chosen; 0 if the job does not run.
        present: the count before the decision.
        waiting: whether the job does not run because of insufficient capacity.
        reason: why.
        time: when it was decided, in seconds since 1970.
        counts: what this and other counts would give, ascending.
        limits: what limits the count.
    """

    job: str
    replicas: int
    present: int
    waiting: bool
    reason: str
    time: float
    counts: Sequence[CountView]
    limits: Sequence[LimitView]

    def without_other_jobs(self) -> Self:
        """Return the decision without the ids of other jobs, for readers who may not know them."""
        counts = [
            replace(each, given=(GivenReplicas(OTHER_JOBS, sum(given.replicas for given in each.given)),))
            if each.given
            else each
            for each in self.counts
        ]
        return replace(self, counts=tuple(counts))
