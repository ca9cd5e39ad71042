"""Removes the jobs that nothing has happened to for long, and the rows of deleted jobs."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from adascale_api.data.database import Database
from adascale_api.data.store import heartbeats, jobs
from adascale_api.data.store.jobs import JobNotFoundError
from adascale_api.errors import UnavailableError

RETENTION_INTERVAL = 600.0
"""Seconds between two searches for old jobs."""
PAUSE = 0.02
"""Seconds between two transactions that remove rows, for other writes."""
RETRY_INTERVAL = 5.0
"""Seconds until rows are removed again after an error."""
DAY = 86400.0
MAX_REMOVED = 1000
"""Jobs that one search removes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobRetention:
    """How long jobs are kept after the last change and the last report, in seconds."""

    finished: float = 14 * DAY
    unfinished: float = 90 * DAY  # other jobs, whose agents and controller have gone without deleting them


class Remover:
    """Removes jobs and rows in the background, in pieces."""

    def __init__(self, database: Database, retention: JobRetention, clock: Callable[[], float]) -> None:
        self._database = database
        self._retention = retention
        self._clock = clock
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to remove the rows of deleted jobs."""
        self._wake.set()  # an earlier process may have left some
        self._task = asyncio.create_task(self._remove_deleted())

    def wake(self) -> None:
        """Remove the rows of jobs that were deleted just now."""
        self._wake.set()

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def remove_old_jobs(self) -> None:
        """Delete the jobs that are older than the retention allows."""
        now = self._clock()
        query = partial(
            jobs.old_jobs,
            finished_before=now - self._retention.finished,
            unfinished_before=now - self._retention.unfinished,
            limit=MAX_REMOVED,
        )
        for job_id in await self._database.read(query, is_long=True):
            try:
                await self._database.write(partial(jobs.delete_job, job_id=job_id, now=now), job_id=job_id)
            except JobNotFoundError:
                continue
            logger.info("deleted job %s, which has not changed for long", job_id)
        await self._database.write(heartbeats.remove_ended)
        await self._database.write(partial(jobs.forget_versions, before=now - self._retention.unfinished))

    async def _remove_deleted(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while await self._database.write(jobs.remove_deleted):
                    await asyncio.sleep(PAUSE)
                continue
            except UnavailableError as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("rows of deleted jobs can't be removed, this is tried again")
            self._wake.set()
            await asyncio.sleep(RETRY_INTERVAL)
