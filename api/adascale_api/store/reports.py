"""Gain reports, and the step times that they measure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from statistics import median
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select, tuple_

from adascale_api.store.dialects import insert_into
from adascale_api.store.jobs import Job, lock_or_create
from adascale_api.tables import has_step_time, jobs, reports
from adascale_core.messages import GainReport, StepTime
from adascale_core.views import StoredReports

REPORTS_PER_STEP_TIME = 50
"""A step time is the median over this many of the latest reports with the same batch plan."""


@dataclass(frozen=True)
class History:
    """Some of a job's reports, by generation and step, and the number of all of them."""

    reports: list[GainReport]
    total: int


def post(connection: Connection, job_id: str, new: Sequence[GainReport], now: float) -> StoredReports:
    """Store reports, each (generation, step) once. Creates the job if it does not exist."""
    job = lock_or_create(connection, job_id, now)
    rows = [{"job_key": job.key, **vars(report)} for report in new]
    stored = 0
    if rows:
        stored = connection.execute(_insert_report(connection.dialect.name), rows).rowcount
    return StoredReports(stored, len(rows) - stored, job.view)


def latest_report(connection: Connection, job: Job) -> GainReport | None:
    """Return the report of the highest generation and, in it, of the highest step."""
    row = connection.execute(_latest_report, {"job_key": job.key}).one_or_none()
    return _report(row) if row else None


def latest_reports(connection: Connection) -> dict[str, GainReport]:
    """Return the latest report of every job that has a report, by job id."""
    return {row.id: _report(row) for row in connection.execute(_latest_reports)}


def history(connection: Connection, job: Job, points: int) -> History:
    """Return at most `points` of a job's reports, evenly spread, the first and the last among them."""
    last = connection.execute(_latest_report, {"job_key": job.key}).one_or_none()
    first = connection.execute(_first_report, {"job_key": job.key}).one_or_none()
    if last is None or first is None:
        return History([], 0)
    total: int = connection.execute(_report_count, {"job_key": job.key}).scalar_one()
    ends = [last] if points == 1 or first.number == last.number else [first, last]
    between = _spread(total, points - 2) - {end.number for end in ends} if points > 2 else set()
    query = select(reports).where(reports.c.job_key == job.key, reports.c.number.in_(sorted(between)))
    rows = [*ends, *connection.execute(query)]
    return History([_report(row) for row in sorted(rows, key=attrgetter("generation", "step"))], total)


def step_times(connection: Connection, job: Job) -> list[StepTime]:
    """Return the step time of each batch plan on each number of nodes: the median over its latest reports.

    It takes one index search per plan, independent of the number of reports.
    """
    found = []
    least = (0, 0, 0, 0)
    while rows := connection.execute(
        _next_plan, {"job_key": job.key, **dict(zip(_PLAN, least, strict=True))}
    ).all():
        first = rows[0]
        plan = (first.replicas, first.local_bsz, first.accumulation)
        times = [row.step_time for row in rows if row[:4] == first[:4]]
        found.append(StepTime(*plan, median(times), len(times), first.nodes))
        least = (*plan, first.nodes + 1)
    return found


_PLAN = ("replicas", "local_bsz", "accumulation", "nodes")
_REPORT = tuple(GainReport.__dataclass_fields__)

_of_job = reports.c.job_key == bindparam("job_key")
_latest_report = (
    select(reports).where(_of_job).order_by(reports.c.generation.desc(), reports.c.step.desc()).limit(1)
)
_first_report = select(reports).where(_of_job).order_by(reports.c.generation, reports.c.step).limit(1)
_candidate = reports.alias()
_latest_reports = (
    select(jobs.c.id, *(reports.c[name] for name in _REPORT))
    .join(reports, reports.c.job_key == jobs.c.key)
    .where(
        reports.c.number
        == select(_candidate.c.number)
        .where(_candidate.c.job_key == jobs.c.key)
        .order_by(_candidate.c.generation.desc(), _candidate.c.step.desc())
        .limit(1)
        .scalar_subquery()
    )
    .order_by(jobs.c.id)
)
_report_count = select(func.coalesce(func.max(reports.c.number) + 1, 0)).where(_of_job)
_plan = tuple_(*(reports.c[name] for name in _PLAN))
_next_plan = (
    select(*(reports.c[name] for name in _PLAN), reports.c.step_time)
    # From the smallest plan after the last plan. With `>` the last plan, SQLite would read all its reports.
    .where(_of_job, has_step_time, _plan >= tuple_(*(bindparam(name) for name in _PLAN)))
    .order_by(*(reports.c[name] for name in _PLAN), reports.c.number.desc())
    .limit(REPORTS_PER_STEP_TIME)
)


@cache  # building the statement takes longer than running it
def _insert_report(dialect: str) -> Any:
    return (
        insert_into(reports, dialect)
        .values(
            {
                "job_key": bindparam("job_key"),
                "number": _report_count.scalar_subquery(),
                **{name: bindparam(name) for name in _REPORT},
            }
        )
        .on_conflict_do_nothing(index_elements=["job_key", "generation", "step"])
    )


def _report(row: Row[Any]) -> GainReport:
    return GainReport(**{name: getattr(row, name) for name in _REPORT})


def _spread(total: int, points: int) -> set[int]:
    """Return at most `points` of the numbers below `total`, evenly spread, without the first and the last."""
    if 0 < total <= points + 2:
        return set(range(total))
    return {(i + 1) * total // (points + 1) for i in range(points)}
