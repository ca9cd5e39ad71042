"""Group commits, the cache, long polling, and the expiry of heartbeats."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adascale_api.data.database import Database, DatabaseError
from adascale_api.data.job import JobCache, StoredJob, UnreadableJobError
from adascale_api.data.sql import Sql, Transaction
from adascale_api.data.store import jobs, reports
from adascale_api.service.changes import ChangeLog
from adascale_api.service.service import Service, Settings, repeat
from adascale_core.messages import registration as registrations
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.registration import ReplicaState, heartbeat_timeout
from adascale_core.names import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from adascale_core.rendezvous.rendezvous import Rendezvous, StaleAllocationError
from api.client import a_heartbeat, a_registration, a_report
from support.clock import Clock


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'service.db'}"


def with_database(url: str, use: Callable[[Database], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        database = Database(url)
        await use(database)
        await database.close()

    asyncio.run(run())


def test_a_failed_write_does_not_affect_the_others_of_its_commit(url: str) -> None:
    def allocate(transaction: Transaction, generation: int) -> None:
        jobs.allocate(transaction, "a.b", Allocation(generation, 1), 0.0)

    def break_the_table(transaction: Transaction) -> None:
        transaction.execute(Sql("INSERT INTO jobs (id) VALUES ('c.d')"))

    async def use(database: Database) -> None:
        operations: list[Callable[[Transaction], object]] = [
            partial(reports.post, job_id="a.b", new=[a_report(1)], now=0.0),
            partial(allocate, generation=5),
            partial(allocate, generation=4),
            break_the_table,
            partial(reports.post, job_id="a.b", new=[a_report(1), a_report(2)], now=0.0),
        ]
        done = await asyncio.gather(*map(database.write, operations), return_exceptions=True)
        assert isinstance(done[2], StaleAllocationError)
        assert isinstance(done[3], DatabaseError)
        assert isinstance(done[4], tuple)
        assert done[4][:2] == (1, 1)
        job = await database.read(partial(jobs.find_job, job_id="a.b"))
        assert job.rendezvous.desired == Allocation(5, 1)
        assert (await database.read(partial(reports.history, job=job, points=9))).total == 2

    with_database(url, use)


def test_a_cancelled_write_does_not_block_the_next_one(url: str) -> None:
    async def use(database: Database) -> None:
        record = partial(reports.post, job_id="a.b", now=0.0)
        cancelled, other = (
            asyncio.create_task(database.write(partial(record, new=[a_report(n)]))) for n in (1, 2)
        )
        await asyncio.sleep(0)
        cancelled.cancel()
        assert (await other)[0] == 1

    with_database(url, use)


def test_a_failed_write_changes_no_version_and_the_next_one_succeeds(url: str) -> None:
    async def use(database: Database) -> None:
        first = Allocation(1, 1)
        before = await database.write(partial(jobs.allocate, job_id="a.b", allocation=first, now=0.0))

        def fail(transaction: Transaction) -> None:
            jobs.allocate(transaction, "a.b", Allocation(2, 1), 0.0)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await database.write(fail)
        assert database.cached("a.b") == before
        again = await database.write(partial(jobs.allocate, job_id="a.b", allocation=first, now=0.0))
        assert again == before

    with_database(url, use)


def fail_by_a_full_disk(_transaction: Transaction) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def test_a_full_disk_is_noticed_until_something_can_be_written(url: str) -> None:
    async def use(database: Database) -> None:
        with pytest.raises(DatabaseError, match="disk is full"):
            await database.write(fail_by_a_full_disk)
        assert database.is_full
        await database.check()
        assert not database.is_full

    with_database(url, use)


def fail(*_of: object) -> None:
    raise ZeroDivisionError


def test_writes_are_answered_and_all_is_closed_when_a_listener_fails(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def write(database: Database) -> None:
        database.listen(fail, fail)
        for generation in (1, 2):
            allocation = Allocation(generation, 1)
            await database.write(partial(jobs.allocate, job_id="a.b", allocation=allocation, now=0.0))

    async def read(database: Database) -> None:
        job = await database.read(partial(jobs.find_job, job_id="a.b"))
        assert job.rendezvous.desired == Allocation(2, 1)

    with_database(url, write)
    assert "what waits for it was not notified" in caplog.text
    # Refused while another process, or a connection that was left open, has the file.
    with_database(url, read)


def test_writes_succeed_again_after_a_commit_that_failed_unexpectedly(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(_error: Exception) -> Any:
        raise ZeroDivisionError("no meaning")

    async def use(database: Database) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(database.connector, "failure", break_down)
            with pytest.raises(DatabaseError, match="no meaning; whether it was stored is unknown"):
                await database.write(fail_by_a_full_disk)
        await database.write(partial(jobs.allocate, job_id="a.b", allocation=Allocation(1, 1), now=0.0))

    with_database(url, use)


def test_of_the_writes_of_a_commit_each_sees_the_changes_of_the_last(url: str) -> None:
    async def use(database: Database) -> None:
        allocations = [Allocation(generation, 1) for generation in (1, 2, 3)]
        done = await asyncio.gather(
            *(
                database.write(partial(jobs.allocate, job_id="a.b", allocation=allocation, now=5.0))
                for allocation in allocations
            )
        )
        versions = [job.version for job in done]
        assert versions == [versions[0], versions[0] + 1, versions[0] + 2]
        assert database.cached("a.b") == done[-1]
        database.cache.clear()
        assert await database.read(partial(jobs.find_job, job_id="a.b")) == done[-1]

    with_database(url, use)


def a_job(job_id: str, version: int, replicas_count: int = 0) -> StoredJob:
    state = Rendezvous(
        replicas={rank: a_registration(rank, ReplicaState.RUNNING) for rank in range(replicas_count)}
    )
    return StoredJob(1, job_id, 0.0, version, None, state)


def test_the_cache_is_bounded_in_bytes() -> None:
    cache = JobCache(max_bytes=1_000_000)
    for number in range(1000):
        cache.put(a_job(f"a.{number}", 1))
    assert sum(cache.get(f"a.{number}") is not None for number in range(1000)) <= 1_000_000 // 2048
    assert cache.get("a.999") is not None
    cache.put(a_job("a.large", 1, replicas_count=1024))
    assert cache.get("a.large") is None, "it is larger than the cache"
    assert cache.get("a.999") is not None
    for number in range(50):
        cache.put(a_job("a.changes", number, replicas_count=number))
    cached = cache.get("a.changes")
    assert cached is not None
    assert cached.version == 49
    assert cache.get("a.999") is not None, "each state of a job replaces the last"


def test_a_state_that_was_read_before_a_change_does_not_enter_the_cache() -> None:
    cache = JobCache()
    changes = cache.changes
    cache.put(a_job("a.b", 2))
    cache.add([a_job("a.b", 1)], changes)
    cached = cache.get("a.b")
    assert cached is not None
    assert cached.version == 2
    changes = cache.changes
    cache.remove("a.b")
    cache.add([a_job("a.b", 2)], changes)
    assert cache.get("a.b") is None
    cache.add([a_job("a.b", 2)], cache.changes)
    assert cache.get("a.b") is not None


def test_a_notification_without_a_change_does_not_end_a_wait_and_one_of_a_change_does() -> None:
    async def run() -> None:
        log, is_changed = ChangeLog(), False

        async def has_changed() -> bool:
            return is_changed

        waiter = asyncio.create_task(log.wait_until(has_changed, "a", 60.0))
        await asyncio.sleep(0)
        log.add("a")
        await asyncio.sleep(0.01)
        assert not waiter.done()
        is_changed = True
        log.add("b")
        log.add("a")
        await asyncio.wait_for(waiter, 30)

    asyncio.run(run())


def with_monitor(url: str, scenario: Callable[[Service, Clock], Coroutine[Any, Any, None]]) -> None:
    async def use(database: Database) -> None:
        clock = Clock()
        service = Service(database, None, Settings(), monotonic=clock)
        database.listen(service.changed, service.missed_changes)
        first = Allocation(1, 1)
        await database.write(partial(jobs.allocate, job_id="a.b", allocation=first, now=0.0))
        await register(service)
        await scenario(service, clock)

    with_database(url, use)


async def register(service: Service, instance: str = "agent-0", **changed: Any) -> None:
    heartbeat = a_heartbeat(0, replica_state=ReplicaState.RUNNING, generation=1, instance=instance)
    await service.register("a.b", replace(heartbeat, **changed))


async def pass_time(service: Service, clock: Clock, seconds: float) -> None:
    """Advance the clock, and check as often as the service does."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now = min(clock.now + HEARTBEAT_INTERVAL, until)
        await service.heartbeats.check()


async def is_registered(service: Service) -> bool:
    return 0 in (await service.find_job("a.b")).rendezvous.replicas


def test_a_replica_without_heartbeats_is_removed_and_waiting_requests_are_notified(url: str) -> None:
    async def scenario(service: Service, clock: Clock) -> None:
        before = await service.find_job("a.b")
        waiter = asyncio.create_task(
            service.wait_for_change("a.b", before.version, 60, is_reader=True, closed=None)
        )
        await pass_time(service, clock, HEARTBEAT_TIMEOUT)
        assert await is_registered(service)
        await pass_time(service, clock, HEARTBEAT_INTERVAL)
        assert not await is_registered(service)
        assert (await asyncio.wait_for(waiter, 30)).rendezvous.broken

    with_monitor(url, scenario)


def test_heartbeats_keep_a_replica_and_write_nothing(url: str) -> None:
    async def scenario(service: Service, clock: Clock) -> None:
        before = await service.find_job("a.b")
        await register(service)
        writes = 0
        write = service.database.write

        async def count_write(*arguments: Any, **options: Any) -> Any:
            nonlocal writes
            writes += 1
            return await write(*arguments, **options)

        service.database.write = count_write  # type: ignore[method-assign]
        for _ in range(10):
            await pass_time(service, clock, HEARTBEAT_TIMEOUT - 1)
            await register(service)
        assert await service.find_job("a.b") == before
        assert writes == 0
        assert service.heartbeats.ages("a.b") == {0: 0.0}
        await register(service, log="failed")
        assert writes == 1, "the log has changed"

    with_monitor(url, scenario)


def test_a_heartbeat_of_a_replaced_agent_does_not_keep_its_successor(url: str) -> None:
    async def scenario(service: Service, clock: Clock) -> None:
        await register(service, "successor", state=ReplicaState.WAITING, generation=0)
        await pass_time(service, clock, HEARTBEAT_TIMEOUT - 1)
        await register(service)
        await pass_time(service, clock, HEARTBEAT_INTERVAL)
        assert not await is_registered(service)

    with_monitor(url, scenario)


@pytest.mark.parametrize(
    "replica_state", [ReplicaState.FAILED, ReplicaState.TERMINATED, ReplicaState.FINISHED]
)
def test_an_agent_that_has_exited_needs_no_heartbeat(url: str, replica_state: ReplicaState) -> None:
    async def scenario(service: Service, clock: Clock) -> None:
        await register(service, state=replica_state)
        await pass_time(service, clock, 10 * HEARTBEAT_TIMEOUT)
        assert await is_registered(service)

    with_monitor(url, scenario)


def test_no_replica_is_removed_before_the_service_has_run_for_the_timeout(url: str) -> None:
    async def scenario(service: Service, clock: Clock) -> None:
        clock.now += 3600  # the service was stopped for an hour
        service.database.cache.clear()
        restarted = Service(service.database, None, Settings(), monotonic=clock)
        await pass_time(restarted, clock, HEARTBEAT_TIMEOUT - 0.1)
        assert await is_registered(restarted)
        await pass_time(restarted, clock, 2 * HEARTBEAT_INTERVAL)
        assert not await is_registered(restarted)

    with_monitor(url, scenario)


def test_heartbeats_are_asked_for_less_frequently_with_many_replicas_and_expire_later(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(service: Service, clock: Clock) -> None:
        await service.heartbeats.check()
        assert service.heartbeats.interval == HEARTBEAT_INTERVAL
        with monkeypatch.context() as many:
            many.setattr(registrations, "HEARTBEATS_PER_SECOND", 0.05)  # one replica is many
            await service.heartbeats.check()
            interval = service.heartbeats.interval
            assert interval == 20
            assert service.heartbeats.timeout == heartbeat_timeout(interval)
            await register(service)
        await pass_time(service, clock, interval)
        assert service.heartbeats.interval == HEARTBEAT_INTERVAL
        # The agent was asked for its next heartbeat after `interval`.
        await pass_time(service, clock, HEARTBEAT_TIMEOUT)
        assert await is_registered(service)
        await pass_time(service, clock, heartbeat_timeout(interval))
        assert not await is_registered(service)
        await register(service)
        await pass_time(service, clock, HEARTBEAT_TIMEOUT + HEARTBEAT_INTERVAL)
        assert not await is_registered(service), "the long interval is over"

    with_monitor(url, scenario)


def test_setting_the_clock_back_keeps_no_replica_alive(url: str) -> None:
    async def use(database: Database) -> None:
        clock, wall = Clock(), Clock()
        service = Service(database, None, Settings(), clock=wall, monotonic=clock)
        database.listen(service.changed, service.missed_changes)
        first = Allocation(1, 1)
        await database.write(partial(jobs.allocate, job_id="a.b", allocation=first, now=wall()))
        await register(service)
        wall.now -= 3600
        await pass_time(service, clock, HEARTBEAT_TIMEOUT)
        assert await is_registered(service)
        await pass_time(service, clock, HEARTBEAT_INTERVAL)
        assert not await is_registered(service)

    with_database(url, use)


def test_no_replica_is_removed_because_the_machine_slept(url: str) -> None:
    async def scenario(service: Service, clock: Clock) -> None:
        await pass_time(service, clock, HEARTBEAT_TIMEOUT - 5)
        clock.now += 3600
        await service.heartbeats.check()
        await pass_time(service, clock, HEARTBEAT_TIMEOUT - 5)
        assert await is_registered(service)

    with_monitor(url, scenario)


def test_no_replica_is_removed_whose_heartbeats_came_while_nothing_could_be_written(url: str) -> None:
    async def scenario(service: Service, clock: Clock) -> None:
        write = service.database.write

        async def fail(*_arguments: Any, **_options: Any) -> Any:
            raise DatabaseError("disk full")

        service.database.write = fail  # type: ignore[method-assign]
        for _ in range(10):
            # With another state, which must be stored.
            with pytest.raises(DatabaseError):
                await register(service, state=ReplicaState.REENTERING)
            clock.now += HEARTBEAT_INTERVAL
            await service.heartbeats.check()
        service.database.write = write  # type: ignore[method-assign]
        await service.heartbeats.check()
        assert await is_registered(service)

    with_monitor(url, scenario)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (DatabaseError("disk I/O error"), "the database is unavailable: disk I/O error"),
        (UnreadableJobError("a.b", ValueError("no JSON")), "the stored state of job a.b can't be read"),
        (ZeroDivisionError("a fault"), "ZeroDivisionError: a fault"),
    ],
)
def test_a_task_is_repeated_after_any_error(
    caplog: pytest.LogCaptureFixture, error: Exception, logged: str, at_once: bool
) -> None:
    calls = 0

    async def fail_once() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error

    async def run() -> None:
        task = asyncio.create_task(repeat(fail_once, 0.0, at_once=at_once))
        while calls < 3 and not task.done():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert calls == 3
    assert logged in caplog.text
