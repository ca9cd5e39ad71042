"""Replicas: their registrations and logs, and the heartbeats that services which share a database exchange.

Heartbeats are counted, without times: each service measures with its own clock how long ago a count has
changed, so no clocks are compared.
"""

from collections.abc import Mapping
from dataclasses import replace

from adascale_api.data.job import StoredJob
from adascale_api.data.sql import Sql, Transaction, upsert
from adascale_api.data.store.jobs import apply, lock_for_worker, lock_or_create
from adascale_core.messages.registration import Registration
from adascale_core.rendezvous import rendezvous

MAX_LOGS = 16
"""Logs of a job that are kept, the latest: one shows why a program fails, and all replicas fail alike."""
Received = Mapping[tuple[int, int], str]
"""(job key, replica) -> the agent that sent a heartbeat."""
Counts = dict[tuple[int, int], tuple[str, int]]
"""(job key, replica) -> the agent, and how many heartbeats were counted."""


def register(transaction: Transaction, job_id: str, registration: Registration, now: float) -> StoredJob:
    """Store a registration. Creates the job if it does not exist.

    The log is stored separately: a state with the logs of all replicas would be read and written with every
    registration.
    """
    job = lock_for_worker(transaction, job_id, registration, now)
    without_log = replace(registration, log=None)
    after = apply(transaction, job, rendezvous.register, registration=without_log)
    stored = after.rendezvous.replicas.get(registration.replica)
    if registration.log is None and after is job:
        job.unchanging[registration.replica] = registration
    if registration.log and stored == replace(without_log, key=""):
        transaction.execute(
            _UPSERT_LOG,
            job_key=job.key,
            replica=registration.replica,
            instance=registration.instance,
            log=registration.log,
            stored_at=now,
        )
        transaction.execute(_REMOVE_OLD_LOGS, key=job.key, limit=MAX_LOGS)
    return after


def expire(transaction: Transaction, job_id: str, instances: Mapping[int, str], now: float) -> StoredJob:
    """Remove the replicas of these agents, whose heartbeats have expired."""
    job = lock_or_create(transaction, job_id, now)
    overdue = [
        index
        for index, instance in instances.items()
        if index in job.rendezvous.replicas and job.rendezvous.replicas[index].instance == instance
    ]
    return apply(transaction, job, rendezvous.expire, indices=overdue)


def logs(transaction: Transaction, job: StoredJob) -> dict[tuple[int, str], str]:
    """Return the logs of a job, by replica and its agent."""
    rows = transaction.all(_LOGS, key=job.key)
    return {(replica, instance): log for replica, instance, log in rows}


def add_heartbeats(transaction: Transaction, received: Received) -> None:
    """Count the heartbeats that this service has received since it last did."""
    # In order, so that two services lock rows in the same order.
    for (key, replica), instance in sorted(received.items()):
        transaction.execute(_ADD, key=key, replica=replica, instance=instance)


def count_heartbeats(transaction: Transaction) -> Counts:
    """Return the heartbeats that all services have counted."""
    return {(key, replica): (instance, beats) for key, replica, instance, beats in transaction.all(_COUNTS)}


def remove_ended_heartbeats(transaction: Transaction) -> None:
    """Remove the counts of jobs that are complete or deleted; a service may add some after the end."""
    transaction.execute(_REMOVE_ENDED)


_LOGS = Sql("SELECT replica, instance, log FROM logs WHERE job_key = :key")
_UPSERT_LOG = upsert("logs", "job_key, replica", "instance", "log", "stored_at")
_REMOVE_OLD_LOGS = Sql(
    """
    DELETE FROM logs WHERE job_key = :key AND replica IN (
        SELECT replica FROM logs WHERE job_key = :key
        ORDER BY stored_at DESC, replica LIMIT 1000000 OFFSET :limit
    )
    """
)
_ADD = Sql(
    """
    INSERT INTO heartbeats (job_key, replica, instance, beats) VALUES (:key, :replica, :instance, 1)
    ON CONFLICT (job_key, replica) DO UPDATE SET
        instance = excluded.instance, beats = heartbeats.beats + 1
    """
)
_REMOVE_ENDED = Sql("DELETE FROM heartbeats WHERE job_key NOT IN (SELECT key FROM jobs WHERE complete = 0)")
_COUNTS = Sql("SELECT job_key, replica, instance, beats FROM heartbeats")
