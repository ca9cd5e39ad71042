"""The metrics service's answers about jobs, their replicas with their output, and their generations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from adascale_core.failures import describe_end
from adascale_core.messages import Message
from adascale_core.messages.job_spec import JobSpec, LocalBszLimit
from adascale_core.messages.registration import Registration
from adascale_core.messages.reports import StepTime
from adascale_core.views.job_summary import RegisteredJob


@dataclass(frozen=True, kw_only=True)
class ReplicaView(Registration):
    """The last registration of a replica.

    Args:
        seconds_since_heartbeat: the time since the agent's last registration; None if it is not recorded.
        end: how its last process has ended, for people; empty if none has.
    """

    seconds_since_heartbeat: float | None
    end: str = ""

    @classmethod
    def of(cls, registration: Registration, seconds_since_heartbeat: float | None) -> Self:
        """The view of a registration."""
        code = registration.exit_code
        return cls(
            **vars(registration),
            seconds_since_heartbeat=seconds_since_heartbeat,
            end="" if code is None else describe_end(code),
        )


@dataclass(frozen=True)
class JobView(RegisteredJob):
    """All that the metrics service stores of a job, except earlier reports.

    Args:
        id: the full job id, `<namespace>.<name>`.
        spec: the job's declaration; None if it is not declared.
        version: as in `AllocationView`.
        failures: the number of generations in which the user's program failed.
        disruptions: the number of generations that were lost for another reason.
        restarts_without_progress: the number of restarts after losses since the last step.
        replicas: the last registration of each replica, by index.
        step_times: the median step time of each batch plan, over its latest reports.
        created_at: when the service created the job, in seconds since 1970.
        local_bsz_limits: the largest local batch sizes that are used on types of accelerators, since larger
            ones did not fit into their memory.
        local_bsz_limit: the limit that holds for its replicas; None if none has failed on their types.
    """

    id: str
    spec: JobSpec | None
    version: int
    failures: int
    disruptions: int
    restarts_without_progress: int
    replicas: Sequence[ReplicaView]
    step_times: Sequence[StepTime]
    created_at: float
    local_bsz_limits: Sequence[LocalBszLimit] = ()
    local_bsz_limit: int | None = None

    def local_bsz_limit_on(self, accelerator: str | None) -> int | None:
        """Return the limit that holds on a type of accelerator; None if none has failed there.

        Args:
            accelerator: the type to which the job is tied. None for the types of its replicas.
        """
        if accelerator is None:
            return self.local_bsz_limit
        sizes = (each.local_bsz for each in self.local_bsz_limits if each.accelerator == accelerator)
        return next(sizes, None)

    @classmethod
    def empty(cls, job_id: str = "", created_at: float = 0.0) -> Self:
        """The view of a job of which the service stores nothing."""
        return cls(
            id=job_id,
            spec=None,
            version=0,
            desired=None,
            active=None,
            broken=False,
            complete=False,
            failures=0,
            disruptions=0,
            restarts_without_progress=0,
            replicas=(),
            latest=None,
            step_times=(),
            created_at=created_at,
        )

    @property
    def generation(self) -> int:
        """The number of the desired allocation; 0 if there is none."""
        return self.desired.generation if self.desired else 0

    @property
    def last_generation(self) -> int:
        """The highest of the generations that are desired or reported; 0 if there is none.

        A later generation must have a higher number: a report of a higher one would hide its reports.
        """
        return max(self.generation, self.latest.generation if self.latest is not None else 0)

    @property
    def slowness(self) -> str:
        """Which replica is slow, or which was and is replaced by a spare; empty if there is none."""
        return str(self.slow or self.slow_replacement or "")

    def replica(self, index: int) -> ReplicaView | None:
        """The last registration of a replica; None if there is none."""
        return next((replica for replica in self.replicas if replica.replica == index), None)


@dataclass(frozen=True)
class JobList(Message):
    """A page of jobs, ordered by id.

    Args:
        jobs: the jobs.
        next: the `after` of the next page; None if this page is the last.
        cursor: the cursor from which later changes are read; that of the first page misses no change.
    """

    jobs: Sequence[JobView]
    next: str | None
    cursor: str


@dataclass(frozen=True)
class JobChanges(Message):
    """The jobs that have changed since a cursor. Reports alone do not change a job.

    Args:
        jobs: the jobs that were created or changed, as they are now.
        deleted: the ids of jobs that no longer exist.
        cursor: the cursor after these changes.
    """

    jobs: Sequence[JobView]
    deleted: Sequence[str]
    cursor: str


@dataclass(frozen=True)
class LogView(Message):
    """A part of the output of a replica.

    Args:
        text: the part.
        next: where the next part begins, in bytes.
        continues: whether it follows the part that the client has; otherwise it replaces that.
        missing: why there is no output; empty if there is one.
    """

    text: str
    next: int
    continues: bool
    missing: str = ""


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

    def describe(self, *, is_first: bool) -> str:
        """Return the cause for people."""
        if self is GenerationCause.START and not is_first:
            return "continued after a pause"
        return {
            GenerationCause.START: "started",
            GenerationCause.CHANGE: "replicas changed",
            GenerationCause.DISRUPTION: "a replica was lost",
            GenerationCause.FAILURE: "the program failed",
        }[self]


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
        reason: why it began, for people.
    """

    generation: int
    replicas: int
    cause: GenerationCause
    started_at: float
    ended_at: float | None
    downtime: float | None = None
    reason: str = ""


def downtime(last_step: float, first_step: float) -> float:
    """Return the downtime between two generations.

    Args:
        last_step: when the last step of the one before ended, in seconds since 1970.
        first_step: when the first step of the other one ended.
    """
    # A replica with another clock may make the first step.
    return max(first_step - last_step, 0.0)


@dataclass(frozen=True)
class Comparison(Message):
    """A job so far beside the same progress on one replica with the initial batch size, an estimate.

    Args:
        steps: its optimizer steps.
        seconds: the time in which it had replicas.
        single_steps: the steps on one replica, which are the progress.
        single_seconds: bounds of the time on one replica, lower and upper: the step time that is predicted
            from the measured ones, and three times the median error of these.
    """

    steps: int
    seconds: float
    single_steps: int
    single_seconds: tuple[float, float]


@dataclass(frozen=True)
class GenerationsView(Message):
    """The generations of a job, the latest last.

    Args:
        job: the full job id.
        generations: the latest 1000 or more that are kept.
        decided_at: the `time` of the last explained decision; None if none is stored.
        comparison: what it has taken beside one replica; None if that can't be estimated.
    """

    job: str
    generations: Sequence[GenerationView]
    decided_at: float | None
    comparison: Comparison | None = None
