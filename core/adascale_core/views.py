"""The metrics service's answers about jobs, as frozen dataclasses.

The service builds its JSON from these and the client parses the JSON into them, so both sides have the same
fields. `AllocationView`, the answer that agents wait for, is in `messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Self

from adascale_core.messages import (
    ActiveAllocation,
    Allocation,
    AllocationView,
    GainReport,
    JobSpec,
    LocalBszLimit,
    Message,
    Registration,
    ReplicaState,
    StepTime,
)
from adascale_core.names import WAITS_FOR_OTHERS
from adascale_core.prediction import Prediction


@dataclass(frozen=True)
class StoredReports(Message):
    """The answer to posted gain reports.

    Args:
        stored: the number of reports that are new.
        repeated: the number of reports whose generation and step are stored already; the first ones stay.
        allocation: the job's generations.
        post_interval: seconds until the trainer posts its next reports.
    """

    stored: int
    repeated: int
    allocation: AllocationView
    post_interval: float

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The answer from a JSON object's members."""
        return super().from_json({**members, "allocation": AllocationView.from_json(members["allocation"])})


@dataclass(frozen=True)
class PredictionView(Message):
    """The predicted performance of a replica count, with the batch that it would use.

    Args:
        replicas, local_bsz, accumulation: the batch plan (K, b, a).
        scale, gain, efficiency: of that plan.
        step_time: seconds per step.
        goodput: steps at `batch_size` per second.
    """

    replicas: int
    local_bsz: int
    accumulation: int
    scale: float
    gain: float
    efficiency: float
    step_time: float
    goodput: float

    @classmethod
    def of(cls, prediction: Prediction) -> Self:
        """The view of a prediction."""
        plan = prediction.plan
        return cls(
            plan.replicas,
            plan.local_bsz,
            plan.accumulation,
            prediction.scale,
            prediction.gain,
            prediction.efficiency,
            prediction.step_time,
            prediction.goodput,
        )


@dataclass(frozen=True)
class GainView(Message):
    """The latest report of a job, with predictions for other replica counts.

    In JSON the report's members stand beside `job`, `efficiency` and `predictions`.

    Args:
        job: the full job id.
        report: the latest report.
        predictions: for each valid replica count, in rising order; None while the job is not declared or no
            step time is measured.
        local_bsz_limit: the largest local batch size that is used on the type of accelerator of the report,
            since a larger one did not fit into memory; None if none has failed.
    """

    job: str
    report: GainReport
    predictions: Sequence[PredictionView] | None
    local_bsz_limit: int | None = None

    @property
    def efficiency(self) -> float:
        """gain / scale of the report."""
        return self.report.efficiency

    def to_json(self) -> dict[str, Any]:
        """The view as the JSON object's members."""
        predictions = None if self.predictions is None else [asdict(each) for each in self.predictions]
        return {
            **self.report.to_json(),
            "job": self.job,
            "efficiency": self.efficiency,
            "local_bsz_limit": self.local_bsz_limit,
            "predictions": predictions,
        }

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The view from a JSON object's members."""
        predictions = members["predictions"]
        return cls(
            job=members["job"],
            report=GainReport.from_json(members),
            predictions=None
            if predictions is None
            else tuple(PredictionView.from_json(each) for each in predictions),
            local_bsz_limit=members["local_bsz_limit"],
        )


@dataclass(frozen=True)
class HistoryView(Message):
    """Some of a job's reports, by generation and step.

    Args:
        job: the full job id.
        total: the number of reports that are stored.
        points: at most as many of them as requested, evenly spread, the first and the last among them.
    """

    job: str
    total: int
    points: Sequence[GainReport]

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The history from a JSON object's members."""
        points = tuple(GainReport.from_json(each) for each in members["points"])
        return cls(members["job"], members["total"], points)


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
    """

    generation: int
    replicas: int
    cause: GenerationCause
    started_at: float
    ended_at: float | None


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


@dataclass(frozen=True, kw_only=True)
class ReplicaView(Registration):
    """The last registration of a replica.

    Args:
        seconds_since_heartbeat: the time since the agent's last registration; None if it is not recorded.
    """

    seconds_since_heartbeat: float | None

    @property
    def registration(self) -> Registration:
        """The registration alone."""
        return Registration(**{field.name: getattr(self, field.name) for field in fields(Registration)})

    @classmethod
    def of(cls, registration: Registration, seconds_since_heartbeat: float | None) -> Self:
        """The view of a registration."""
        return cls(**vars(registration), seconds_since_heartbeat=seconds_since_heartbeat)


@dataclass(frozen=True)
class JobView(Message):
    """All that the metrics service stores of a job, except earlier reports.

    Args:
        id: the full job id, `<namespace>.<name>`.
        spec: the job's declaration; None if it is not declared.
        version, desired, active, broken, complete: as in `AllocationView`.
        failures: the number of generations in which the user's program failed.
        disruptions: the number of generations that were lost for another reason.
        restarts_without_progress: the number of restarts after losses since the last step.
        replicas: the last registration of each replica, by index.
        latest: the latest report; None if there is none.
        step_times: the median step time of each batch plan, over its latest reports.
        created_at: when the service created the job, in seconds since 1970.
        local_bsz_limits: the largest local batch sizes that are used on types of accelerators, since larger
            ones did not fit into their memory.
        local_bsz_limit: the limit that holds for its replicas; None if none has failed on their types.
    """

    id: str
    spec: JobSpec | None
    version: int
    desired: Allocation | None
    active: ActiveAllocation | None
    broken: bool
    complete: bool
    failures: int
    disruptions: int
    restarts_without_progress: int
    replicas: Sequence[ReplicaView]
    latest: GainReport | None
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

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The view from a JSON object's members."""
        spec, latest = members["spec"], members["latest"]
        desired, active = members["desired"], members["active"]
        return super().from_json(
            {
                **members,
                "spec": JobSpec.from_json(spec) if spec else None,
                "desired": Allocation.from_json(desired) if desired else None,
                "active": ActiveAllocation.from_json(active) if active else None,
                "replicas": tuple(ReplicaView.from_json(each) for each in members["replicas"]),
                "latest": GainReport.from_json(latest) if latest else None,
                "step_times": tuple(StepTime.from_json(each) for each in members["step_times"]),
                "local_bsz_limits": tuple(
                    LocalBszLimit.from_json(each) for each in members["local_bsz_limits"]
                ),
            }
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
    def stall(self) -> str | None:
        """Where the replicas are while no step ends, those that are behind first; None while steps end."""
        stalls = [
            (each.stall == WAITS_FOR_OTHERS, f"replica {each.replica} {each.stall}")
            for each in self.replicas
            if each.stall and each.state is ReplicaState.RUNNING
        ]
        return "; ".join(text for _, text in sorted(stalls)) or None

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

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The page from a JSON object's members."""
        jobs = tuple(JobView.from_json(each) for each in members["jobs"])
        return cls(jobs, members["next"], members["cursor"])


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

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The changes from a JSON object's members."""
        jobs = tuple(JobView.from_json(each) for each in members["jobs"])
        return cls(jobs, tuple(members["deleted"]), members["cursor"])


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
    """

    replicas: int
    goodput: float | None
    seconds_left: float | None
    given: Sequence[GivenReplicas]
    verdict: Verdict
    reason: str

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The view from a JSON object's members."""
        return super().from_json(
            {
                **members,
                "given": tuple(GivenReplicas.from_json(each) for each in members["given"]),
                "verdict": Verdict(members["verdict"]),
            }
        )


class LimitKind(StrEnum):
    """What limits a replica count."""

    BOUNDS = "bounds"
    SCHEDULING = "scheduling"
    CAPACITY = "capacity"
    NODES = "nodes"
    MEASUREMENTS = "measurements"
    CHANGE = "change"


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
        """The view from a JSON object's members."""
        return super().from_json({**members, "kind": LimitKind(members["kind"])})


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

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The view from a JSON object's members."""
        return super().from_json(
            {
                **members,
                "counts": tuple(CountView.from_json(each) for each in members["counts"]),
                "limits": tuple(LimitView.from_json(each) for each in members["limits"]),
            }
        )

    def without_other_jobs(self) -> Self:
        """Return the decision without the ids of other jobs, for readers who may not know them."""
        counts = [
            replace(each, given=(GivenReplicas(OTHER_JOBS, sum(given.replicas for given in each.given)),))
            if each.given
            else each
            for each in self.counts
        ]
        return replace(self, counts=tuple(counts))
