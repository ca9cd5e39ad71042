"""Replicas: their registrations, and the heartbeats that keep them registered."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from adascale_api.store.dialects import insert_into
from adascale_api.store.jobs import Job, Transition, apply, lock, lock_or_create
from adascale_api.tables import heartbeats
from adascale_core import rendezvous
from adascale_core.messages import Registration
from adascale_core.names import HEARTBEAT_TIMEOUT


@dataclass(frozen=True)
class Replica:
    """A registered replica.

    Args:
        registration: its last registration.
        heartbeat_at: when the service received its last heartbeat, in seconds since 1970; None if unknown.
    """

    registration: Registration
    heartbeat_at: float | None


def list_replicas(connection: Connection, job: Job) -> list[Replica]:
    """Return the registered replicas of a job, by rank."""
    query = select(heartbeats.c.rank, heartbeats.c.received_at).where(heartbeats.c.job_key == job.key)
    received_at = {row.rank: row.received_at for row in connection.execute(query)}
    return [
        Replica(registration, received_at.get(rank))
        for rank, registration in sorted(job.rendezvous.replicas.items())
    ]


def register(connection: Connection, job_id: str, registration: Registration, now: float) -> Transition:
    """Store a registration and its heartbeat. Creates the job if it does not exist."""
    job = lock_or_create(connection, job_id, now)
    transition = apply(connection, job, partial(rendezvous.register, registration=registration))
    current = transition.rendezvous.replicas.get(registration.rank)
    # A replaced agent may still send heartbeats; they do not keep its successor alive.
    if current is not None and current.instance == registration.instance:
        expires_at = None if current.state in rendezvous.EXITED_STATES else now + HEARTBEAT_TIMEOUT
        connection.execute(
            _upsert_heartbeat(connection.dialect.name),
            {"job_key": job.key, "rank": current.rank, "received_at": now, "expires_at": expires_at},
        )
    return transition


def any_expired(connection: Connection, now: float) -> bool:
    """Whether a heartbeat has expired."""
    return connection.execute(_expired.limit(1), {"now": now}).first() is not None


def remove_expired(connection: Connection, now: float) -> list[str]:
    """Remove the replicas whose heartbeat has expired, and return the ids of the jobs that changed."""
    expired: dict[int, list[int]] = {}
    for key, rank in connection.execute(_expired, {"now": now}):
        expired.setdefault(key, []).append(rank)
    changed = []
    for key, ranks in expired.items():
        job = lock(connection, key)
        if apply(connection, job, partial(rendezvous.expire, ranks=ranks)).changed:
            changed.append(job.id)
        # A complete job keeps its replicas, but their heartbeats do not expire a second time.
        connection.execute(
            update(heartbeats)
            .where(heartbeats.c.job_key == key, heartbeats.c.rank.in_(ranks))
            .values(expires_at=None)
        )
    return changed


_expired = select(heartbeats.c.job_key, heartbeats.c.rank).where(heartbeats.c.expires_at < bindparam("now"))


@cache  # building the statement takes longer than running it
def _upsert_heartbeat(dialect: str) -> Any:
    statement = insert_into(heartbeats, dialect)
    return statement.on_conflict_do_update(
        index_elements=["job_key", "rank"],
        set_={"received_at": statement.excluded.received_at, "expires_at": statement.excluded.expires_at},
    )
