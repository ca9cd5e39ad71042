"""What the metrics service answers about the generations of a job, past ones too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from adascale_core.messages.message import Message


class GenerationCause(StrEnum):
    """Why a generation began."""

    START = "start"
    """The job had no replicas before."""
    CHANGE = "change"
    """The replica count was changed, or replicas were exchanged."""
    DISRUPTION = "disruption"
    """A replica of the generation before was lost."""
    FAILURE = "failure"
    """The program failed in the generation before."""


@dataclass(frozen=True)
class GenerationView(Message):
    """A generation that was active.

    Args:
        generation: its number.
        replicas: its replica count.
        cause: why it began.
        started_at: when it became active, in seconds since 1970.
        ended_at: when it ended; None if it is active.
        downtime: seconds without a step: from the last step of the generation before to its first step; None
            if it has no step, or the job had no replicas before.
    """

    generation: int
    replicas: int
    cause: GenerationCause
    started_at: float
    ended_at: float | None
    downtime: float | None = None

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the generation of a JSON object's members."""
        return super().from_json({**members, "cause": GenerationCause(members["cause"])})


def downtime(last_step: float, first_step: float) -> float:
    """Return the downtime between two generations.

    Args:
        last_step: when the last step of the one before ended, in seconds since 1970.
        first_step: when the first step of the other one ended.
    """
    # A replica with another clock may make the first step.
    return max(first_step - last_step, 0.0)


@dataclass(frozen=True)
class GenerationsView(Message):
    """The generations of a job, the latest last.

    Args:
        job: the full job id.
        generations: the latest 1000 or more that are kept.
        decided_at: the `time` of the last explained decision; None if none is stored.
    """

    job: str
    generations: Sequence[GenerationView]
    decided_at: float | None

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the generations of a JSON object's members."""
        return super().from_json(
            {**members, "generations": tuple(map(GenerationView.from_json, members["generations"]))}
        )
