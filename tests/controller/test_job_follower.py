"""The operator follows the changes of the metrics service."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from adascale_client import MetricsServiceClient, ServiceRefusedError, ServiceUnreachableError
from adascale_controller.operator.runtime import control_loop, job_follower
from adascale_controller.operator.runtime.job_follower import JobFollower
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.views.jobs import JobChanges, JobList
from api.client import TOKEN
from support.fake_cluster import FakeCluster
from support.fake_service import JOB_ID, FakeService
from support.service import Service


class CountingService(FakeService):
    """A service that counts how often all jobs are read, and can fail."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.reads = 0
        self.error: Exception | None = None

    def read_jobs(self, share: float = 1.0) -> JobList:
        """Count, and fail."""
        self.reads += 1
        if self.error is not None:
            raise self.error
        return super().read_jobs()

    def read_changes(self, cursor: str, wait: float = 0.0) -> JobChanges:
        """Answer soon, and fail."""
        if self.error is not None:
            raise self.error
        return super().read_changes(cursor, min(wait, 0.02))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_follower, "PAUSE", 0.001)
    monkeypatch.setattr(job_follower, "RETRY_INTERVAL", 0.01)


def follow(service: FakeService, test: Callable[[JobFollower], Awaitable[None]]) -> None:
    """Run a test beside a follower."""

    async def run() -> None:
        follower = JobFollower(service, lambda: None)
        await asyncio.to_thread(follower.refresh)
        follower.start()
        try:
            async with asyncio.timeout(30):
                await test(follower)
        finally:
            follower.stop()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def generation(follower: JobFollower) -> int:
    views = follower.views
    return views[JOB_ID].generation if views is not None and JOB_ID in views else 0


def test_changes_are_followed_without_reading_all_jobs_again() -> None:
    service = CountingService()

    async def test(follower: JobFollower) -> None:
        assert follower.views == {}
        for number in (1, 2, 3):
            service.allocate(JOB_ID, Allocation(number, 1))
            await until(lambda number=number: generation(follower) == number)  # type: ignore[misc]
        service.lose_data()
        await until(lambda: follower.views == {})
        assert service.reads == 1

    follow(service, test)


def test_an_expired_cursor_and_an_outage_are_followed_by_a_read_of_all_jobs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = CountingService()
    service.allocate(JOB_ID, Allocation(1, 1))

    async def test(follower: JobFollower) -> None:
        service.error = ServiceRefusedError("the cursor has expired", 410)
        await until(lambda: service.reads > 1)
        service.error = None
        assert follower.views is not None, "an expired cursor is no outage"
        service.error = ServiceUnreachableError("the metrics service does not answer")
        await until(lambda: follower.views is None)
        service.allocate(JOB_ID, Allocation(2, 1))
        service.error = None
        await until(lambda: generation(follower) == 2)

    follow(service, test)
    assert [record.getMessage() for record in caplog.records] == [
        "the metrics service does not answer; training continues, replica counts stay as they are",
        "The metrics service answers again",
    ]


def test_a_job_is_behind_until_what_the_operator_has_written_is_read() -> None:
    service = CountingService()

    async def test(follower: JobFollower) -> None:
        service.allocate(JOB_ID, Allocation(7, 1))
        follower.expect(JOB_ID, lambda view: view.desired == Allocation(7, 1))
        assert follower.is_behind(JOB_ID) or generation(follower) == 7
        assert not follower.is_behind("team.another")
        await until(lambda: not follower.is_behind(JOB_ID))
        assert generation(follower) == 7

    follow(service, test)


def test_an_unexpected_error_ends_the_operator_instead_of_leaving_it_with_old_jobs() -> None:
    service = CountingService()

    async def test(follower: JobFollower) -> None:
        service.error = ZeroDivisionError("a bug")
        while True:
            follower.check()
            await asyncio.sleep(0.005)

    with pytest.raises(ZeroDivisionError):
        follow(service, test)


def test_a_running_operator_reads_all_jobs_only_for_new_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_loop, "PAUSE", 0.01)
    cluster = FakeCluster()
    service = cluster.service = CountingService()
    cluster.start_operator()
    cluster.submit()
    cluster.deliver()
    end = time.monotonic() + 0.5
    cluster.run_until(lambda: time.monotonic() > end)
    assert service.state.desired == Allocation(1, 1)
    assert service.reads <= 2


@pytest.mark.slow
def test_a_restarted_service_is_followed(tmp_path: Path) -> None:
    service = Service(tmp_path, job=JOB_ID)
    client = MetricsServiceClient(service.url, TOKEN)
    client.declare_job(JOB_ID, JobSpec(4))

    async def test() -> None:
        follower = JobFollower(MetricsServiceClient(service.url, TOKEN), lambda: None)
        await asyncio.to_thread(follower.refresh)
        follower.start()
        try:
            async with asyncio.timeout(60):
                await asyncio.to_thread(client.allocate, JOB_ID, Allocation(1, 1))
                await until(lambda: generation(follower) == 1)
                await asyncio.to_thread(service.stop, signal.SIGKILL)
                await until(lambda: follower.views is None)
                await asyncio.to_thread(service.start)
                await asyncio.to_thread(client.allocate, JOB_ID, Allocation(2, 1))
                await until(lambda: generation(follower) == 2)
                await asyncio.to_thread(client.delete_job, JOB_ID)
                await until(lambda: follower.views == {})
        finally:
            follower.stop()

    try:
        asyncio.run(test())
    finally:
        service.stop()
