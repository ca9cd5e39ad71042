"""The parts of a running service, and what it does by itself."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from adascale_api import store
from adascale_api.auth import Authenticator
from adascale_api.database import Database, Operation
from adascale_api.prometheus import Metrics
from adascale_api.store import Changed
from adascale_api.waiting import POLL_INTERVAL, Waiting
from adascale_core.names import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT

logger = logging.getLogger(__name__)


class Service:
    """What the routes work with.

    Args:
        database: where everything is kept.
        authenticator: says which tokens are good; none: everyone may do everything.
        protect_reads: whether reading needs a token too.
        clock: the time, in seconds since 1970.
    """

    def __init__(
        self,
        database: Database,
        authenticator: Authenticator | None,
        *,
        protect_reads: bool,
        clock: Callable[[], float],
    ) -> None:
        self.database = database
        self.authenticator = authenticator
        self.protect_reads = protect_reads
        self.clock = clock
        self.waiting = Waiting(self._versions)
        self.metrics = Metrics()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Do what the service does by itself; at the end, finish the writes and close the database."""
        tasks = [
            asyncio.create_task(self.repeat(self.waiting.poll, POLL_INTERVAL)),
            asyncio.create_task(self.repeat(SilenceWatch(self).look, HEARTBEAT_INTERVAL)),
        ]
        try:
            yield
        finally:
            self.waiting.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self.database.close()
            if self.authenticator is not None:
                await self.authenticator.close()

    async def committed(self, job_id: str, operation: Operation[Changed]) -> Changed:
        """The result of a change, once it is committed and those who wait for it are woken."""
        changed = await self.database.write(operation)
        if changed.changed:
            self.waiting.notify(job_id)
        return changed

    async def _versions(self, job_ids: Iterable[str]) -> dict[str, int]:
        return await self.database.read(partial(store.versions, job_ids=job_ids))

    async def repeat(self, act: Callable[[], Awaitable[None]], interval: float) -> None:
        """Act every `interval` seconds, whatever becomes of the database."""
        while True:
            await asyncio.sleep(interval)
            try:
                await act()
            except SQLAlchemyError as error:
                logger.warning("the database can't do it now, trying again: %s", error)


class SilenceWatch:
    """Forgets replicas that have not been heard of for too long.

    Not before the service has itself listened for as long: after a start, or after the machine slept,
    nobody had the chance to be heard.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._looked_at = service.clock()
        self._listening_since = self._looked_at

    async def look(self) -> None:
        """Forget those that are overdue, once."""
        now = self._service.clock()
        if abs(now - self._looked_at) > HEARTBEAT_TIMEOUT / 2:
            self._listening_since = now
        self._looked_at = now
        if now - self._listening_since < HEARTBEAT_TIMEOUT:
            return
        database = self._service.database
        if await database.read(partial(store.any_silent, now=now)):
            for job_id in await database.write(partial(store.forget_silent, now=now)):
                self._service.waiting.notify(job_id)
