"""The parts of a running service, and its background tasks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from adascale_api.authorization import Authorizer
from adascale_api.change_notifier import POLL_INTERVAL, ChangeNotifier
from adascale_api.database import Database, Operation
from adascale_api.heartbeat_monitor import HeartbeatMonitor
from adascale_api.http_protocol import SWEEP_INTERVAL, ConnectionLimits
from adascale_api.prometheus import Metrics
from adascale_api.store import jobs
from adascale_api.store.jobs import Transition
from adascale_core.messages import AllocationView
from adascale_core.names import HEARTBEAT_INTERVAL

logger = logging.getLogger(__name__)


class Service:
    """The parts that the routes use.

    Args:
        database: stores all data.
        authorizer: checks tokens; None allows every request.
        protect_reads: whether reading needs a token too.
        connections: the server's connections, of which the overdue are closed; None for no limits.
        clock: returns the time, in seconds since 1970.
    """

    def __init__(
        self,
        database: Database,
        authorizer: Authorizer | None,
        *,
        protect_reads: bool,
        connections: ConnectionLimits | None = None,
        clock: Callable[[], float],
    ) -> None:
        self.database = database
        self.authorizer = authorizer
        self.protect_reads = protect_reads
        self.connections = connections
        self.clock = clock
        self.changes = ChangeNotifier(self._read_versions)
        self.metrics = Metrics()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background tasks; on exit, finish the pending writes and close the database."""
        monitor = HeartbeatMonitor(self.database, self.changes, self.clock)
        tasks = [
            asyncio.create_task(repeat(self.changes.poll, POLL_INTERVAL)),
            asyncio.create_task(repeat(monitor.check, HEARTBEAT_INTERVAL)),
        ]
        if self.connections is not None:
            tasks.append(asyncio.create_task(repeat(self.connections.close_overdue, SWEEP_INTERVAL)))
        try:
            yield
        finally:
            self.changes.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self.database.close()
            if self.authorizer is not None:
                await self.authorizer.close()

    async def commit(self, job_id: str, operation: Operation[Transition]) -> AllocationView:
        """Commit a transition of a job, notify waiting requests, and return the job's generations."""
        transition = await self.database.write(operation)
        if transition.changed:
            self.changes.notify(job_id)
        return transition.view

    async def _read_versions(self, job_ids: Iterable[str]) -> dict[str, int]:
        return await self.database.read(partial(jobs.versions, job_ids=job_ids))


async def repeat(task: Callable[[], Awaitable[None]], interval: float) -> None:
    """Run a task every `interval` seconds. A database error is logged, and the next run tries again."""
    while True:
        await asyncio.sleep(interval)
        try:
            await task()
        except SQLAlchemyError as error:
            logger.warning("the database is unavailable, retrying: %s", error)
