"""The seconds of replicas by cause, as agents have counted them since they were started.

Each agent has a row, which its later numbers replace, so that nothing is counted twice. The rows of a job's
earliest agents are summed, and so are those of all deleted jobs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from adascale_api.data.job import StoredJob
from adascale_api.data.sql import Row, Sql, Transaction
from adascale_api.data.tables import SECONDS as COLUMNS
from adascale_core.messages.replica_seconds import Cause, ReplicaSeconds
from adascale_core.names import MAX_REPLICAS
from adascale_core.views.goodput import GoodputPoint, GoodputView

MAX_AGENTS = 2 * MAX_REPLICAS
"""Agents of a job that have rows of their own, those that were heard of last; among them are all that run."""
MAX_POINTS = 400
"""Points of a job's history; with more, every second one is removed."""

Counted = Mapping[tuple[str, str], ReplicaSeconds]
"""(job id, agent) -> its seconds."""


def store(transaction: Transaction, counted: Counted, now: float) -> None:
    """Store the seconds of agents."""
    rows: list[Row] = [
        (*(float(seconds.get(cause, 0.0)) for cause in Cause), now, agent, job_id)
        # In order, so that two services lock rows in the same order.
        for (job_id, agent), seconds in sorted(counted.items(), key=lambda each: each[0])
    ]
    transaction.execute_for_each(_UPSERT, rows)


def add_points(transaction: Transaction, ids: Collection[str], now: float) -> None:
    """Add a point to the history of jobs where one is due, and sum what is too much to be kept.

    The older a job is, the further apart its points are.
    """
    for job_id in sorted(ids):
        transaction.execute(_ADD_POINT, id=job_id, now=now, parts=MAX_POINTS / 2)
        for key, agents, points in transaction.all(_COUNTS, id=job_id):
            if agents > 2 * MAX_AGENTS:
                transaction.execute(_ADD_TO, into=key, key=key, kept=MAX_AGENTS)
                transaction.execute(_REMOVE, key=key, kept=MAX_AGENTS)
            if points > MAX_POINTS:
                transaction.execute(_THIN, key=key)


def keep_of_deleted(transaction: Transaction, key: int) -> None:
    """Add the seconds of a job that is deleted to those of all deleted jobs."""
    transaction.execute(_ADD_TO, into=0, key=key, kept=0)


def totals(transaction: Transaction) -> dict[str, float]:
    """Return the seconds of all replicas by cause, also of deleted jobs."""
    return _by_cause(transaction.first(_TOTALS) or ())


def of_job(transaction: Transaction, job: StoredJob) -> dict[str, float]:
    """Return the seconds of a job's replicas by cause."""
    return _by_cause(transaction.first(_OF_JOB, key=job.key) or ())


def goodput(transaction: Transaction, job: StoredJob) -> GoodputView:
    """Return the seconds of a job's replicas, and their history."""
    seconds = of_job(transaction, job)
    points = [GoodputPoint(time, _by_cause(row)) for time, *row in transaction.all(_POINTS, key=job.key)]
    return GoodputView(job.id, seconds, points)


def _by_cause(values: Sequence[Any]) -> dict[str, float]:
    return {cause: value or 0.0 for cause, value in zip(map(str, Cause), values, strict=False)}


def _sum(table: str) -> str:
    return " + ".join(f"{table}.{column}" for column in COLUMNS)


_LIST = ", ".join(COLUMNS)
_SUMS = ", ".join(f"sum({column})" for column in COLUMNS)
_NEWER = ", ".join(f"{column} = excluded.{column}" for column in COLUMNS)
_UPSERT = Sql(
    f"""
    INSERT INTO replica_seconds ({_LIST}, changed_at, agent, job_key)
    SELECT {", ".join("?" for _ in COLUMNS)}, ?, ?, key FROM jobs WHERE id = ?
    ON CONFLICT (job_key, agent) DO UPDATE SET {_NEWER}, changed_at = excluded.changed_at
    WHERE {_sum("excluded")} >= {_sum("replica_seconds")}
    """
)
_ADD_POINT = Sql(
    f"""
    INSERT INTO goodput_history (job_key, time, {_LIST})
    SELECT key, :now, {_SUMS} FROM jobs JOIN replica_seconds ON job_key = key
    WHERE id = :id AND coalesce((
        SELECT max(time) + (:now - min(time)) / :parts FROM goodput_history WHERE job_key = key
    ), 0.0) <= :now
    GROUP BY key ON CONFLICT DO NOTHING
    """
)
_COUNTS = Sql(
    """
    SELECT key, (SELECT count(*) FROM replica_seconds WHERE job_key = key),
        (SELECT count(*) FROM goodput_history WHERE job_key = key)
    FROM jobs WHERE id = :id
    """
)
_EARLIER = """
    job_key = :key AND agent NOT IN (
        SELECT agent FROM replica_seconds WHERE job_key = :key AND agent <> ''
        ORDER BY changed_at DESC, agent LIMIT :kept
    )
    """
_ADD_TO = Sql(
    f"""
    INSERT INTO replica_seconds (job_key, agent, changed_at, {_LIST})
    SELECT :into, '', 0.0, {_SUMS} FROM replica_seconds
    WHERE {_EARLIER} AND (agent <> '' OR job_key <> :into) HAVING count(*) > 0
    ON CONFLICT (job_key, agent) DO UPDATE SET
    {", ".join(f"{column} = replica_seconds.{column} + excluded.{column}" for column in COLUMNS)}
    """
)
_REMOVE = Sql(f"DELETE FROM replica_seconds WHERE {_EARLIER} AND agent <> ''")
_THIN = Sql(
    """
    DELETE FROM goodput_history WHERE job_key = :key AND time IN (
        SELECT time FROM (
            SELECT time, row_number() OVER (ORDER BY time) AS n FROM goodput_history WHERE job_key = :key
        ) AS numbered WHERE n / 2 * 2 = n
    )
    """
)
_TOTALS = Sql(f"SELECT {_SUMS} FROM replica_seconds")
_OF_JOB = Sql(f"SELECT {_SUMS} FROM replica_seconds WHERE job_key = :key")
_POINTS = Sql(f"SELECT time, {_LIST} FROM goodput_history WHERE job_key = :key ORDER BY time")
