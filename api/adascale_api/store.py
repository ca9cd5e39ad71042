"""What is kept of jobs, as functions of a connection inside a transaction.

Those that change something read the job's row for update first, so that processes that share a database
take turns per job. A change of a job's state raises its version by one; nothing else does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from statistics import median
from typing import Any, Protocol

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from adascale_api.state import state_from_text, state_to_text
from adascale_api.tables import former_jobs, heartbeats, jobs, measured, reports
from adascale_core import rendezvous
from adascale_core.errors import AdaScaleError
from adascale_core.messages import Allocation, AllocationView, GainReport, JobSpec, Registration, StepTime
from adascale_core.names import HEARTBEAT_TIMEOUT
from adascale_core.rendezvous import Rendezvous

REPORTS_PER_STEP_TIME = 50
"""A step time is the median over this many of the latest reports with the same batch plan."""

_upserts: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class UnknownJobError(AdaScaleError):
    """A job that nobody has declared or reported on."""

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"job {job_id} is unknown: it comes into being with its first report, allocation or replica"
        )


class Transition(Protocol):
    """A transition of a job's rendezvous, given the job's spec."""

    def __call__(self, state: Rendezvous, /, *, declared: JobSpec | None) -> Rendezvous:
        """Return the state that follows."""
        ...


@dataclass(frozen=True)
class Recorded:
    """What became of reports: how many are new, and how many were known already."""

    stored: int
    repeated: int
    allocation: AllocationView


@dataclass(frozen=True)
class Changed:
    """A job's state after it was asked to change, and whether it did."""

    state: Rendezvous
    version: int
    changed: bool

    @property
    def allocation(self) -> AllocationView:
        """What others are told of the job's generations."""
        return self.state.view(self.version)


@dataclass(frozen=True)
class Replica:
    """The last registration of a rank, and when it was told (seconds since 1970)."""

    registration: Registration
    seen_at: float | None


@dataclass(frozen=True)
class Job:
    """All that is known of a job but its reports."""

    key: int
    id: str
    created_at: float
    version: int
    spec: JobSpec | None
    state: Rendezvous

    @property
    def allocation(self) -> AllocationView:
        """What others are told of the job's generations."""
        return self.state.view(self.version)


@dataclass(frozen=True)
class History:
    """Some of a job's reports, by generation and step, and how many there are in all."""

    reports: list[GainReport]
    total: int


# -- reading --------------------------------------------------------------------------------------------


def find_job(connection: Connection, job_id: str) -> Job:
    """The job `job_id`.

    Raises:
        UnknownJobError: there is none.
    """
    row = connection.execute(_job_by_id, {"id": job_id}).one_or_none()
    if row is None:
        raise UnknownJobError(job_id)
    return _job(row)


def find_jobs(connection: Connection, after: str, limit: int) -> list[Job]:
    """At most `limit` jobs by id, from the first one after the id `after`."""
    query = select(jobs).where(jobs.c.id > after).order_by(jobs.c.id).limit(limit)
    return [_job(row) for row in connection.execute(query)]


def versions(connection: Connection, job_ids: Iterable[str]) -> dict[str, int]:
    """The versions of those of `job_ids` that exist."""
    query = select(jobs.c.id, jobs.c.version).where(jobs.c.id.in_(list(job_ids)))
    return {row.id: row.version for row in connection.execute(query)}


def replicas(connection: Connection, job: Job) -> list[Replica]:
    """The registered replicas of a job, by rank."""
    query = select(heartbeats.c.rank, heartbeats.c.seen_at).where(heartbeats.c.job_key == job.key)
    seen = {row.rank: row.seen_at for row in connection.execute(query)}
    return [Replica(told, seen.get(rank)) for rank, told in sorted(job.state.replicas.items())]


def latest_report(connection: Connection, job: Job) -> GainReport | None:
    """The report of the highest generation, and in it of the highest step."""
    row = connection.execute(_latest_report, {"job_key": job.key}).one_or_none()
    return _report(row) if row else None


def latest_reports(connection: Connection) -> dict[str, GainReport]:
    """The latest report of every job that has one, by job id."""
    return {row.id: _report(row) for row in connection.execute(_latest_reports)}


def history(connection: Connection, job: Job, points: int) -> History:
    """At most `points` of a job's reports, evenly spread, the first and the last among them."""
    last = connection.execute(_latest_report, {"job_key": job.key}).one_or_none()
    first = connection.execute(_first_report, {"job_key": job.key}).one_or_none()
    if last is None or first is None:
        return History([], 0)
    total: int = connection.execute(_report_count, {"job_key": job.key}).scalar_one()
    ends = [last] if points == 1 or first.n == last.n else [first, last]
    between = _spread(total, points - 2) - {end.n for end in ends} if points > 2 else set()
    query = select(reports).where(reports.c.job_key == job.key, reports.c.n.in_(sorted(between)))
    rows = [*ends, *connection.execute(query)]
    return History([_report(row) for row in sorted(rows, key=attrgetter("generation", "step"))], total)


def step_times(connection: Connection, job: Job) -> list[StepTime]:
    """The measured step time of each batch plan: the median over its latest reports.

    One step of the index per plan, however many reports there are.
    """
    found = []
    least = (0, 0, 0)
    while rows := connection.execute(
        _next_plan, {"job_key": job.key, **dict(zip(_PLAN, least, strict=True))}
    ).all():
        first = rows[0]
        times = [row.step_time for row in rows if row[:3] == first[:3]]
        found.append(StepTime(first.replicas, first.local_bsz, first.accumulation, median(times), len(times)))
        least = (first.replicas, first.local_bsz, first.accumulation + 1)
    return found


# -- writing --------------------------------------------------------------------------------------------


def record(connection: Connection, job_id: str, told: Sequence[GainReport], now: float) -> Recorded:
    """Keep reports, each (generation, step) once. An unknown job comes into being."""
    job = _lock_job(connection, job_id, now)
    rows = [{"job_key": job.key, **vars(report)} for report in told]
    stored = 0
    if rows:
        stored = connection.execute(_insert_report(connection.dialect.name), rows).rowcount
    return Recorded(stored, len(rows) - stored, job.allocation)


def declare(connection: Connection, job_id: str, spec: JobSpec, now: float) -> bool:
    """Keep what a job is declared to be; whether it is new."""
    known = connection.execute(_job_by_id, {"id": job_id}).one_or_none() is not None
    job = _lock_job(connection, job_id, now)
    connection.execute(update(jobs).where(jobs.c.key == job.key).values(spec=spec.to_json()))
    return not known


def allocate(connection: Connection, job_id: str, allocation: Allocation, now: float) -> Changed:
    """Store a job's desired allocation. Creates the job if it does not exist.

    Raises:
        StaleAllocationError: a newer one is desired already.
    """
    job = _lock_job(connection, job_id, now)
    return _apply(connection, job, partial(rendezvous.allocate, allocation=allocation))


def register(connection: Connection, job_id: str, registration: Registration, now: float) -> Changed:
    """Keep what an agent does, and that it was heard of. An unknown job comes into being."""
    job = _lock_job(connection, job_id, now)
    changed = _apply(connection, job, partial(rendezvous.register, registration=registration))
    kept = changed.state.replicas.get(registration.rank)
    # One that has been replaced may still talk; it is no sign of life of the one that took its place.
    if kept is not None and kept.instance == registration.instance:
        due_at = None if kept.state in rendezvous.EXITED_STATES else now + HEARTBEAT_TIMEOUT
        connection.execute(
            _upsert_heartbeat(connection.dialect.name),
            {"job_key": job.key, "rank": kept.rank, "seen_at": now, "due_at": due_at},
        )
    return changed


def forget_silent(connection: Connection, now: float) -> list[str]:
    """Forget the replicas that are overdue; the ids of the jobs whose state changed."""
    overdue: dict[int, list[int]] = {}
    for key, rank in connection.execute(_overdue, {"now": now}):
        overdue.setdefault(key, []).append(rank)
    changed = []
    for key, ranks in overdue.items():
        job = _job(connection.execute(select(jobs).where(jobs.c.key == key).with_for_update()).one())
        if _apply(connection, job, partial(rendezvous.expire, ranks=ranks)).changed:
            changed.append(job.id)
        # Of a job that is complete they are not forgotten, but nothing more is expected of them either.
        connection.execute(
            update(heartbeats)
            .where(heartbeats.c.job_key == key, heartbeats.c.rank.in_(ranks))
            .values(due_at=None)
        )
    return changed


def any_silent(connection: Connection, now: float) -> bool:
    """Whether there is a replica that is overdue."""
    return connection.execute(_overdue.limit(1), {"now": now}).first() is not None


def remove(connection: Connection, job_id: str) -> None:
    """Remove a job with all that is known of it.

    Raises:
        UnknownJobError: there is none.
    """
    job = find_job(connection, job_id)
    connection.execute(delete(former_jobs).where(former_jobs.c.id == job_id))
    connection.execute(insert(former_jobs).values(id=job_id, version=job.version))
    for table in (reports, heartbeats):
        connection.execute(delete(table).where(table.c.job_key == job.key))
    connection.execute(delete(jobs).where(jobs.c.key == job.key))


# -- how ------------------------------------------------------------------------------------------------

_PLAN = ("replicas", "local_bsz", "accumulation")
_REPORT = tuple(GainReport.__dataclass_fields__)

_of_job = reports.c.job_key == bindparam("job_key")
_job_by_id = select(jobs).where(jobs.c.id == bindparam("id"))
_locked_job_by_id = _job_by_id.with_for_update()
_latest_report = (
    select(reports).where(_of_job).order_by(reports.c.generation.desc(), reports.c.step.desc()).limit(1)
)
_first_report = select(reports).where(_of_job).order_by(reports.c.generation, reports.c.step).limit(1)
_one = reports.alias()
_latest_reports = (
    select(jobs.c.id, *(reports.c[name] for name in _REPORT))
    .join(reports, reports.c.job_key == jobs.c.key)
    .where(
        reports.c.n
        == select(_one.c.n)
        .where(_one.c.job_key == jobs.c.key)
        .order_by(_one.c.generation.desc(), _one.c.step.desc())
        .limit(1)
        .scalar_subquery()
    )
    .order_by(jobs.c.id)
)
_report_count = select(func.coalesce(func.max(reports.c.n) + 1, 0)).where(_of_job)
_plan = tuple_(*(reports.c[name] for name in _PLAN))
_next_plan = (
    select(*(reports.c[name] for name in _PLAN), reports.c.step_time)
    # From the least plan that could come next. With `>` the last one, SQLite would pass over all its reports.
    .where(_of_job, measured, _plan >= tuple_(*(bindparam(name) for name in _PLAN)))
    .order_by(*(reports.c[name] for name in _PLAN), reports.c.n.desc())
    .limit(REPORTS_PER_STEP_TIME)
)
_overdue = select(heartbeats.c.job_key, heartbeats.c.rank).where(heartbeats.c.due_at < bindparam("now"))


@cache  # building a statement takes longer than running it
def _insert_report(dialect: str) -> Any:
    return (
        _upserts[dialect](reports)
        .values(
            {
                "job_key": bindparam("job_key"),
                "n": _report_count.scalar_subquery(),
                **{name: bindparam(name) for name in _REPORT},
            }
        )
        .on_conflict_do_nothing(index_elements=["job_key", "generation", "step"])
    )


@cache
def _upsert_heartbeat(dialect: str) -> Any:
    statement = _upserts[dialect](heartbeats)
    return statement.on_conflict_do_update(
        index_elements=["job_key", "rank"],
        set_={"seen_at": statement.excluded.seen_at, "due_at": statement.excluded.due_at},
    )


def _job(row: Row[Any]) -> Job:
    spec = JobSpec.from_json(row.spec) if row.spec else None
    return Job(row.key, row.id, row.created_at, row.version, spec, state_from_text(row.state))


def _report(row: Row[Any]) -> GainReport:
    return GainReport(**{name: getattr(row, name) for name in _REPORT})


def _lock_job(connection: Connection, job_id: str, now: float) -> Job:
    """The job, which nobody else changes until the transaction ends; made if it is unknown."""
    row = connection.execute(_locked_job_by_id, {"id": job_id}).one_or_none()
    if row is None:
        former = connection.scalar(select(former_jobs.c.version).where(former_jobs.c.id == job_id))
        connection.execute(
            _upserts[connection.dialect.name](jobs)
            .values(
                id=job_id,
                created_at=now,
                # From the clock, so that they rise also for agents that outlive the loss of the database.
                version=max(int(1000 * now), 0 if former is None else former + 1),
                state=state_to_text(Rendezvous()),
            )
            .on_conflict_do_nothing(index_elements=["id"])
        )
        row = connection.execute(_locked_job_by_id, {"id": job_id}).one()
    return _job(row)


def _apply(connection: Connection, job: Job, transition: Transition) -> Changed:
    """Store the state that follows from a transition of the rendezvous."""
    after = transition(job.state, declared=job.spec)
    if after == job.state:
        return Changed(job.state, job.version, changed=False)
    version = job.version + 1
    connection.execute(
        update(jobs).where(jobs.c.key == job.key).values(version=version, state=state_to_text(after))
    )
    return Changed(after, version, changed=True)


def _spread(total: int, points: int) -> set[int]:
    """At most `points` of the numbers below `total`, evenly spread, its ends aside."""
    if 0 < total <= points + 2:
        return set(range(total))
    return {(i + 1) * total // (points + 1) for i in range(points)}
