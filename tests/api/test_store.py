"""The store, compared with a plain model of it."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adascale_api.data.database import Database, open_database
from adascale_api.data.job import JobCache, StoredJob, UnreadableJobError
from adascale_api.data.sql import Connections, Row, Sql, Transaction
from adascale_api.data.store import heartbeats, jobs, replica_seconds
from adascale_api.data.store import reports as report_store
from adascale_api.data.store.jobs import JobNotFoundError
from adascale_api.data.tables import OF_A_JOB
from adascale_api.routes.jobs import view_reader
from adascale_api.service.service import Service, Settings, delete_in_pieces, remove_old_jobs
from adascale_api.service.summaries import summary_reader
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.rendezvous import rendezvous
from adascale_core.rendezvous.rendezvous import Rendezvous
from api.client import a_registration, a_report
from support.postgresql import PostgresqlServer

T = TypeVar("T")
numbers = count()


NOW = 1.77e9


class Store:
    """A database, with one transaction per call."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)

    def read(self, query: Callable[..., T], **arguments: Any) -> T:
        return asyncio.run(self.database.read(partial(query, **arguments)))

    def write(self, operation: Callable[..., T], **arguments: Any) -> T:
        return asyncio.run(self.database.write(partial(operation, **arguments)))

    def run(self, use: Callable[[Database], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(use(self.database))

    def post(self, job_id: str, new: list[GainReport]) -> tuple[int, int]:
        """Store reports, and return how many were stored and repeated."""
        return self.write(report_store.post, job_id=job_id, new=new, now=NOW)[:2]

    def job(self, job_id: str) -> StoredJob:
        return self.read(jobs.find_job, job_id=job_id)

    def close(self) -> None:
        asyncio.run(self.database.close())


# For tests whose SQL or transactions could differ.
@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "postgresql":
        server: PostgresqlServer = request.getfixturevalue("postgresql")
        url = server.new_database()
    else:
        url = f"sqlite:///{tmp_path / 'service.db'}"
    store = Store(url)
    yield store
    store.close()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'service.db'}")
    yield store
    store.close()


def new_job_id() -> str:
    """Return the id of a job in a namespace of its own, which has a limited number of undeclared jobs."""
    return f"store-{next(numbers):06}.job"


def instructions(transaction: Transaction, run: Callable[[], object]) -> int:
    """Return the hundreds of instructions that SQLite executes, which do not depend on the computer."""
    hundreds = count()
    connection: Any = transaction._connection
    connection.set_progress_handler(lambda: next(hundreds) and None, 100)
    run()
    connection.set_progress_handler(None, 0)
    return next(hundreds)


# The examples of a property share a database, each with a job of its own.
shared_store = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# -- reports --------------------------------------------------------------------------------------------

keys = st.tuples(st.integers(1, 3), st.integers(0, 30))
plans = st.tuples(
    st.integers(1, 3),
    st.sampled_from([1, 8, 2**20]),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from(["", "NVIDIA-H200"]),
)
times = st.one_of(st.just(0.0), st.just(1e-300), st.floats(1e-9, 1e6))
gain_reports = st.builds(
    lambda key, plan, time, sync: a_report(
        key[1],
        generation=key[0],
        replicas=plan[0],
        local_bsz=plan[1],
        accumulation=plan[2],
        nodes=plan[3],
        accelerator=plan[4],
        step_time=time,
        sync_time=sync,
    ),
    keys,
    plans,
    times,
    st.none() | st.floats(0, 1e6),
)
requests = st.lists(st.lists(gain_reports, min_size=1, max_size=8), min_size=1, max_size=10)


def latest_report(transaction: Transaction, job: StoredJob) -> GainReport | None:
    return report_store.latest_reports(transaction, [job.id])(job.id)


def step_times(transaction: Transaction, job: StoredJob) -> list[StepTime]:
    return report_store.step_times(transaction, [job.id])(job.id)


def listed(store: Store) -> list[str]:
    """Return the ids of all jobs that can be read."""
    found, _ = store.read(jobs.list_jobs, after="", limit=10_000, reader=summary_reader)
    return [summary.id for summary in found]


def without_repetitions(posted: list[list[GainReport]]) -> list[GainReport]:
    """The first report of each generation and step, in order of arrival."""
    first: dict[tuple[int, int], GainReport] = {}
    for request in posted:
        for report in request:
            first.setdefault((report.generation, report.step), report)
    return list(first.values())


@given(requests, st.integers(1, 40))
@shared_store
def test_reports_count_once_and_are_ordered_by_generation_and_step(
    store: Store, posted: list[list[GainReport]], points: int
) -> None:
    job_id = new_job_id()
    total = 0
    for request in posted:
        stored, repeated = store.post(job_id, request)
        assert stored + repeated == len(request)
        total += stored
    unique = without_repetitions(posted)
    expected = sorted(unique, key=lambda report: (report.generation, report.step))
    job = store.job(job_id)
    assert store.read(latest_report, job=job) == expected[-1]
    history = store.read(report_store.history, job=job, points=points)
    assert total == history.total == len(expected)
    assert len(history.points) <= min(points, len(expected))
    assert points < len(expected) or history.points == expected
    assert history.points == [report for report in expected if report in history.points]
    assert history.points[-1] == expected[-1]
    assert points == 1 or history.points[0] == expected[0]


@given(st.integers(3, 3000), st.integers(3, 60))
@shared_store
def test_the_points_of_a_history_are_evenly_spread(sqlite_store: Store, total: int, points: int) -> None:
    job_id = new_job_id()
    sqlite_store.post(job_id, [a_report(step) for step in range(total)])
    history = sqlite_store.read(report_store.history, job=sqlite_store.job(job_id), points=points)
    steps = [report.step for report in history.points]
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) <= 2 * max(1, total // (len(steps) - 1)) + 1


@given(requests)
@shared_store
def test_a_step_time_is_the_median_over_the_latest_reports_of_its_plan(
    store: Store, posted: list[list[GainReport]]
) -> None:
    job_id = new_job_id()
    for request in posted:
        store.post(job_id, request)
    measured: dict[tuple[int, int, int, int, str], list[GainReport]] = {}
    for report in without_repetitions(posted):
        if report.step_time >= 1e-9:
            plan = (
                *(report.replicas, report.local_bsz, report.accumulation, report.nodes),
                report.accelerator,
            )
            measured.setdefault(plan, []).append(report)
    expected = []
    for plan, reports in sorted(measured.items()):
        sync = [report.sync_time for report in reports if report.sync_time is not None]
        seconds = median(report.step_time for report in reports)
        sync_time = median(sync) if sync else None
        expected.append(StepTime(*plan[:3], seconds, len(reports), plan[3], sync_time, plan[4]))
    found = store.read(step_times, job=store.job(job_id))
    assert [replace(each, stale=False) for each in found] == expected


def test_a_step_time_covers_the_latest_fifty_reports(sqlite_store: Store) -> None:
    job_id = new_job_id()
    small = [a_report(step, step_time=float(step)) for step in range(1, 201)]
    large = [a_report(step, step_time=1.0, local_bsz=16) for step in range(201, 281)]
    sqlite_store.post(job_id, [*small, *large])
    assert sqlite_store.read(step_times, job=sqlite_store.job(job_id)) == [
        StepTime(2, 8, 1, median(range(151, 201)), 50),
        StepTime(2, 16, 1, 1.0, 50),
    ]


@pytest.mark.parametrize(
    ("replicas", "reports", "later", "stale"),
    [
        (4, 1, 30, False),
        (4, 1, 31, True),
        (4, 3, 90, False),
        (4, 3, 91, True),
        (4, 10, 500, False),
        (1, 1, 500, False),
    ],
)
def test_a_step_time_of_few_reports_at_more_replicas_becomes_stale(
    sqlite_store: Store, replicas: int, reports: int, later: int, stale: bool
) -> None:
    job_id = new_job_id()
    sqlite_store.post(job_id, [a_report(step, replicas=replicas) for step in range(reports)])
    sqlite_store.post(job_id, [a_report(reports + step, replicas=2) for step in range(later)])
    job = sqlite_store.job(job_id)
    found = {each.replicas: each.stale for each in sqlite_store.read(step_times, job=job)}
    assert found == {replicas: stale, 2: False}


def test_a_job_keeps_its_newest_reports_and_an_even_part_of_the_earlier_ones(store: Store) -> None:
    job_id = new_job_id()
    retention = report_store.Retention(newest=100, earlier=50)
    for start in range(0, 4000, 40):
        new = [a_report(step, generation=1 + step // 1500) for step in range(start, start + 40)]
        store.write(report_store.post, job_id=job_id, new=new, now=NOW, retention=retention)
    history = store.read(report_store.history, job=store.job(job_id), points=5000)
    steps = [report.step for report in history.points]
    assert history.total == 4000
    assert len(steps) < retention.limit
    assert steps[0] == 0
    assert steps[-100:] == list(range(3900, 4000))
    earlier = [after - before for before, after in pairwise(steps[:-100])]
    assert len(earlier) >= 50
    # The parts grow with the job, so a gap may span several.
    assert max(earlier) <= 4 * 4000 / 50
    assert store.read(latest_report, job=store.job(job_id)) == a_report(3999, generation=3)
    assert store.read(step_times, job=store.job(job_id))[0].reports == 50


def test_a_generation_without_reports_for_long_has_used_replicas_until_its_last_report(store: Store) -> None:
    job_id, began = new_job_id(), time.time()
    store.write(jobs.allocate, job_id=job_id, allocation=Allocation(1, 2), now=began)
    for rank in (0, 1):
        store.write(jobs.register, job_id=job_id, registration=a_registration(rank), now=began)
    reported = time.time() + 1
    store.write(report_store.post, job_id=job_id, new=[a_report(1)], now=reported)
    for now, end in ((reported + 30, reported + 30), (reported + 1000, reported)):
        (used,) = store.read(jobs.used_replicas, since=began, now=now)
        assert (used.job, used.replicas) == (job_id, 2)
        assert used.end == pytest.approx(end)
        assert began <= used.start <= reported
    store.write(jobs.delete_job, job_id=job_id, now=reported)
    assert store.read(jobs.used_replicas, since=began, now=reported) == []


def test_the_size_of_a_job_does_not_grow_with_its_reports_nor_with_its_batch_plans(store: Store) -> None:
    job_id = new_job_id()
    retention = report_store.Retention(newest=100, earlier=50)
    for start in range(0, 600, 100):
        new = [a_report(step, local_bsz=1 + step) for step in range(start, start + 100)]
        store.write(report_store.post, job_id=job_id, new=new, now=NOW, retention=retention)
    plans = store.read(step_times, job=store.job(job_id))
    assert len(plans) == report_store.MAX_PLANS
    assert max(plan.local_bsz for plan in plans) == 600


def test_the_cost_of_a_query_does_not_grow_with_the_number_of_reports(sqlite_store: Store) -> None:
    queries: dict[str, Callable[[Transaction, StoredJob], object]] = {
        "step_times": step_times,
        "latest_report": latest_report,
        "history": partial(report_store.history, points=10),
    }

    def costs(transaction: Transaction) -> dict[str, int]:
        job = jobs.find_job(transaction, "a.b")
        return {
            name: instructions(transaction, partial(query, transaction, job))
            for name, query in queries.items()
        }

    def post(first: int, last: int) -> None:
        new = [a_report(step, local_bsz=8 + step % 3) for step in range(first, last)]
        for start in range(0, len(new), 500):
            some = new[start : start + 500]
            sqlite_store.write(report_store.post, job_id="a.b", new=some, now=0.0, retention=retention)

    retention = report_store.Retention(newest=100, earlier=100)
    post(0, 1000)
    with_few = sqlite_store.read(costs)
    post(1000, 10_000)
    for name, cost in sqlite_store.read(costs).items():
        assert cost <= with_few[name] * 1.5 + 10, name


def test_the_cost_of_a_page_does_not_grow_with_the_number_of_jobs(sqlite_store: Store) -> None:
    queries: dict[str, Callable[[Transaction], object]] = {
        "list_jobs": partial(jobs.list_jobs, after="", limit=20, reader=summary_reader),
        "views": lambda transaction: jobs.read_jobs(transaction, page, "", view_reader(service)),
    }
    page = [(f"a.{number:04}", "") for number in range(20)]
    service = Service(sqlite_store.database, None, Settings())

    def store_jobs(transaction: Transaction, first: int, last: int) -> None:
        for number in range(first, last):
            job_id = f"a.{number:04}"
            failed = a_registration(0, ReplicaState.FAILED, log="log")
            jobs.declare(transaction, job_id, JobSpec(8), 0.0)
            jobs.register(transaction, job_id, failed, 0.0)
            report_store.post(transaction, job_id, [a_report()], 0.0)

    def costs(transaction: Transaction) -> dict[str, int]:
        return {
            name: instructions(transaction, partial(query, transaction)) for name, query in queries.items()
        }

    sqlite_store.write(store_jobs, first=0, last=50)
    with_few = sqlite_store.read(costs)
    sqlite_store.write(store_jobs, first=50, last=1000)
    for name, cost in sqlite_store.read(costs).items():
        assert cost <= with_few[name] * 1.5 + 10, name


def test_step_times_and_reports_of_many_jobs_are_read_together(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"a.{number}" for number in range(2 * jobs.JOBS_TOGETHER)]
    for job_id in ids:
        sqlite_store.post(job_id, [a_report()])
    service = Service(sqlite_store.database, None, Settings())
    queries = 0

    def count_query(transaction: Transaction, statement: Sql, **parameters: Any) -> list[Row]:
        nonlocal queries
        queries += 1
        return read_all(transaction, statement, **parameters)

    read_all = Transaction.all
    monkeypatch.setattr(Transaction, "all", count_query)
    found = [(job_id, job_id) for job_id in [*ids, "a.missing"]]
    views, missing, last = sqlite_store.read(
        jobs.read_jobs, ids=found, position="", reader=view_reader(service)
    )
    assert [view.id for view in views] == ids
    assert all(view.latest and view.step_times for view in views)
    assert (missing, last) == (["a.missing"], "a.missing")
    # The logs of a job may be large, and are read alone.
    assert queries <= len(ids) + 3 * 3


def test_the_cost_of_thinning_grows_with_the_number_of_reports_and_not_faster(sqlite_store: Store) -> None:
    costs = []
    for kept in (200, 1600):
        retention = report_store.Retention(newest=kept, earlier=kept)
        new = [a_report(step) for step in range(retention.limit)]
        sqlite_store.write(report_store.post, job_id=f"a.{kept}", new=new[:-1], now=0.0, retention=retention)
        thin = partial(report_store.post, job_id=f"a.{kept}", new=new[-1:], now=0.0, retention=retention)
        costs.append(sqlite_store.write(lambda each, thin=thin: instructions(each, partial(thin, each))))
        left = sqlite_store.read(report_store.history, job=sqlite_store.job(f"a.{kept}"), points=10_000)
        assert len(left.points) < retention.limit
    few, many = costs
    assert many < 16 * few


def test_the_rows_of_a_job_are_deleted_with_it(store: Store) -> None:
    job_id = new_job_id()
    store.post(job_id, [a_report(step, local_bsz=1 + step % 7) for step in range(95)])
    key = store.job(job_id).key
    store.write(jobs.delete_job, job_id=job_id, now=1.0)
    assert job_id not in listed(store)
    assert store.read(report_store.latest_reports, ids=[job_id])(job_id) is None
    again = store.post(job_id, [a_report(1)])
    assert again == (1, 0)
    for table in OF_A_JOB:
        count_rows = Sql(f"SELECT count(*) FROM {table} WHERE job_key = :key")
        assert store.read(lambda transaction, query=count_rows: transaction.first(query, key=key)) == (0,)
    assert store.read(report_store.history, job=store.job(job_id), points=9).total == 1


def test_the_reports_of_a_deleted_job_are_removed_in_several_commits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "DELETED_REPORTS", 40)
    job_id, other = new_job_id(), new_job_id()
    store.post(job_id, [a_report(step) for step in range(100)])
    store.post(other, [a_report(step) for step in range(100)])
    assert not store.write(jobs.delete_job, job_id=job_id, now=1.0)
    left = store.read(report_store.history, job=store.job(job_id), points=1000).points
    assert left == [a_report(step) for step in range(40, 100)]
    store.run(lambda database: delete_in_pieces(database, job_id, 1.0))
    with pytest.raises(JobNotFoundError):
        store.job(job_id)
    assert store.post(job_id, [a_report(step) for step in range(100)]) == (100, 0)
    assert len(store.read(report_store.history, job=store.job(other), points=1000).points) == 100


def test_jobs_are_removed_some_time_after_their_last_change_and_report(store: Store) -> None:
    finished, reporting, unfinished = new_job_id(), new_job_id(), new_job_id()
    for job_id in (finished, reporting, unfinished):
        store.write(jobs.allocate, job_id=job_id, allocation=Allocation(1, 1), now=0.0)
    for job_id in (finished, reporting):
        for replica_state in (ReplicaState.WAITING, ReplicaState.RUNNING, ReplicaState.FINISHED):
            generation = 0 if replica_state is ReplicaState.WAITING else 1
            registration = a_registration(0, replica_state, generation=generation)
            store.write(jobs.register, job_id=job_id, registration=registration, now=0.0)
    changed_at = time.time()
    store.write(report_store.post, job_id=reporting, new=[a_report(1)], now=changed_at + 1000)

    def old(finished_before: float, unfinished_before: float) -> set[str]:
        found = store.read(
            jobs.old_jobs,
            finished_before=finished_before,
            unfinished_before=unfinished_before,
            limit=1000,
        )
        return set(found) & {finished, reporting, unfinished}

    assert old(changed_at + 500, 0.0) == {finished}
    assert old(changed_at + 1500, 0.0) == {finished, reporting}
    assert old(0.0, changed_at + 500) == {unfinished}


def test_a_transaction_within_the_handling_of_an_error_is_undone_at_its_end(tmp_path: Path) -> None:
    connector = open_database(f"sqlite:///{tmp_path / 'service.db'}")
    connections = Connections(connector, JobCache(), 1, "writer", writes=True)
    try:
        raise connector.error
    except connector.error:
        with connections.transaction() as transaction:
            jobs.declare(transaction, "a.b", JobSpec(8), 0.0)
    with connections.transaction() as transaction, pytest.raises(JobNotFoundError):
        jobs.find_job(transaction, "a.b")
    connections.close()
    connector.close()


# -- transitions ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ReplicaState), st.integers(0, 3)), max_size=12))
@shared_store
def test_a_rendezvous_is_stored_and_its_version_counts_the_changes(
    store: Store, registered: list[tuple[int, ReplicaState, int]]
) -> None:
    state = rendezvous.allocate(Rendezvous(), Allocation(1, 2))
    job_id = new_job_id()
    versions = [store.write(jobs.allocate, job_id=job_id, allocation=Allocation(1, 2), now=0.0).version]
    for rank, replica_state, generation in registered:
        registration = a_registration(rank, replica_state, generation=generation)
        after = rendezvous.register(state, registration)
        job = store.write(jobs.register, job_id=job_id, registration=registration, now=NOW)
        assert job.rendezvous == after
        versions.append(job.version)
        assert versions[-1] - versions[-2] == int(after != state)
        state = after
        text = StoredJob(1, job_id, 0.0, 1, None, state).rendezvous_text
        assert StoredJob.parse(1, job_id, 0.0, 1, None, text).rendezvous == state
    assert store.job(job_id).rendezvous == state


def test_a_version_is_never_reused_even_after_the_job_is_deleted(store: Store) -> None:
    job_id = new_job_id()
    versions: list[int] = []
    for generation in (1, 1, 1):
        for size in (1, 2):
            allocation = Allocation(generation + size, size)
            versions.append(store.write(jobs.allocate, job_id=job_id, allocation=allocation, now=0.0).version)
        store.write(jobs.delete_job, job_id=job_id, now=0.0)
        with pytest.raises(JobNotFoundError):
            store.job(job_id)
    assert versions == sorted(set(versions))


def test_the_heartbeats_of_jobs_that_have_ended_are_removed(store: Store) -> None:
    training, complete, deleted = (new_job_id() for _ in range(3))
    keys = {}
    for job_id in (training, complete, deleted):
        store.write(jobs.allocate, job_id=job_id, allocation=Allocation(1, 1), now=0.0)
        keys[job_id] = store.job(job_id).key
    for replica_state in (ReplicaState.WAITING, ReplicaState.RUNNING, ReplicaState.FINISHED):
        generation = 0 if replica_state is ReplicaState.WAITING else 1
        registration = a_registration(0, replica_state, generation=generation)
        store.write(jobs.register, job_id=complete, registration=registration, now=0.0)
    store.write(jobs.delete_job, job_id=deleted, now=0.0)
    # By services that do not know yet that the jobs have ended.
    store.write(heartbeats.add, received={(key, 0): "agent-0" for key in keys.values()})
    assert store.read(heartbeats.count).keys() == {(key, 0) for key in keys.values()}

    async def remove(database: Database) -> None:
        await remove_old_jobs(database, Settings(), 0.0)

    store.run(remove)
    assert store.read(heartbeats.count).keys() == {(keys[training], 0)}


def test_logs_are_stored_beside_the_state_and_bounded(store: Store) -> None:
    job_id = new_job_id()
    store.write(jobs.allocate, job_id=job_id, allocation=Allocation(1, 40), now=0.0)
    for rank in range(40):
        failed = a_registration(rank, ReplicaState.FAILED, log=f"log {rank}", exit_code=1)
        store.write(jobs.register, job_id=job_id, registration=failed, now=float(rank))
    job = store.job(job_id)
    assert "log 1" not in job.rendezvous_text
    logs = store.read(jobs.logs, job=job)
    assert logs == {(rank, f"agent-{rank}"): f"log {rank}" for rank in range(40 - jobs.MAX_LOGS, 40)}


def test_an_unreadable_job_harms_itself_only(store: Store) -> None:
    broken, sound = sorted([new_job_id(), new_job_id()])
    for job_id in (broken, sound):
        store.write(jobs.allocate, job_id=job_id, allocation=Allocation(1, 1), now=0.0)
    damage = Sql("UPDATE jobs SET version = version + 1, rendezvous = 'no JSON' WHERE id = :id")
    store.write(lambda transaction: transaction.execute(damage, id=broken))
    with pytest.raises(UnreadableJobError, match="can't be read"):
        store.job(broken)
    with pytest.raises(UnreadableJobError):
        store.write(jobs.allocate, job_id=broken, allocation=Allocation(2, 1), now=0.0)
    assert sound in listed(store)
    assert broken not in listed(store)
    store.write(jobs.delete_job, job_id=broken, now=0.0)
    assert store.write(jobs.allocate, job_id=broken, allocation=Allocation(1, 1), now=0.0).spec is None


def test_the_earliest_agents_are_summed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_seconds, "MAX_AGENTS", 3)
    monkeypatch.setattr(replica_seconds, "MAX_POINTS", 8)
    job_id = f"seconds.job-{next(numbers)}"
    store.write(jobs.allocate, job_id=job_id, allocation=Allocation(1, 1), now=NOW)
    for number in range(40):
        counted = {(job_id, f"agent-{number}"): {"useful": 1.0}, (job_id, "lasting"): {"spare": number + 1.0}}
        store.write(replica_seconds.store, counted=counted, now=NOW + number)
        store.write(replica_seconds.add_points, ids=[job_id], now=NOW + number)
    # What arrives late has smaller numbers.
    store.write(replica_seconds.store, counted={(job_id, "lasting"): {"spare": 3.0}}, now=NOW + 50)
    job = store.job(job_id)
    view = store.read(replica_seconds.goodput, job=job)
    assert {cause: each for cause, each in view.replica_seconds.items() if each} == {
        "useful": 40,
        "spare": 40,
    }
    query = Sql("SELECT count(*) FROM replica_seconds WHERE job_key = :key")
    assert store.read(lambda transaction: transaction.first(query, key=job.key))[0] <= 8
    times = [point.time for point in view.history]
    assert times == sorted(times)
    assert len(times) <= 8
    # Spread over all the time: the last one and those in the middle are there.
    assert view.history[-1].replica_seconds["useful"] >= 30
    assert sum(NOW + 5 < each < NOW + 25 for each in times) >= 2
