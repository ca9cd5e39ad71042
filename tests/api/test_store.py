"""What is kept, against a plain model of it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from adascale_api import store
from adascale_api.database import Database
from adascale_api.state import state_from_text, state_to_text
from adascale_api.store import UnknownJobError
from adascale_core import rendezvous
from adascale_core.messages import Allocation, GainReport, JobSpec, ReplicaState, StepTime
from adascale_core.names import HEARTBEAT_TIMEOUT
from adascale_core.rendezvous import Rendezvous
from api.client import a_registration, a_report

T = TypeVar("T")
numbers = count()


class Kept:
    """A database, used a transaction at a time."""

    def __init__(self, folder: Path) -> None:
        self._database = Database(f"sqlite:///{folder / 'service.db'}")

    def read(self, query: Callable[[Connection], T]) -> T:
        return asyncio.run(self._database.read(query))

    def write(self, operation: Callable[[Connection], T]) -> T:
        return asyncio.run(self._database.write(operation))

    def close(self) -> None:
        asyncio.run(self._database.close())


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    database = Kept(tmp_path)
    yield database
    database.close()


def a_job() -> str:
    return f"store.job-{next(numbers)}"


few = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
keys = st.tuples(st.integers(1, 3), st.integers(0, 30))
plans = st.tuples(st.integers(1, 3), st.sampled_from([1, 8, 2**20]), st.integers(1, 2))
times = st.one_of(st.just(0.0), st.just(1e-300), st.floats(1e-9, 1e6))
reports = st.builds(
    lambda key, plan, time: a_report(
        key[1], generation=key[0], replicas=plan[0], local_bsz=plan[1], accumulation=plan[2], step_time=time
    ),
    keys,
    plans,
    times,
)
requests = st.lists(st.lists(reports, min_size=1, max_size=8), min_size=1, max_size=10)


def first_of_each(posted: list[list[GainReport]]) -> list[GainReport]:
    """The reports that count, in order of arrival."""
    known: dict[tuple[int, int], GainReport] = {}
    for request in posted:
        for report in request:
            known.setdefault((report.generation, report.step), report)
    return list(known.values())


def in_order(told: list[GainReport]) -> list[GainReport]:
    return sorted(told, key=lambda report: (report.generation, report.step))


@given(requests, st.integers(1, 40))
@few
def test_reports_count_once_and_are_found_by_generation_and_step(
    kept: Kept, posted: list[list[GainReport]], points: int
) -> None:
    job_id = a_job()
    stored = 0
    for request in posted:
        done = kept.write(partial(store.record, job_id=job_id, told=request, now=0.0))
        assert done.stored + done.repeated == len(request)
        stored += done.stored
    expected = in_order(first_of_each(posted))
    job = kept.read(partial(store.find_job, job_id=job_id))
    assert kept.read(partial(store.latest_report, job=job)) == expected[-1]
    assert kept.read(store.latest_reports)[job_id] == expected[-1]
    history = kept.read(partial(store.history, job=job, points=points))
    assert stored == history.total == len(expected)
    assert len(history.reports) <= min(points, len(expected))
    assert points < len(expected) or history.reports == expected
    assert history.reports == [report for report in expected if report in history.reports]
    assert history.reports[-1] == expected[-1]
    assert points == 1 or history.reports[0] == expected[0]


@given(st.integers(3, 3000), st.integers(3, 60))
@few
def test_the_points_of_a_history_are_evenly_spread(kept: Kept, total: int, points: int) -> None:
    job_id = a_job()
    kept.write(partial(store.record, job_id=job_id, told=[a_report(step) for step in range(total)], now=0.0))
    job = kept.read(partial(store.find_job, job_id=job_id))
    steps = [report.step for report in kept.read(partial(store.history, job=job, points=points)).reports]
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) <= 2 * max(1, total // (len(steps) - 1)) + 1


@given(requests)
@few
def test_a_step_time_is_the_median_over_the_latest_reports_of_its_plan(
    kept: Kept, posted: list[list[GainReport]]
) -> None:
    job_id = a_job()
    for request in posted:
        kept.write(partial(store.record, job_id=job_id, told=request, now=0.0))
    measured: dict[tuple[int, int, int], list[float]] = {}
    for report in first_of_each(posted):
        if report.step_time >= 1e-9:
            plan = (report.replicas, report.local_bsz, report.accumulation)
            measured.setdefault(plan, []).append(report.step_time)
    job = kept.read(partial(store.find_job, job_id=job_id))
    assert kept.read(partial(store.step_times, job=job)) == [
        StepTime(*plan, median(seconds), len(seconds)) for plan, seconds in sorted(measured.items())
    ]


def test_a_step_time_forgets_all_but_the_latest_fifty_reports(kept: Kept) -> None:
    job_id = a_job()
    told = [a_report(step, step_time=float(step)) for step in range(1, 201)]
    other = [a_report(step, step_time=1.0, local_bsz=16) for step in range(201, 281)]
    kept.write(partial(store.record, job_id=job_id, told=[*told, *other], now=0.0))
    job = kept.read(partial(store.find_job, job_id=job_id))
    assert kept.read(partial(store.step_times, job=job)) == [
        StepTime(2, 8, 1, median(range(151, 201)), 50),
        StepTime(2, 16, 1, 1.0, 50),
    ]


@pytest.mark.parametrize(
    "ask",
    [store.step_times, store.latest_report, partial(store.history, points=10)],
    ids=["step_times", "latest_report", "history"],
)
def test_reading_takes_no_longer_the_more_reports_there_are(
    kept: Kept, ask: Callable[[Connection, store.Job], object]
) -> None:
    """By the instructions of SQLite's machine, which are the same on any computer."""

    def instructions(connection: Connection) -> int:
        job = store.find_job(connection, "a.b")
        hundreds = count()
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.set_progress_handler(lambda: next(hundreds) and None, 100)
        ask(connection, job)
        driver.set_progress_handler(None, 0)
        return next(hundreds)

    spent = []
    for steps in (range(1000), range(1000, 10_000)):
        told = [a_report(step, local_bsz=8 + step % 3) for step in steps]
        kept.write(partial(store.record, job_id="a.b", told=told, now=0.0))
        spent.append(kept.read(instructions))
    few_reports, many_reports = spent
    assert many_reports <= few_reports * 1.5 + 10


def test_step_times_and_the_latest_report_are_found_by_index(kept: Kept) -> None:
    """Whatever the number of reports: nothing is scanned, nothing is sorted."""

    def explain(connection: Connection) -> list[str]:
        told = []
        for query in (store._next_plan, store._latest_report, store._first_report, store._report_count):
            text = query.compile(connection, compile_kwargs={"render_postcompile": True})
            parameters = [0] * len(text.params)
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", tuple(parameters))
            told += [row.detail for row in plan]
        return told

    plans = kept.read(explain)
    assert all(plan.startswith("SEARCH reports USING") for plan in plans), plans


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ReplicaState), st.integers(0, 3)), max_size=12))
@few
def test_a_state_comes_back_from_the_database_as_it_was(
    kept: Kept, told: list[tuple[int, ReplicaState, int]]
) -> None:
    state = rendezvous.allocate(Rendezvous(), Allocation(1, 2))
    job_id = a_job()
    allocate = partial(store.allocate, job_id=job_id, allocation=Allocation(1, 2), now=0.0)
    versions = [kept.write(allocate).version]
    for rank, replica_state, generation in told:
        registration = a_registration(rank, replica_state, generation=generation)
        after = rendezvous.register(state, registration)
        done = kept.write(partial(store.register, job_id=job_id, registration=registration, now=0.0))
        assert done.state == after
        assert done.changed is (after != state)
        versions.append(done.version)
        assert versions[-1] - versions[-2] == int(done.changed)
        state = after
        assert state_from_text(state_to_text(state)) == state
    assert kept.read(partial(store.find_job, job_id=job_id)).state == state


@contextmanager
def two_replicas_running(kept: Kept) -> Iterator[str]:
    """A job that trains on two replicas, last heard of at 100 and 110."""
    job_id = a_job()
    kept.write(partial(store.allocate, job_id=job_id, allocation=Allocation(1, 2), now=90.0))
    for rank, now in ((0, 100.0), (1, 110.0)):
        hear(kept, job_id, rank, ReplicaState.WAITING, now)
    for rank, now in ((0, 100.0), (1, 110.0)):
        hear(kept, job_id, rank, ReplicaState.RUNNING, now)
    yield job_id
    kept.write(partial(store.remove, job_id=job_id))


def hear(
    kept: Kept, job_id: str, rank: int, replica_state: ReplicaState, now: float, instance: str = ""
) -> None:
    generation = 0 if replica_state is ReplicaState.WAITING else 1
    told = a_registration(rank, replica_state, generation=generation, instance=instance or f"agent-{rank}")
    kept.write(partial(store.register, job_id=job_id, registration=told, now=now))


def forget(kept: Kept, now: float) -> list[str]:
    """The jobs that changed when the silent were forgotten, as the service does it."""
    if not kept.read(partial(store.any_silent, now=now)):
        return []
    return kept.write(partial(store.forget_silent, now=now))


def test_a_silent_replica_is_forgotten_and_breaks_the_generation(kept: Kept) -> None:
    with two_replicas_running(kept) as job_id:
        assert forget(kept, 100.0 + HEARTBEAT_TIMEOUT) == []
        assert forget(kept, 100.0 + HEARTBEAT_TIMEOUT + 0.1) == [job_id]
        job = kept.read(partial(store.find_job, job_id=job_id))
        assert job.state.broken
        assert list(job.state.replicas) == [1]
        assert forget(kept, 100.0 + HEARTBEAT_TIMEOUT + 0.2) == []
        assert forget(kept, 200.0) == [job_id]
        assert forget(kept, 300.0) == []


def test_a_sign_of_life_keeps_a_replica_and_changes_nothing(kept: Kept) -> None:
    with two_replicas_running(kept) as job_id:
        before = kept.read(partial(store.find_job, job_id=job_id))
        for rank in (0, 1):
            hear(kept, job_id, rank, ReplicaState.RUNNING, 125.0)
        assert forget(kept, 125.0 + HEARTBEAT_TIMEOUT) == []
        assert kept.read(partial(store.find_job, job_id=job_id)) == before
        seen = kept.read(partial(store.replicas, job=before))
        assert [replica.seen_at for replica in seen] == [125.0, 125.0]


def test_a_replaced_agent_gives_no_sign_of_life_for_the_one_in_its_place(kept: Kept) -> None:
    with two_replicas_running(kept) as job_id:
        hear(kept, job_id, 0, ReplicaState.WAITING, 120.0, instance="another")
        hear(kept, job_id, 0, ReplicaState.RUNNING, 139.0)
        hear(kept, job_id, 1, ReplicaState.RUNNING, 139.0)
        assert forget(kept, 120.0 + HEARTBEAT_TIMEOUT + 0.1) == [job_id]
        job = kept.read(partial(store.find_job, job_id=job_id))
        assert 0 not in job.state.replicas


@pytest.mark.parametrize(
    "replica_state", [ReplicaState.FAILED, ReplicaState.TERMINATED, ReplicaState.FINISHED]
)
def test_an_agent_that_has_left_is_not_expected_to_be_heard(kept: Kept, replica_state: ReplicaState) -> None:
    with two_replicas_running(kept) as job_id:
        hear(kept, job_id, 0, replica_state, 111.0)
        hear(kept, job_id, 1, replica_state, 111.0)
        assert forget(kept, 1000.0) == []
        job = kept.read(partial(store.find_job, job_id=job_id))
        assert [told.state for told in job.state.replicas.values()] == [replica_state, replica_state]


def test_a_complete_job_forgets_nobody(kept: Kept) -> None:
    with two_replicas_running(kept) as job_id:
        hear(kept, job_id, 0, ReplicaState.FINISHED, 111.0)
        assert forget(kept, 1000.0) == []
        assert not kept.read(partial(store.any_silent, now=2000.0))


def test_a_version_is_never_given_again_though_the_job_is_removed(kept: Kept) -> None:
    job_id = a_job()
    seen: list[int] = []
    for generation in (1, 1, 1):
        for replicas in (1, 2):
            allocation = Allocation(generation + replicas, replicas)
            done = kept.write(partial(store.allocate, job_id=job_id, allocation=allocation, now=0.0))
            seen.append(done.version)
        kept.write(partial(store.remove, job_id=job_id))
        with pytest.raises(UnknownJobError):
            kept.read(partial(store.find_job, job_id=job_id))
    assert seen == sorted(set(seen))


def test_a_generation_keeps_what_was_declared_when_it_became_active(kept: Kept) -> None:
    job = a_job()
    first, second = JobSpec(8, 16, (4, 8), max_replicas=4), JobSpec(8, 64, (8, 16), max_replicas=4)

    def declare(spec: JobSpec) -> None:
        kept.write(partial(store.declare, job_id=job, spec=spec, now=0.0))

    def allocate(generation: int, replicas: int) -> None:
        desired = Allocation(generation, replicas)
        kept.write(partial(store.allocate, job_id=job, allocation=desired, now=0.0))

    def register(
        rank: int, replica_state: ReplicaState = ReplicaState.WAITING, generation: int = 0, port: int = 1
    ) -> None:
        told = a_registration(rank, replica_state, generation=generation, port=port)
        kept.write(partial(store.register, job_id=job, registration=told, now=0.0))

    def active_spec() -> JobSpec | None:
        active = kept.read(partial(store.find_job, job_id=job)).allocation.active
        return active.spec if active is not None else None

    declare(first)
    allocate(1, 1)
    assert active_spec() is None
    register(0)
    assert active_spec() == first
    version = kept.read(partial(store.find_job, job_id=job)).version
    declare(second)
    register(0, ReplicaState.RUNNING, generation=1, port=2)
    allocate(2, 2)
    assert active_spec() == first, "declared after it began"
    register(1)
    assert active_spec() == second
    assert kept.read(partial(store.find_job, job_id=job)).version > version
