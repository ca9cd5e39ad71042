"""Gain reports, and the step times that they measure.

A job keeps its newest reports and, of the earlier ones, a bounded number that is evenly spread over its
steps, so a job of a year takes a bounded size.
"""

import json
import logging
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import attrgetter
from statistics import median
from typing import Any

from adascale_api.data.job import StoredJob, reading
from adascale_api.data.sql import Row, Sql, Transaction, upsert
from adascale_api.data.store.jobs import apply, lock_for_worker
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.rendezvous import rendezvous
from adascale_core.views.gain import HistoryView

REPORTS_PER_STEP_TIME = 50
"""A step time is the median over this many of the latest reports with the same batch plan."""
FEW_REPORTS = 10
"""A step time of fewer reports, at more replicas than at present, may become stale; see `LATER_REPORTS`."""
LATER_REPORTS = 30
"""Reports of other plans, for each of its own, after which a step time becomes stale; see `FEW_REPORTS`."""
MIN_STEP_TIME = 1e-9
"""Seconds; a shorter step time is not a measurement, and its inverse may overflow."""
MAX_PLANS = 256
"""Batch plans of a job whose step times are kept, the latest."""

logger = logging.getLogger(__name__)


_Place = tuple[int, int]
"""The generation and step of a report."""


@dataclass(frozen=True)
class Retention:
    """How many reports of a job are kept."""

    newest: int = 2000
    earlier: int = 2000  # kept at least of the earlier ones, evenly spread over the steps

    @property
    def limit(self) -> int:
        """The number of reports at which earlier ones are removed."""
        return self.newest + 2 * self.earlier


def post(
    transaction: Transaction,
    job_id: str,
    new: Sequence[GainReport],
    now: float,
    retention: Retention = Retention(),
) -> tuple[int, int, StoredJob]:
    """Store reports, each (generation, step) once, and return how many were new and repeated, and the job.

    Creates the job if it does not exist. If the newest one names a slow replica, a spare may take its place.
    """
    job = lock_for_worker(transaction, job_id, max(new, key=attrgetter("generation")), now)
    # Before any row is written: an unreadable one must leave the transaction without an effect.
    before = _measurements(transaction, job) or (-1, -1, 0, 0)
    unstored = _unstored(transaction, job.key, new, (before[0], before[1]))
    reports = list(unstored.values())
    times, are_known = _times(transaction, job, reports)
    if reports:
        newest = max((before[0], before[1]), *unstored)
        received, kept = before[2] + len(reports), before[3] + len(reports)
        transaction.execute_for_each(_INSERT, [_row(job.key, report) for report in reports])
        for row in times:
            transaction.execute(_UPSERT_STEP_TIMES, job_key=job.key, received=received, **row)
        if not are_known:
            transaction.execute(_REMOVE_OLD_PLANS, key=job.key, limit=MAX_PLANS)
        if kept >= retention.limit:
            earlier = float(retention.earlier)
            kept -= transaction.execute(_THIN, key=job.key, newest=retention.newest, earlier=earlier)
        transaction.execute(
            _UPSERT_MEASUREMENTS,
            job_key=job.key,
            generation=newest[0],
            step=newest[1],
            received=received,
            kept=kept,
            reported_at=now,
        )
        latest = unstored.get(newest)
        # Most reports name none, and do not concern the generations.
        if latest is not None and (latest.slow_replica is not None or job.rendezvous.slow_places.places):
            job = apply(transaction, job, rendezvous.report, latest=latest, now=now)
    return len(reports), len(new) - len(reports), job


def latest_reports(transaction: Transaction, ids: Sequence[str]) -> Callable[[str], GainReport | None]:
    """Read the latest reports of jobs, by generation and step, and return what returns that of one.

    One that can't be read harms its own job only.
    """
    rows = {job_id: row for job_id, *row in transaction.all_of(_LATEST, ids)}
    return lambda job_id: _parse_report(job_id, rows[job_id]) if job_id in rows else None


def latest_gauges(transaction: Transaction) -> list[Row]:
    """Return the id and (gain, efficiency, progress, replicas, local batch size) of the latest report of each
    job that is not complete. Those that can't be read are logged, and are not among them."""
    rows = transaction.all(_GAUGES)
    valid = [
        row for row in rows if all(isinstance(each, (int, float)) and isfinite(each) for each in row[1:])
    ]
    for job_id, *_ in {*rows}.difference(valid):
        logger.error("the latest report of job %s has a number that is not valid", job_id)
    return valid


def history(transaction: Transaction, job: StoredJob, points: int) -> HistoryView:
    """Return at most `points` of a job's reports, evenly spread, the first and the last among them."""
    measurements = _measurements(transaction, job)
    if measurements is None:
        return HistoryView(job.id, 0, [])
    received, kept = measurements[2:]
    # Number n is a point if n * (points - 1) / (kept - 1) passes an integer there. The last always is.
    rows = transaction.all(_SPREAD, key=job.key, last=kept - 1, gaps=min(points, kept) - 1)
    return HistoryView(job.id, received, [_parse_report(job.id, row) for row in rows])


def step_times(transaction: Transaction, ids: Sequence[str]) -> Callable[[str], list[StepTime]]:
    """Read the step times of jobs, and return what returns those of one.

    It has one for each batch plan, number of nodes and accelerator: the median of the latest.
    """
    rows: defaultdict[str, list[Row]] = defaultdict(list)
    for job_id, *row in transaction.all_of(_STEP_TIMES, ids):
        rows[job_id].append(tuple(row))

    def parse(job_id: str) -> list[StepTime]:
        # The plan of the newest report is the one of which none was received since.
        present = max((row[0] for row in rows[job_id] if row[-1] == 0), default=None)
        with reading(job_id):
            return [_step_time(present, *row) for row in rows[job_id]]

    return parse


def _parse_report(job_id: str, row: Sequence[Any]) -> GainReport:
    *numbers, text, _, counts_samples = row
    with reading(job_id):
        metrics = json.loads(text) if text else {}
        numbers = [number for number in numbers if number is not None]
        if not all(map(isfinite, [*numbers, *metrics.values()])):
            raise ValueError("a report has a number that is not finite")
    members = dict(zip(_REPORT, row, strict=True))
    return GainReport(**{**members, "metrics": metrics, "counts_samples": bool(counts_samples)})


def _step_time(
    present: int | None,
    replicas: int,
    local_bsz: int,
    accumulation: int,
    nodes: int,
    accelerator: str,
    packed: bytes,
    packed_sync: bytes,
    later: int,
) -> StepTime:
    seconds, sync = _unpack(packed), _unpack(packed_sync)
    is_larger = present is not None and replicas > present
    return StepTime(
        replicas,
        local_bsz,
        accumulation,
        median(seconds),
        len(seconds),
        nodes,
        median(sync) if sync else None,
        accelerator,
        is_larger and len(seconds) < FEW_REPORTS and later > LATER_REPORTS * len(seconds),
    )


def _unpack(packed: bytes) -> "array[float]":
    seconds = array("d", packed)
    if not all(map(isfinite, seconds)):
        raise ValueError("a step time is not finite")
    return seconds


def _measurements(transaction: Transaction, job: StoredJob) -> tuple[int, int, int, int] | None:
    """Return the generation and step of the newest report, and how many were received and are kept."""
    row = transaction.first(_MEASUREMENTS, key=job.key)
    with reading(job.id):
        if row is not None and not all(isinstance(number, int) for number in row):
            raise ValueError("a count of reports is no integer")
    return row


def _unstored(
    transaction: Transaction, key: int, new: Sequence[GainReport], newest: _Place
) -> dict[_Place, GainReport]:
    """Return the reports that are not stored, the first of each place; `newest` is the newest stored."""
    found: dict[_Place, GainReport] = {}
    for report in new:
        found.setdefault((report.generation, report.step), report)
    first, last = min(found), max(found)
    if first <= newest:
        limits = {"generation": first[0], "step": first[1], "last_generation": last[0], "last_step": last[1]}
        for place in transaction.all(_STORED, key=key, **limits):
            found.pop(place, None)
    return found


def _row(key: int, report: GainReport) -> Row:
    *numbers, metrics, accelerator, counts_samples = _values(report)
    return (key, *numbers, json.dumps(metrics) if metrics else "", accelerator, int(counts_samples))


def _times(
    transaction: Transaction, job: StoredJob, new: Sequence[GainReport]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the latest step times of the batch plans of reports, and whether all plans have some already."""
    of_plans: defaultdict[Row, list[GainReport]] = defaultdict(list)
    for report in new:
        if report.step_time >= MIN_STEP_TIME:
            of_plans[_plan(report)].append(report)
    rows = []
    are_known = True
    for plan, reports in of_plans.items():
        columns: dict[str, Any] = dict(zip(_PLAN, plan, strict=True))
        row = transaction.first(_STEP_TIMES_OF_PLAN, key=job.key, **columns)
        are_known = are_known and row is not None
        with reading(job.id):
            seconds, sync = map(_unpack, row or (b"", b""))
        seconds.extend(report.step_time for report in reports)
        sync.extend(report.sync_time for report in reports if report.sync_time is not None)
        for name, times in (("seconds", seconds), ("sync_seconds", sync)):
            columns[name] = times[-REPORTS_PER_STEP_TIME:].tobytes()
        rows.append(columns)
    return rows, are_known


_REPORT = tuple(GainReport.__dataclass_fields__)
_PLAN = ("replicas", "local_bsz", "accumulation", "nodes", "accelerator")
"""The fields that reports of the same batch plan have in common."""
_PLAN_COLUMNS = ", ".join(_PLAN)
_COLUMNS = ", ".join(_REPORT)
_OF_REPORT = ", ".join(f"reports.{name}" for name in _REPORT)
_values, _plan = attrgetter(*_REPORT), attrgetter(*_PLAN)
_STORED = Sql(
    """
    SELECT generation, step FROM reports WHERE job_key = :key
    AND (generation, step) >= (:generation, :step) AND (generation, step) <= (:last_generation, :last_step)
    """
)
_INSERT = Sql(f"INSERT INTO reports (job_key, {_COLUMNS}) VALUES (?, {', '.join('?' for _ in _REPORT)})")
_MEASUREMENTS = Sql("SELECT generation, step, received, kept FROM measurements WHERE job_key = :key")
_UPSERT_MEASUREMENTS = upsert(
    "measurements", "job_key", "generation", "step", "received", "kept", "reported_at"
)
_FROM_LATEST = """
    FROM jobs JOIN measurements ON measurements.job_key = jobs.key
    JOIN reports ON reports.job_key = measurements.job_key
        AND reports.generation = measurements.generation AND reports.step = measurements.step
    """
_LATEST = f"SELECT jobs.id, {_OF_REPORT} {_FROM_LATEST} WHERE jobs.id IN ({{ids}})"
_GAUGES = Sql(
    f"SELECT jobs.id, gain, gain / nullif(scale, 0), progress, replicas, local_bsz {_FROM_LATEST} "
    "WHERE complete = 0 ORDER BY jobs.id"
)
_SPREAD = Sql(
    f"""
    SELECT {_COLUMNS} FROM (
        SELECT {_COLUMNS}, row_number() OVER (ORDER BY generation, step) - 1 AS n
        FROM reports WHERE job_key = :key
    ) AS numbered
    WHERE n = :last OR (n = 0 AND :gaps > 0)
        OR (n * :gaps) / nullif(:last, 0) > ((n - 1) * :gaps) / nullif(:last, 0)
    ORDER BY generation, step
    """
)
_STEP_TIMES = f"""
    SELECT jobs.id, {_PLAN_COLUMNS}, seconds, sync_seconds, measurements.received - step_times.received
    FROM jobs JOIN step_times ON step_times.job_key = jobs.key
    JOIN measurements ON measurements.job_key = jobs.key
    WHERE jobs.id IN ({{ids}}) ORDER BY jobs.id, {_PLAN_COLUMNS}
    """
_STEP_TIMES_OF_PLAN = Sql(
    f"""
    SELECT seconds, sync_seconds FROM step_times WHERE job_key = :key
    AND {" AND ".join(f"{name} = :{name}" for name in _PLAN)}
    """
)
_UPSERT_STEP_TIMES = upsert("step_times", f"job_key, {_PLAN_COLUMNS}", "seconds", "sync_seconds", "received")
_REMOVE_OLD_PLANS = Sql(
    f"""
    DELETE FROM step_times WHERE job_key = :key AND ({_PLAN_COLUMNS}) IN (
        SELECT {_PLAN_COLUMNS} FROM step_times WHERE job_key = :key
        ORDER BY received DESC, {_PLAN_COLUMNS} LIMIT 1000000 OFFSET :limit
    )
    """
)
# Removes all but the first report of each of as many parts of the job's steps as earlier ones are kept.
_THIN = Sql(
    """
    DELETE FROM reports WHERE job_key = :key AND (generation, step) IN (
        SELECT generation, step FROM (
            SELECT generation, step, row_number() OVER (
                PARTITION BY CAST((step - first) * :earlier / (last - first + 1) AS INTEGER)
                ORDER BY generation, step
            ) AS n
            FROM (
                SELECT generation, step, min(step) OVER () AS first, max(step) OVER () AS last,
                    row_number() OVER (ORDER BY generation DESC, step DESC) AS age
                FROM reports WHERE job_key = :key
            ) AS kept
            WHERE age > :newest
        ) AS parts
        WHERE n > 1
    )
    """
)
