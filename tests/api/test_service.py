"""What the service does by itself: shared commits, waiting, forgetting the silent."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError, OperationalError

from adascale_api import store
from adascale_api.database import Database
from adascale_api.service import Service, SilenceWatch
from adascale_api.waiting import Waiting
from adascale_core.messages import Allocation, AllocationView, ReplicaState
from adascale_core.names import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from adascale_core.rendezvous import StaleAllocationError
from api.client import a_registration, a_report


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'service.db'}"


def in_database(url: str, use: Callable[[Database], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        database = Database(url)
        await use(database)
        await database.close()

    asyncio.run(run())


def test_an_operation_that_fails_takes_no_other_of_its_commit_along(url: str) -> None:
    def allocate(connection: Connection, generation: int) -> None:
        store.allocate(connection, "a.b", Allocation(generation, 1), 0.0)

    def break_the_table(connection: Connection) -> None:
        connection.execute(text("INSERT INTO jobs (id) VALUES ('c.d')"))

    async def use(database: Database) -> None:
        operations: list[Callable[[Connection], object]] = [
            partial(store.record, job_id="a.b", told=[a_report(1)], now=0.0),
            partial(allocate, generation=5),
            partial(allocate, generation=4),
            break_the_table,
            partial(store.record, job_id="a.b", told=[a_report(1), a_report(2)], now=0.0),
        ]
        done = await asyncio.gather(*map(database.write, operations), return_exceptions=True)
        assert isinstance(done[2], StaleAllocationError)
        assert isinstance(done[3], IntegrityError)
        assert isinstance(done[4], store.Recorded)
        assert (done[4].stored, done[4].repeated) == (1, 1)
        job = await database.read(partial(store.find_job, job_id="a.b"))
        assert job.state.desired == Allocation(5, 1)
        assert (await database.read(partial(store.history, job=job, points=9))).total == 2

    in_database(url, use)


def test_one_who_no_longer_asks_holds_nobody_up(url: str) -> None:
    async def use(database: Database) -> None:
        record = partial(store.record, job_id="a.b", now=0.0)
        gone, stays = (
            asyncio.create_task(database.write(partial(record, told=[a_report(n)]))) for n in (1, 2)
        )
        await asyncio.sleep(0)
        gone.cancel()
        assert (await stays).stored == 1

    in_database(url, use)


def test_a_full_or_locked_database_is_told_and_work_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adascale_api.database.BUSY_TIMEOUT", 0.01)

    async def use(database: Database) -> None:
        other = Database(url)
        holding, release = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold(connection: Connection) -> None:
            store.record(connection, "a.b", [a_report(1)], 0.0)
            loop.call_soon_threadsafe(holding.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

        held = asyncio.create_task(other.write(hold))
        await holding.wait()
        record = partial(store.record, job_id="a.b", told=[a_report(2)], now=0.0)
        with pytest.raises(OperationalError, match="locked"):
            await database.write(record)
        release.set()
        await held
        assert (await database.write(record)).stored == 1
        await other.close()

    in_database(url, use)


class Versions:
    """Versions as another process would change them."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {"a": 1}

    async def of(self, job_ids: Iterable[str]) -> dict[str, int]:
        return {job_id: self.now[job_id] for job_id in job_ids if job_id in self.now}

    async def view(self) -> AllocationView:
        return AllocationView(self.now["a"], None, None, broken=False, complete=False)


def waits_for_a(act: Callable[[Waiting, Versions], Awaitable[None]], seconds: float = 60.0) -> AllocationView:
    """What one that waits for a change of version 1 is told, while `act` happens."""

    async def run() -> AllocationView:
        versions = Versions()
        waiting = Waiting(versions.of)
        waiter = asyncio.create_task(waiting.until_changed("a", 1, seconds, versions.view))
        await asyncio.sleep(0)
        assert not waiter.done()
        await act(waiting, versions)
        return await asyncio.wait_for(waiter, 30)

    return asyncio.run(run())


def test_a_waiting_request_sees_the_change_that_it_is_notified_of() -> None:
    async def change(waiting: Waiting, versions: Versions) -> None:
        versions.now["a"] = 2
        waiting.notify("b")
        waiting.notify("a")

    assert waits_for_a(change).version == 2


def test_a_needless_notification_does_not_end_the_waiting() -> None:
    async def change(waiting: Waiting, versions: Versions) -> None:
        waiting.notify("a")
        await asyncio.sleep(0.01)
        versions.now["a"] = 2
        waiting.notify("a")

    assert waits_for_a(change).version == 2


def test_a_waiting_request_sees_the_change_that_another_process_made() -> None:
    async def change(waiting: Waiting, versions: Versions) -> None:
        await waiting.poll()
        await asyncio.sleep(0.01)
        versions.now["a"] = 2
        await waiting.poll()

    assert waits_for_a(change).version == 2


def test_a_change_by_another_process_between_reading_and_the_first_look_is_seen() -> None:
    async def change(waiting: Waiting, versions: Versions) -> None:
        versions.now["a"] = 2
        await waiting.poll()

    assert waits_for_a(change).version == 2


def test_the_end_of_the_service_ends_the_waiting() -> None:
    async def close(waiting: Waiting, versions: Versions) -> None:
        waiting.close()

    assert waits_for_a(close).version == 1


def test_the_time_ends_the_waiting() -> None:
    async def nothing(waiting: Waiting, versions: Versions) -> None:
        pass

    assert waits_for_a(nothing, seconds=0.02).version == 1


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def looks_for_silence(
    url: str, story: Callable[[Service, SilenceWatch, Clock], Coroutine[Any, Any, None]]
) -> None:
    async def use(database: Database) -> None:
        clock = Clock()
        service = Service(database, None, protect_reads=False, clock=clock)
        told = a_registration(0, ReplicaState.RUNNING, generation=1)
        first = Allocation(1, 1)
        await database.write(partial(store.allocate, job_id="a.b", allocation=first, now=clock()))
        await database.write(partial(store.register, job_id="a.b", registration=told, now=clock()))
        await story(service, SilenceWatch(service), clock)

    in_database(url, use)


async def pass_time(watch: SilenceWatch, clock: Clock, seconds: float) -> None:
    """Look as often as the service does."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now = min(clock.now + HEARTBEAT_INTERVAL, until)
        await watch.look()


async def is_known(service: Service) -> bool:
    job = await service.database.read(partial(store.find_job, job_id="a.b"))
    return 0 in job.state.replicas


def test_a_replica_that_falls_silent_is_forgotten_and_waiting_requests_learn_of_it(url: str) -> None:
    async def story(service: Service, watch: SilenceWatch, clock: Clock) -> None:
        async def view() -> AllocationView:
            return (await service.database.read(partial(store.find_job, job_id="a.b"))).allocation

        before = await view()
        waiter = asyncio.create_task(service.waiting.until_changed("a.b", before.version, 60, view))
        await pass_time(watch, clock, HEARTBEAT_TIMEOUT)
        assert await is_known(service)
        await pass_time(watch, clock, HEARTBEAT_INTERVAL)
        assert not await is_known(service)
        assert (await asyncio.wait_for(waiter, 30)).broken

    looks_for_silence(url, story)


def test_nobody_is_forgotten_before_the_service_has_listened_long_enough(url: str) -> None:
    async def story(service: Service, watch: SilenceWatch, clock: Clock) -> None:
        clock.now += 3600  # it was away for an hour
        restarted = SilenceWatch(service)
        await pass_time(restarted, clock, HEARTBEAT_TIMEOUT - 0.1)
        assert await is_known(service)
        await pass_time(restarted, clock, HEARTBEAT_INTERVAL)
        assert not await is_known(service)

    looks_for_silence(url, story)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_nobody_is_forgotten_because_the_machine_slept_or_its_clock_was_set(url: str, jump: float) -> None:
    async def story(service: Service, watch: SilenceWatch, clock: Clock) -> None:
        await pass_time(watch, clock, HEARTBEAT_TIMEOUT - 5)
        clock.now += jump
        await watch.look()
        await pass_time(watch, clock, HEARTBEAT_TIMEOUT - 5)
        assert await is_known(service)

    looks_for_silence(url, story)


def test_it_goes_on_when_the_database_fails_for_a_while(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def use(database: Database) -> None:
        service = Service(database, None, protect_reads=False, clock=Clock())
        calls = asyncio.Queue[int]()

        async def act() -> None:
            await calls.put(1)
            if calls.qsize() == 1:
                raise OperationalError("SELECT 1", {}, OSError("disk I/O error"))

        task = asyncio.create_task(service.repeat(act, 0.0))
        while calls.qsize() < 3:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    in_database(url, use)
    assert "disk I/O error" in caplog.text
