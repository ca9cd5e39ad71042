"""Group commits, long polling, and the expiry of heartbeats."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError, OperationalError

from adascale_api.change_notifier import ChangeNotifier
from adascale_api.database import Database
from adascale_api.heartbeat_monitor import HeartbeatMonitor
from adascale_api.service import Service, repeat
from adascale_api.store import jobs, replicas, reports
from adascale_core.messages import Allocation, AllocationView, ReplicaState
from adascale_core.names import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from adascale_core.rendezvous import StaleAllocationError
from adascale_core.views import StoredReports
from api.client import a_registration, a_report


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
    def allocate(connection: Connection, generation: int) -> None:
        jobs.allocate(connection, "a.b", Allocation(generation, 1), 0.0)

    def break_the_table(connection: Connection) -> None:
        connection.execute(text("INSERT INTO jobs (id) VALUES ('c.d')"))

    async def use(database: Database) -> None:
        operations: list[Callable[[Connection], object]] = [
            partial(reports.post, job_id="a.b", new=[a_report(1)], now=0.0),
            partial(allocate, generation=5),
            partial(allocate, generation=4),
            break_the_table,
            partial(reports.post, job_id="a.b", new=[a_report(1), a_report(2)], now=0.0),
        ]
        done = await asyncio.gather(*map(database.write, operations), return_exceptions=True)
        assert isinstance(done[2], StaleAllocationError)
        assert isinstance(done[3], IntegrityError)
        assert isinstance(done[4], StoredReports)
        assert (done[4].stored, done[4].repeated) == (1, 1)
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
        assert (await other).stored == 1

    with_database(url, use)


def test_a_write_to_a_locked_database_fails_and_the_next_one_succeeds(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adascale_api.database.BUSY_TIMEOUT", 0.01)

    async def use(database: Database) -> None:
        other = Database(url)
        locked, release = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold_lock(connection: Connection) -> None:
            reports.post(connection, "a.b", [a_report(1)], 0.0)
            loop.call_soon_threadsafe(locked.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

        holder = asyncio.create_task(other.write(hold_lock))
        await locked.wait()
        record = partial(reports.post, job_id="a.b", new=[a_report(2)], now=0.0)
        with pytest.raises(OperationalError, match="locked"):
            await database.write(record)
        release.set()
        await holder
        assert (await database.write(record)).stored == 1
        await other.close()

    with_database(url, use)


class Versions:
    """Versions of jobs that another process changes."""

    def __init__(self) -> None:
        self.current: dict[str, int] = {"a": 1}

    async def read(self, job_ids: Iterable[str]) -> dict[str, int]:
        return {job_id: self.current[job_id] for job_id in job_ids if job_id in self.current}

    async def view(self) -> AllocationView:
        return AllocationView(self.current["a"], None, None, broken=False, complete=False)


def wait_for_a(
    act: Callable[[ChangeNotifier, Versions], Awaitable[None]], seconds: float = 60.0
) -> AllocationView:
    """Return the answer to a request that waits for a change of version 1 while `act` runs."""

    async def run() -> AllocationView:
        versions = Versions()
        notifier = ChangeNotifier(versions.read)
        waiter = asyncio.create_task(notifier.wait_for_change("a", 1, seconds, versions.view))
        await asyncio.sleep(0)
        assert not waiter.done()
        await act(notifier, versions)
        return await asyncio.wait_for(waiter, 30)

    return asyncio.run(run())


def test_a_notification_of_a_change_ends_the_wait() -> None:
    async def change(notifier: ChangeNotifier, versions: Versions) -> None:
        versions.current["a"] = 2
        notifier.notify("b")
        notifier.notify("a")

    assert wait_for_a(change).version == 2


def test_a_notification_without_a_change_does_not_end_the_wait() -> None:
    async def change(notifier: ChangeNotifier, versions: Versions) -> None:
        notifier.notify("a")
        await asyncio.sleep(0.01)
        versions.current["a"] = 2
        notifier.notify("a")

    assert wait_for_a(change).version == 2


def test_a_change_by_another_process_ends_the_wait_at_the_next_poll() -> None:
    async def change(notifier: ChangeNotifier, versions: Versions) -> None:
        await notifier.poll()
        await asyncio.sleep(0.01)
        versions.current["a"] = 2
        await notifier.poll()

    assert wait_for_a(change).version == 2


def test_a_change_by_another_process_before_the_first_poll_ends_the_wait() -> None:
    async def change(notifier: ChangeNotifier, versions: Versions) -> None:
        versions.current["a"] = 2
        await notifier.poll()

    assert wait_for_a(change).version == 2


def test_closing_the_notifier_ends_the_wait() -> None:
    async def close(notifier: ChangeNotifier, versions: Versions) -> None:
        notifier.close()

    assert wait_for_a(close).version == 1


def test_the_timeout_ends_the_wait() -> None:
    async def nothing(notifier: ChangeNotifier, versions: Versions) -> None:
        pass

    assert wait_for_a(nothing, seconds=0.02).version == 1


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def with_monitor(
    url: str, scenario: Callable[[Service, HeartbeatMonitor, Clock], Coroutine[Any, Any, None]]
) -> None:
    async def use(database: Database) -> None:
        clock = Clock()
        service = Service(database, None, protect_reads=False, clock=clock)
        registration = a_registration(0, ReplicaState.RUNNING, generation=1)
        first = Allocation(1, 1)
        await database.write(partial(jobs.allocate, job_id="a.b", allocation=first, now=clock()))
        await database.write(partial(replicas.register, job_id="a.b", registration=registration, now=clock()))
        await scenario(service, HeartbeatMonitor(service.database, service.changes, clock), clock)

    with_database(url, use)


async def pass_time(monitor: HeartbeatMonitor, clock: Clock, seconds: float) -> None:
    """Advance the clock, and check as often as the service does."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now = min(clock.now + HEARTBEAT_INTERVAL, until)
        await monitor.check()


async def is_registered(service: Service) -> bool:
    job = await service.database.read(partial(jobs.find_job, job_id="a.b"))
    return 0 in job.rendezvous.replicas


def test_a_replica_without_heartbeats_is_removed_and_waiting_requests_are_notified(url: str) -> None:
    async def scenario(service: Service, monitor: HeartbeatMonitor, clock: Clock) -> None:
        async def view() -> AllocationView:
            return (await service.database.read(partial(jobs.find_job, job_id="a.b"))).view

        before = await view()
        waiter = asyncio.create_task(service.changes.wait_for_change("a.b", before.version, 60, view))
        await pass_time(monitor, clock, HEARTBEAT_TIMEOUT)
        assert await is_registered(service)
        await pass_time(monitor, clock, HEARTBEAT_INTERVAL)
        assert not await is_registered(service)
        assert (await asyncio.wait_for(waiter, 30)).broken

    with_monitor(url, scenario)


def test_no_replica_is_removed_before_the_service_has_run_for_the_timeout(url: str) -> None:
    async def scenario(service: Service, monitor: HeartbeatMonitor, clock: Clock) -> None:
        clock.now += 3600  # the service was stopped for an hour
        restarted = HeartbeatMonitor(service.database, service.changes, clock)
        await pass_time(restarted, clock, HEARTBEAT_TIMEOUT - 0.1)
        assert await is_registered(service)
        await pass_time(restarted, clock, HEARTBEAT_INTERVAL)
        assert not await is_registered(service)

    with_monitor(url, scenario)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_no_replica_is_removed_because_the_machine_slept_or_its_clock_was_set(url: str, jump: float) -> None:
    async def scenario(service: Service, monitor: HeartbeatMonitor, clock: Clock) -> None:
        await pass_time(monitor, clock, HEARTBEAT_TIMEOUT - 5)
        clock.now += jump
        await monitor.check()
        await pass_time(monitor, clock, HEARTBEAT_TIMEOUT - 5)
        assert await is_registered(service)

    with_monitor(url, scenario)


def test_a_task_is_repeated_after_a_database_error(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def fail_once() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OperationalError("SELECT 1", {}, OSError("disk I/O error"))

    async def run() -> None:
        task = asyncio.create_task(repeat(fail_once, 0.0))
        while calls < 3:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert "the database is unavailable, retrying" in caplog.text
    assert "disk I/O error" in caplog.text
