"""The generations that were active; `jobs` records them with the changes of their job."""

from adascale_api.data.job import Job
from adascale_api.data.sql import Sql, Transaction
from adascale_api.data.store.jobs import MAX_SILENCE
from adascale_core.views.generations import GenerationCause, GenerationView, downtime
from adascale_core.views.usage import UsedReplicas

MAX_USED = 50_000
"""Generations that the use of the cluster is computed from, the latest."""


def generations(transaction: Transaction, job: Job) -> list[GenerationView]:
    """Return the generations of a job that are kept, the latest last."""
    views: list[GenerationView] = []
    steps = {generation: times for generation, *times in transaction.all(_STEPS, key=job.key)}
    last_step: float | None = None
    disruptions = failures = 0
    for generation, replicas, started_at, ended_at, *counts in transaction.all(_GENERATIONS, key=job.key):
        if not views and generation > 1:
            disruptions, failures = counts  # earlier ones are not kept
        cause = GenerationCause.START
        if counts[1] > failures:
            cause = GenerationCause.FAILURE
        elif counts[0] > disruptions:
            cause = GenerationCause.DISRUPTION
        elif views and views[-1].ended_at == started_at:
            cause = GenerationCause.CHANGE
        disruptions, failures = counts
        without_step: float | None = None
        if generation in steps:
            first, last = steps[generation]
            if last_step is not None and cause is not GenerationCause.START:
                without_step = downtime(last_step, first)
            last_step = last
        views.append(GenerationView(generation, replicas, cause, started_at, ended_at, without_step))
    return views


def used_replicas(transaction: Transaction, since: float, now: float) -> list[UsedReplicas]:
    """Return the replicas that all jobs have used since a time."""
    rows = transaction.all(_USED, since=since, now=now, silent=now - MAX_SILENCE, limit=MAX_USED)
    return [UsedReplicas(*row) for row in rows]


_GENERATIONS = Sql(
    """
    SELECT generation, replicas, started_at, ended_at, disruptions, failures
    FROM generations WHERE job_key = :key ORDER BY generation
    """
)
_STEPS = Sql("SELECT generation, min(time), max(time) FROM reports WHERE job_key = :key GROUP BY generation")
_USED = Sql(
    """
    SELECT jobs.id, replicas, started_at, coalesce(ended_at, CASE
        WHEN reported_at >= started_at AND reported_at < :silent THEN reported_at ELSE :now END)
    FROM generations JOIN jobs ON jobs.key = generations.job_key
    LEFT JOIN measurements ON measurements.job_key = generations.job_key
    WHERE jobs.id IS NOT NULL AND (ended_at IS NULL OR ended_at > :since)
    ORDER BY started_at DESC LIMIT :limit
    """
)
