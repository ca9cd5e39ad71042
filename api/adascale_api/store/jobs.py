"""Jobs: their declaration, and the state of their rendezvous."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from sqlalchemy import Connection, Row, bindparam, delete, insert, select, update

from adascale_api.rendezvous_text import rendezvous_from_text, rendezvous_to_text
from adascale_api.store.dialects import insert_into
from adascale_api.tables import deleted_jobs, heartbeats, jobs, reports
from adascale_core import rendezvous
from adascale_core.errors import AdaScaleError
from adascale_core.messages import Allocation, AllocationView, JobSpec
from adascale_core.rendezvous import Rendezvous


class JobNotFoundError(AdaScaleError):
    """The job does not exist."""

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"job {job_id} does not exist: its first report, allocation, replica or declaration creates it"
        )


@dataclass(frozen=True)
class Job:
    """A stored job, without its reports and heartbeats."""

    key: int
    id: str
    created_at: float
    version: int
    spec: JobSpec | None
    rendezvous: Rendezvous

    @property
    def view(self) -> AllocationView:
        """The job's generations."""
        return self.rendezvous.view(self.version)


class TransitionRule(Protocol):
    """A function of the core that returns the next state of a rendezvous, given the job's spec."""

    def __call__(self, state: Rendezvous, /, *, declared: JobSpec | None) -> Rendezvous:
        """Return the next state."""
        ...


@dataclass(frozen=True)
class Transition:
    """The state of a job's rendezvous after a rule was applied, and whether it changed."""

    rendezvous: Rendezvous
    version: int
    changed: bool

    @property
    def view(self) -> AllocationView:
        """The job's generations."""
        return self.rendezvous.view(self.version)


# -- reading --------------------------------------------------------------------------------------------


def find_job(connection: Connection, job_id: str) -> Job:
    """Return a job.

    Raises:
        JobNotFoundError: it does not exist.
    """
    row = connection.execute(_job_by_id, {"id": job_id}).one_or_none()
    if row is None:
        raise JobNotFoundError(job_id)
    return _job(row)


def list_jobs(connection: Connection, after: str, limit: int) -> list[Job]:
    """Return at most `limit` jobs with an id greater than `after`, by id."""
    query = select(jobs).where(jobs.c.id > after).order_by(jobs.c.id).limit(limit)
    return [_job(row) for row in connection.execute(query)]


def versions(connection: Connection, job_ids: Iterable[str]) -> dict[str, int]:
    """Return the versions of the given jobs that exist."""
    query = select(jobs.c.id, jobs.c.version).where(jobs.c.id.in_(list(job_ids)))
    return {row.id: row.version for row in connection.execute(query)}


# -- writing --------------------------------------------------------------------------------------------


def declare(connection: Connection, job_id: str, spec: JobSpec, now: float) -> bool:
    """Store a job's spec, and return whether the job is new."""
    exists = connection.execute(_job_by_id, {"id": job_id}).one_or_none() is not None
    job = lock_or_create(connection, job_id, now)
    connection.execute(update(jobs).where(jobs.c.key == job.key).values(spec=spec.to_json()))
    return not exists


def allocate(connection: Connection, job_id: str, allocation: Allocation, now: float) -> Transition:
    """Store a job's desired allocation. Creates the job if it does not exist.

    Raises:
        StaleAllocationError: a newer allocation is desired already.
    """
    job = lock_or_create(connection, job_id, now)
    return apply(connection, job, partial(rendezvous.allocate, allocation=allocation))


def delete_job(connection: Connection, job_id: str) -> None:
    """Delete a job with its reports and heartbeats.

    Raises:
        JobNotFoundError: it does not exist.
    """
    job = find_job(connection, job_id)
    connection.execute(delete(deleted_jobs).where(deleted_jobs.c.id == job_id))
    connection.execute(insert(deleted_jobs).values(id=job_id, version=job.version))
    for table in (reports, heartbeats):
        connection.execute(delete(table).where(table.c.job_key == job.key))
    connection.execute(delete(jobs).where(jobs.c.key == job.key))


# -- for the other modules of the store -----------------------------------------------------------------


def lock_or_create(connection: Connection, job_id: str, now: float) -> Job:
    """Return a job, locked until the end of the transaction. Creates the job if it does not exist."""
    row = connection.execute(_job_by_id_for_update, {"id": job_id}).one_or_none()
    if row is None:
        last_version = connection.scalar(select(deleted_jobs.c.version).where(deleted_jobs.c.id == job_id))
        connection.execute(
            insert_into(jobs, connection.dialect.name)
            .values(
                id=job_id,
                created_at=now,
                # From the clock, so that versions rise also for agents that outlive a lost database.
                version=max(int(1000 * now), 0 if last_version is None else last_version + 1),
                rendezvous=rendezvous_to_text(Rendezvous()),
            )
            .on_conflict_do_nothing(index_elements=["id"])
        )
        row = connection.execute(_job_by_id_for_update, {"id": job_id}).one()
    return _job(row)


def lock(connection: Connection, key: int) -> Job:
    """Return a job by its key, locked until the end of the transaction."""
    return _job(connection.execute(select(jobs).where(jobs.c.key == key).with_for_update()).one())


def apply(connection: Connection, job: Job, rule: TransitionRule) -> Transition:
    """Apply a rule to a locked job's rendezvous, and store the next state if it differs."""
    after = rule(job.rendezvous, declared=job.spec)
    if after == job.rendezvous:
        return Transition(job.rendezvous, job.version, changed=False)
    version = job.version + 1
    connection.execute(
        update(jobs)
        .where(jobs.c.key == job.key)
        .values(version=version, rendezvous=rendezvous_to_text(after))
    )
    return Transition(after, version, changed=True)


_job_by_id = select(jobs).where(jobs.c.id == bindparam("id"))
_job_by_id_for_update = _job_by_id.with_for_update()


def _job(row: Row[Any]) -> Job:
    spec = JobSpec.from_json(row.spec) if row.spec else None
    return Job(row.key, row.id, row.created_at, row.version, spec, rendezvous_from_text(row.rendezvous))
