"""The parts of a running service, and its background tasks: checks, and the removal of old jobs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from adascale_api.auth.authorization import Authorizer
from adascale_api.data.database import Database
from adascale_api.data.job import StoredJob
from adascale_api.data.store import heartbeats, jobs
from adascale_api.data.store.jobs import JobNotFoundError
from adascale_api.data.store.reports import Retention
from adascale_api.errors import RefusedReplicaError, UnavailableError
from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.service.changes import (
    MAX_ANONYMOUS_FOLLOWERS,
    MAX_ANONYMOUS_WAITS,
    ChangeLog,
    Closed,
    one_of,
)
from adascale_api.service.heartbeat_monitor import HeartbeatMonitor
from adascale_api.service.prometheus import Metrics
from adascale_api.service.replica_seconds import STORE_INTERVAL, ReceivedSeconds
from adascale_api.service.summaries import MAX_JOBS, Documents, summary_reader
from adascale_core.messages.registration import Heartbeat
from adascale_core.names import HEARTBEAT_INTERVAL
from adascale_core.rendezvous.rendezvous import VersionMismatchError
from adascale_core.views.job_summary import JobSummary
from adascale_core.views.usage import UsedReplicas

RETENTION_INTERVAL = 600.0
"""Seconds between two searches for old jobs."""
DAY = 86400.0
PAGE_SIZE = 500
"""Jobs whose summaries are read in one transaction."""
MAX_REMOVED = 1000
"""Jobs that one search deletes."""
CHECK_INTERVAL = 3.0
"""Seconds between two checks of the database."""
SWEEP_INTERVAL = 1.0
"""Seconds between two searches for overdue connections."""
THOROUGH_CHECK_INTERVAL = 3600.0
"""Seconds between two checks that read the whole database; the first follows the start."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What the service keeps, and for whom."""

    protect_reads: bool = False
    reports: Retention = field(default_factory=Retention)
    # For how long jobs are kept after the last change and the last report:
    finished_days: int = 14
    unfinished_days: int = 90  # jobs whose agents and controller have gone without deleting them
    logs: Path | None = None  # the folder with `replica-<index>.log`; None if the output is elsewhere


class Export(Protocol):
    """Sends what jobs do to another system."""

    async def update(self) -> None:
        """Follow the database."""

    async def close(self) -> None:
        """Send what is left."""


class Service:
    """The parts that the routes use."""

    def __init__(
        self,
        database: Database,
        authorizer: Authorizer | None,
        settings: Settings,
        *,
        connections: ConnectionLimits | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.database = database
        self.authorizer = authorizer
        self.settings = settings
        self.connections = connections or ConnectionLimits()
        self.clock = clock
        self.anonymous_waits = asyncio.Semaphore(MAX_ANONYMOUS_WAITS)
        self.anonymous_followers = asyncio.Semaphore(MAX_ANONYMOUS_FOLLOWERS)
        self.log = ChangeLog()
        self.documents = Documents()
        self.heartbeats = HeartbeatMonitor(database, monotonic, clock)
        self.seconds = ReceivedSeconds(database, clock)
        self.metrics = Metrics(database, self.connections)
        self.export: Export | None = None
        """Sends what jobs do to a collector."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background tasks; on exit, finish the pending writes and close the database."""
        self._loop = asyncio.get_running_loop()
        repeated: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self.heartbeats.check, HEARTBEAT_INTERVAL),
            (self.database.check, CHECK_INTERVAL),
            (self.seconds.store, STORE_INTERVAL),
            (lambda: remove_old_jobs(self.database, self.settings, self.clock()), RETENTION_INTERVAL),
            (self.connections.close_overdue, SWEEP_INTERVAL),
        ]
        tasks = [asyncio.create_task(repeat(task, interval)) for task, interval in repeated]
        check = partial(self.database.check, thorough=True)
        tasks.append(asyncio.create_task(repeat(check, THOROUGH_CHECK_INTERVAL, at_once=True)))
        if self.export is not None:
            tasks.append(asyncio.create_task(repeat(self.export.update, STORE_INTERVAL, at_once=True)))
        self.database.listen(self.changed, self.missed_changes)
        try:
            yield
        finally:
            self.stop()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if self.export is not None:
                await self.export.close()
            await self.database.close()
            if self.authorizer is not None:
                await self.authorizer.close()

    def stop(self) -> None:
        """Answer the waiting requests, and accept no further writes. May be called from a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.log.close)
            self._loop.call_soon_threadsafe(self.database.stop)

    async def find_job(self, job_id: str) -> StoredJob:
        """Return a job."""
        cached = self.database.cached(job_id)
        if cached is not None:
            return cached
        return await self.database.read(jobs.find_job, job_id=job_id)

    async def wait_for_change(
        self, job_id: str, version: int, seconds: float, *, is_reader: bool, closed: Closed
    ) -> StoredJob:
        """Return a job once its version is not `version`, after `seconds`, or when the client has left."""
        found: StoredJob

        async def has_changed() -> bool:
            nonlocal found
            found = await self.find_job(job_id)
            return found.version != version

        async with one_of(self.anonymous_waits, counts=not is_reader and seconds > 0):
            await self.log.wait_until(has_changed, job_id, seconds, closed)
        return found

    async def register(self, job_id: str, heartbeat: Heartbeat) -> StoredJob:
        """Store the registration of a replica, if it has changed, and return the job."""
        # First, because the database may be unavailable.
        self.heartbeats.receive(job_id, heartbeat)
        self.seconds.receive(job_id, heartbeat)
        registration = heartbeat.registration
        cached = self.database.cached(job_id)
        if cached is not None and cached.unchanging.get(registration.replica) == registration:
            return cached
        try:
            return await self.database.write(
                jobs.register,
                job_id=job_id,
                registration=registration,
                now=self.clock(),
                seconds=heartbeat.seconds,
            )
        except VersionMismatchError as error:
            raise RefusedReplicaError(str(error), self.heartbeats.timeout) from error

    async def summaries(self) -> list[JobSummary]:
        """Return the summaries of the first jobs, by id."""
        found: list[JobSummary] = []
        after: str | None = ""
        while after is not None and len(found) < MAX_JOBS:
            page, after = await self.database.read_long(jobs.list_jobs, after, PAGE_SIZE, summary_reader)
            found += page
        return found

    async def used_replicas(self, since: float, now: float) -> list[UsedReplicas]:
        """Return the replicas that jobs have used since a time."""
        return await self.database.read_long(jobs.used_replicas, since, now)

    def changed(self, job_id: str, job: StoredJob | None) -> None:
        """Wake the requests that wait for a change of a job; None if it is deleted or not known here."""
        self.heartbeats.update(job_id, job)
        if job is None:
            self.seconds.forget(job_id)
        self.log.add(job_id)

    def missed_changes(self) -> None:
        """Wake all waiting requests, because changes of other services may have been missed."""
        self.heartbeats.reload()
        self.log.restart()


async def repeat(task: Callable[[], Awaitable[None]], interval: float, *, at_once: bool = False) -> None:
    """Run a task every `interval` seconds, the first time after `interval` unless `at_once`.

    Any error is logged, and the next run tries again: a task that ended would not be noticed.
    """
    if not at_once:
        await asyncio.sleep(interval)
    while True:
        try:
            await task()
        except UnavailableError as error:
            logger.warning("%s", error)
        except Exception:
            logger.exception("a background task has failed, and is run again")
        await asyncio.sleep(interval)


async def delete_in_pieces(database: Database, job_id: str, now: float) -> None:
    """Delete a job, in as many commits as its reports need."""
    while not await database.write(jobs.delete_job, job_id=job_id, now=now):
        pass


async def remove_old_jobs(database: Database, settings: Settings, now: float) -> None:
    """Delete the jobs that are older than the settings allow."""
    finished_before = now - settings.finished_days * DAY
    unfinished_before = now - settings.unfinished_days * DAY
    for job_id in await database.read_long(jobs.old_jobs, finished_before, unfinished_before, MAX_REMOVED):
        try:
            await delete_in_pieces(database, job_id, now)
        except JobNotFoundError:
            continue
        logger.info("deleted job %s, which has not changed for long", job_id)
    await database.write(heartbeats.remove_ended)
    await database.write(jobs.forget_versions, before=unfinished_before)
