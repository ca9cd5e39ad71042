"""The last decision about each job, with its explanation."""

import json

from adascale_api.data.job import Job, UnreadableJobError
from adascale_api.data.sql import Sql, Transaction
from adascale_api.data.store import jobs
from adascale_core.views.decision import DecisionView


def store(transaction: Transaction, decision: DecisionView) -> None:
    """Store the decision about a job in place of the last one."""
    key = jobs.lock(transaction, decision.job)
    text = json.dumps(decision.to_json(), separators=(",", ":"))
    transaction.execute(_UPSERT, key=key, decision=text)


def find(transaction: Transaction, job: Job) -> DecisionView | None:
    """Return the last decision about a job; None if there is none."""
    row = transaction.first(_FIND, key=job.key)
    if row is None:
        return None
    try:
        return DecisionView.from_json(json.loads(row[0]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableJobError(job.id, error) from error


_UPSERT = Sql(
    """
    INSERT INTO decisions (job_key, decision) VALUES (:key, :decision)
    ON CONFLICT (job_key) DO UPDATE SET decision = excluded.decision
    """
)
_FIND = Sql("SELECT decision FROM decisions WHERE job_key = :key")
