"""Jobs: their declaration, the state of their rendezvous, logs, their generations, and the last decision."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from adascale_api.data.job import StoredJob, reading, skip_unreadable
from adascale_api.data.sql import Sql, Transaction, upsert
from adascale_api.data.store import replica_seconds
from adascale_api.data.tables import OF_A_JOB
from adascale_api.errors import FieldError, InvalidInputError, NotFoundError, UnavailableError
from adascale_core.job_id import namespace_of
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration
from adascale_core.messages.replica_seconds import ReplicaSeconds
from adascale_core.messages.reports import GainReport
from adascale_core.rendezvous import rendezvous
from adascale_core.rendezvous.rendezvous import Rendezvous
from adascale_core.views.decision import DecisionView
from adascale_core.views.jobs import GenerationCause, GenerationView, downtime
from adascale_core.views.usage import UsedReplicas

DELETED_REPORTS = 1000
"""Reports of a job that one commit removes, at most 5 MB: other writes wait for it."""
MAX_PAGE = 512 * 1024
"""Bytes of the jobs that are read or answered together, unless a single job has more."""
JOBS_TOGETHER = 25
"""Jobs of which what is small is read together."""
MAX_UNDECLARED = 200
"""Jobs of a namespace that workers have created and the controller has not declared."""
EPOCH = 1_577_836_800.0
"""Seconds since 1970 of the beginning of 2020, before which no job ran."""
LOST_GENERATIONS = 100_000
"""Generations that a job may have had before the service lost its data, or was restored from a backup."""
MAX_GENERATIONS = 1000
"""Generations of a job that are kept, the latest."""
MAX_SILENCE = 60.0
"""Seconds without a report after which a generation that ends is taken to have ended with its last report:
the service, or all replicas, had stopped then."""
MAX_LOGS = 16
"""Logs of a job that are kept, the latest: one shows why a program fails, and all replicas fail alike."""
MAX_USED = 50_000
"""Generations that the use of the cluster is computed from, the latest."""


class JobNotFoundError(NotFoundError):
    """The job does not exist."""

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"job {job_id} does not exist: its first report, allocation, replica or declaration creates it"
        )


TransitionRule = Callable[..., Rendezvous]
"""A function of the core that returns the next state of a rendezvous, given its state and `declared`."""


T = TypeVar("T")
Reader = Callable[[Transaction, Sequence[str]], Callable[[StoredJob], tuple[T, int]]]
"""Reads what is small of some jobs, by their ids, and returns what makes something of one of them, with the
bytes that it has besides the state of the job, approximately."""


# -- reading --------------------------------------------------------------------------------------------


def find_job(transaction: Transaction, job_id: str) -> StoredJob:
    """Return a job."""
    found = transaction.first(_FIND, id=job_id)
    if found is None:
        raise JobNotFoundError(job_id)
    return _load(transaction, job_id, *found)


def incomplete_ids(transaction: Transaction) -> list[str]:
    """Return the ids of all jobs that are not complete."""
    return [job_id for (job_id,) in transaction.all(_INCOMPLETE)]


def list_jobs(
    transaction: Transaction, after: str, limit: int, reader: Reader[T]
) -> tuple[list[T], str | None]:
    """Return at most `limit` jobs with an id greater than `after`, and the next `after`; None at the end."""
    ids = [job_id for (job_id,) in transaction.all(_PAGE, after=after, limit=limit + 1)]
    found, _, last = read_jobs(transaction, [(each, each) for each in ids[:limit]], after, reader)
    return found, last if ids and last != ids[-1] else None


def read_jobs(
    transaction: Transaction, ids: Sequence[tuple[str, str]], position: str, reader: Reader[T]
) -> tuple[list[T], list[str], str]:
    """Return the jobs that have room together, the ids of those that do not exist, and the position.

    `ids` has the position after each. A job that can't be read is logged, and left out.
    """
    found: list[T] = []
    missing: list[str] = []
    used = 0
    for start in range(0, len(ids), JOBS_TOGETHER):
        together = [job_id for job_id, _ in ids[start : start + JOBS_TOGETHER]]
        states = {job_id: state for job_id, *state in transaction.all_of(_FIND_ALL, together)}
        read = reader(transaction, together)
        for job_id, after in ids[start : start + JOBS_TOGETHER]:
            with skip_unreadable():
                if job_id in states:
                    job = _load(transaction, job_id, *states[job_id])
                    made, size = read(job)
                    used += size + len(job.rendezvous_text)
                    if found and used > MAX_PAGE:
                        return found, missing, position
                    found.append(made)
                else:
                    missing.append(job_id)
            position = after
    return found, missing, position


def old_jobs(
    transaction: Transaction, finished_before: float, unfinished_before: float, limit: int
) -> list[str]:
    """Return the ids of at most `limit` jobs without a change or report since these times."""
    rows = transaction.all(
        _OLD, finished_before=finished_before, unfinished_before=unfinished_before, limit=limit
    )
    return [job_id for (job_id,) in rows]


# -- writing --------------------------------------------------------------------------------------------


def declare(transaction: Transaction, job_id: str, spec: JobSpec, now: float) -> bool:
    """Store a job's spec, and return whether the job is new."""
    found = _lock(transaction, job_id)
    job = found or _create(transaction, job_id, now)
    if job.spec != spec:
        state = rendezvous.declare(job.rendezvous, job.spec, spec)
        _change(transaction, replace(job, version=job.version + 1, spec=spec, rendezvous=state))
    return found is None


def allocate(transaction: Transaction, job_id: str, allocation: Allocation, now: float) -> StoredJob:
    """Store a job's desired allocation. Creates the job if it does not exist."""
    job = lock_or_create(transaction, job_id, now)
    return apply(transaction, job, rendezvous.allocate, allocation=allocation)


def register(
    transaction: Transaction,
    job_id: str,
    registration: Registration,
    now: float,
    seconds: ReplicaSeconds = MappingProxyType({}),
) -> StoredJob:
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
    if seconds:
        replica_seconds.store(transaction, {(job_id, registration.agent): seconds}, now)
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


def delete_job(transaction: Transaction, job_id: str, now: float) -> bool:
    """Delete a job and all its rows, and return whether it is deleted.

    Of a job with many reports, only the earliest `DELETED_REPORTS` are removed.
    """
    found = transaction.first(_LOCK, id=job_id)
    if found is None:
        raise JobNotFoundError(job_id)
    key, version = found
    removed = transaction.execute(_REMOVE_REPORTS, key=key, limit=DELETED_REPORTS)
    if removed == DELETED_REPORTS:
        transaction.execute(_KEEP_FEWER, key=key, removed=removed)
        return False
    job = transaction.jobs.pop(job_id, None)
    version = version if job is None else job.version
    transaction.execute(_REMEMBER_VERSION, id=job_id, version=version, deleted_at=now)
    replica_seconds.keep_of_deleted(transaction, key)
    for statement in _DELETE:
        transaction.execute(statement, key=key)
    transaction.changed.discard(job_id)
    transaction.deleted.add(job_id)
    return True


def forget_versions(transaction: Transaction, before: float) -> None:
    """Remove the versions of jobs that were deleted before this time: a new job starts from the clock."""
    transaction.execute(_FORGET_VERSIONS, before=before)


# -- for the other modules of the store -----------------------------------------------------------------


def lock_or_create(transaction: Transaction, job_id: str, now: float) -> StoredJob:
    """Return a job, locked until the end of the transaction. Creates the job if it does not exist."""
    return _lock(transaction, job_id) or _create(transaction, job_id, now)


def lock_for_worker(
    transaction: Transaction, job_id: str, message: Registration | GainReport, now: float
) -> StoredJob:
    """As `lock_or_create`, for a message of a worker, who may create few jobs in a namespace.

    Refuses a generation that the job can't have reached.
    """
    job = _lock(transaction, job_id)
    require_reachable(message, job, now)
    if job is None:
        _require_room(transaction, job_id)
        job = _create(transaction, job_id, now)
    return job


def require_reachable(message: Registration | GainReport, job: StoredJob | None, now: float) -> None:
    """Refuse a generation that the job can't have reached: the controller's next one has to be higher.

    A job reaches at most one per second since it was created, and `LOST_GENERATIONS`, beyond the desired
    one; and one per second since `EPOCH`.
    """
    known, age = 0, 0.0
    if job is not None:
        known = 0 if job.rendezvous.desired is None else job.rendezvous.desired.generation
        age = now - job.created_at
    highest = min(known + int(max(age, 0.0)) + LOST_GENERATIONS, max(int(now - EPOCH), 1))
    for name in ("generation", "assigned", "stepped"):
        generation = getattr(message, name, None) or 0
        if generation > highest:
            expected = f"at most {highest}, the generations that the job can have had until now"
            raise InvalidInputError([FieldError(field=name, got=str(generation), expected=expected)])


def apply(transaction: Transaction, job: StoredJob, rule: TransitionRule, **arguments: Any) -> StoredJob:
    """Apply a rule to a locked job's rendezvous, and return the job, another one if its state differs."""
    after = rule(job.rendezvous, declared=job.spec, **arguments)
    if after == job.rendezvous:
        return job
    changed = replace(job, version=job.version + 1, rendezvous=after)
    _change(transaction, changed)
    if _active(after) != _active(job.rendezvous):
        transaction.activated.add(job.id)
    return changed


def write_changes(transaction: Transaction, now: float) -> None:
    """Write the jobs that the transaction has changed; called before its commit."""
    for job_id in transaction.changed:
        job = transaction.jobs[job_id]
        transaction.execute(
            _UPDATE,
            key=job.key,
            version=job.version,
            spec=job.spec_text,
            rendezvous=job.rendezvous_text,
            complete=int(job.rendezvous.complete),
            now=now,
        )
        if job_id in transaction.activated:
            _record_generation(transaction, job, now)


def _active(state: Rendezvous) -> int:
    """Return the number of the generation that trains; 0 if there is none."""
    if state.active is None or state.broken or state.complete:
        return 0
    return state.active.generation if state.active.replicas else 0


def _record_generation(transaction: Transaction, job: StoredJob, now: float) -> None:
    transaction.execute(_END_GENERATION, key=job.key, now=now, silent=now - MAX_SILENCE)
    state = job.rendezvous
    generation = _active(state)
    if not generation or state.active is None:
        return
    transaction.execute(
        _ADD_GENERATION,
        key=job.key,
        generation=generation,
        replicas=state.active.replicas,
        now=now,
        disruptions=state.disruptions,
        failures=state.failures,
    )
    transaction.execute(_REMOVE_OLD_GENERATIONS, key=job.key, before=generation - MAX_GENERATIONS)


def _change(transaction: Transaction, job: StoredJob) -> None:
    transaction.jobs[job.id] = job
    transaction.changed.add(job.id)


def _lock(transaction: Transaction, job_id: str) -> StoredJob | None:
    """Return a job, locked until the end of the transaction; None if it does not exist."""
    job = transaction.jobs.get(job_id)
    if job is None and (found := transaction.first(_LOCK, id=job_id)):
        job = transaction.jobs[job_id] = _load(transaction, job_id, *found)
    return job


def _create(transaction: Transaction, job_id: str, now: float) -> StoredJob:
    last_version = transaction.first(_DELETED_VERSION, id=job_id)
    # From the clock, so that versions rise also for agents that outlive a lost database.
    version = max(int(1000 * now), 0 if last_version is None else last_version[0] + 1)
    empty = StoredJob(0, job_id, now, version, None, Rendezvous())
    created = transaction.first(
        _CREATE, id=job_id, now=now, version=version, rendezvous=empty.rendezvous_text
    )
    if created is None:
        # Another process created it meanwhile.
        if (job := _lock(transaction, job_id)) is None:
            raise JobNotFoundError(job_id)
        return job
    job = replace(empty, key=created[0])
    _change(transaction, job)
    return job


def _require_room(transaction: Transaction, job_id: str) -> None:
    namespace = namespace_of(job_id)
    prefix = f"{namespace}."
    found = transaction.first(_UNDECLARED, prefix=prefix, length=len(prefix))
    if found is not None and found[0] >= MAX_UNDECLARED:
        raise UnavailableError(
            f"namespace {namespace} has {MAX_UNDECLARED} jobs that were not declared: declare this one, or "
            "delete some of them; nothing was stored"
        )


def _load(transaction: Transaction, job_id: str, key: int, version: int) -> StoredJob:
    """Return the state of a job that has this version, or had it when its row was selected."""
    cached = transaction.cache.get(job_id)
    if cached is not None and cached.key == key and cached.version == version:
        return cached
    row = transaction.first(_LOAD, key=key)
    if row is None:
        raise JobNotFoundError(job_id)
    job = StoredJob.parse(key, job_id, *row)
    transaction.loaded.append(job)
    return job


# -- generations and decisions ---------------------------------------------------------------------------


def generations(transaction: Transaction, job: StoredJob) -> list[GenerationView]:
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
        reason = cause.describe(is_first=not views)
        views.append(GenerationView(generation, replicas, cause, started_at, ended_at, without_step, reason))
    return views


def last_ended_generations(transaction: Transaction, since: float) -> dict[str, int]:
    """Return the last generation that has ended, of each job of which one has ended since a time."""
    return dict(transaction.all(_ENDED, since=since))


def used_replicas(transaction: Transaction, since: float, now: float) -> list[UsedReplicas]:
    """Return the replicas that all jobs have used since a time."""
    rows = transaction.all(_USED, since=since, now=now, silent=now - MAX_SILENCE, limit=MAX_USED)
    return [UsedReplicas(*row) for row in rows]


def store_decision(transaction: Transaction, job_id: str, decision: DecisionView) -> None:
    """Store the decision about a job in place of the last one."""
    job = _lock(transaction, job_id)
    if job is None:
        raise JobNotFoundError(job_id)
    text = json.dumps(decision.to_json(), separators=(",", ":"))
    transaction.execute(_UPSERT_DECISION, job_key=job.key, decision=text)


def find_decision(transaction: Transaction, job: StoredJob) -> DecisionView | None:
    """Return the last decision about a job; None if there is none."""
    row = transaction.first(_FIND_DECISION, key=job.key)
    if row is None:
        return None
    with reading(job.id):
        return DecisionView.from_json(json.loads(row[0]))


_LOAD = Sql("SELECT created_at, version, spec, rendezvous FROM jobs WHERE key = :key")
_FIND = Sql("SELECT key, version FROM jobs WHERE id = :id")
_FIND_ALL = "SELECT id, key, version FROM jobs WHERE id IN ({ids})"
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
_LOCK = Sql("SELECT key, version FROM jobs WHERE id = :id", lock=True)
_PAGE = Sql("SELECT id FROM jobs WHERE id > :after ORDER BY id LIMIT :limit")
_INCOMPLETE = Sql("SELECT id FROM jobs WHERE complete = 0")
_UNDECLARED = Sql("SELECT count(*) FROM jobs WHERE spec IS NULL AND substr(id, 1, :length) = :prefix")
_CREATE = Sql(
    """
    INSERT INTO jobs (id, created_at, changed_at, version, complete, rendezvous)
    VALUES (:id, :now, :now, :version, 0, :rendezvous)
    ON CONFLICT (id) DO NOTHING
    RETURNING key
    """
)
_UPDATE = Sql(
    """
    UPDATE jobs
    SET version = :version, spec = :spec, rendezvous = :rendezvous, complete = :complete, changed_at = :now
    WHERE key = :key
    """
)
_END_GENERATION = Sql(
    """
    UPDATE generations SET ended_at = coalesce((
        SELECT reported_at FROM measurements
        WHERE measurements.job_key = :key AND reported_at >= started_at AND reported_at < :silent
    ), :now)
    WHERE job_key = :key AND ended_at IS NULL
    """
)
_ADD_GENERATION = Sql(
    """
    INSERT INTO generations (job_key, generation, replicas, started_at, disruptions, failures)
    VALUES (:key, :generation, :replicas, :now, :disruptions, :failures)
    ON CONFLICT (job_key, generation) DO NOTHING
    """
)
_REMOVE_OLD_GENERATIONS = Sql("DELETE FROM generations WHERE job_key = :key AND generation <= :before")
_DELETED_VERSION = Sql("SELECT version FROM deleted_jobs WHERE id = :id")
_REMEMBER_VERSION = upsert("deleted_jobs", "id", "version", "deleted_at")
_OLD = Sql(
    """
    SELECT jobs.id FROM jobs LEFT JOIN measurements ON measurements.job_key = jobs.key
    WHERE jobs.changed_at < CASE WHEN complete = 1 THEN :finished_before ELSE :unfinished_before END
    AND coalesce(reported_at, 0) < CASE WHEN complete = 1 THEN :finished_before ELSE :unfinished_before END
    LIMIT :limit
    """
)
_FORGET_VERSIONS = Sql("DELETE FROM deleted_jobs WHERE deleted_at < :before")
_REMOVE_REPORTS = Sql(
    """
    DELETE FROM reports WHERE job_key = :key AND (generation, step) IN (
        SELECT generation, step FROM reports WHERE job_key = :key ORDER BY generation, step LIMIT :limit
    )
    """
)
_KEEP_FEWER = Sql("UPDATE measurements SET kept = kept - :removed WHERE job_key = :key")
_DELETE = [
    *(Sql(f"DELETE FROM {table} WHERE job_key = :key") for table in OF_A_JOB),
    Sql("DELETE FROM jobs WHERE key = :key"),
]
_GENERATIONS = Sql(
    """
    SELECT generation, replicas, started_at, ended_at, disruptions, failures
    FROM generations WHERE job_key = :key ORDER BY generation
    """
)
_ENDED = Sql(
    """
    SELECT jobs.id, max(generation) FROM generations JOIN jobs ON jobs.key = generations.job_key
    WHERE ended_at >= :since GROUP BY jobs.id
    """
)
_STEPS = Sql("SELECT generation, min(time), max(time) FROM reports WHERE job_key = :key GROUP BY generation")
_USED = Sql(
    """
    SELECT jobs.id, replicas, started_at, coalesce(ended_at, CASE
        WHEN reported_at >= started_at AND reported_at < :silent THEN reported_at ELSE :now END)
    FROM generations JOIN jobs ON jobs.key = generations.job_key
    LEFT JOIN measurements ON measurements.job_key = generations.job_key
    WHERE ended_at IS NULL OR ended_at > :since
    ORDER BY started_at DESC LIMIT :limit
    """
)
_UPSERT_DECISION = upsert("decisions", "job_key", "decision")
_FIND_DECISION = Sql("SELECT decision FROM decisions WHERE job_key = :key")
