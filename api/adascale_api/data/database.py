"""The database as the event loop uses it: reads in threads, and group commits.

Writes run in one thread, which commits together all writes that arrived during the last commit: under load,
more requests share one flush to disk. A request is answered after its commit. Reads run concurrently, those
that may take long in threads of their own, so that they never delay registrations and allocations.

Every call ends within its deadline.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from prometheus_client import Counter

from adascale_api.data.backend import Connector, Failure, UnusableDatabaseError
from adascale_api.data.job import JobCache, StoredJob
from adascale_api.data.sql import Connections, Sql, Transaction
from adascale_api.data.store.jobs import write_changes
from adascale_api.data.tables import SCHEMA
from adascale_api.errors import UnavailableError
from adascale_core.errors import AdaScaleError, requires_extra

P = ParamSpec("P")
T = TypeVar("T")
Operation = Callable[Concatenate[Transaction, P], T]
"""Executes statements in a transaction."""

DEADLINE = 4.5
"""Seconds within which a read or write ends; clients wait 5 for an answer."""
READERS = 2
"""Threads for short reads, and as many for long ones."""
MAX_WAITING_READS = 64
"""Long reads that may wait for a thread."""
MAX_WRITES_PER_COMMIT = 256
"""Writes in one commit."""
MAX_WAITING_WRITES = 20_000
"""Writes that may wait for a commit."""
RETRY_INTERVAL = 0.2
"""Seconds until a transaction is repeated whose connection was lost or that met another one."""

logger = logging.getLogger(__name__)


class DatabaseError(UnavailableError):
    """The database is unavailable."""

    # Closes the connection, so that the client's next one may reach another service.
    headers: Mapping[str, str] = {**UnavailableError.headers, "Connection": "close"}

    def __init__(self, reason: object, hint: str = "nothing was stored, try again") -> None:
        super().__init__(f"the database is unavailable: {reason}; {hint}")


@dataclass
class _Write:
    operation: Callable[[Transaction], Any]
    job_id: str  # the job that it locks; empty if it locks none
    done: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class Database:
    """Reads and writes the tables, from an event loop."""

    def __init__(self, url: str | Connector, clock: Callable[[], float] = time.time) -> None:
        self.connector = open_database(url) if isinstance(url, str) else url
        self.cache = JobCache()
        self.damage = ""
        """Why its data can't be trusted until a restart; empty if it can."""
        self.is_full = False
        """Whether there was no room for the last write."""
        self._error = ""
        """Why the last write failed, logged once; empty if it succeeded."""
        self.failures = Counter(
            "adascale_database_failures", "Failed transactions, by reason.", ["reason"], registry=None
        )
        for failure in Failure:
            self.failures.labels(failure.name.lower())
        self._on_change: Callable[[str, StoredJob | None], None] = lambda *_of: None
        self._clock = clock
        self._short = Connections(self.connector, self.cache, READERS, "reader")
        self._long = Connections(self.connector, self.cache, READERS, "long-reader")
        self._writer = Connections(self.connector, self.cache, 1, "writer", writes=True)
        self._queue: list[_Write] = []
        self._committing: asyncio.Task[None] | None = None
        self._stopping = False
        # Whether this service learns of all changes, so that cached states are the committed ones.
        self._is_current = not self.connector.is_shared
        self._notified: dict[str, int] = {}
        """The versions of jobs that services have committed during the present commit of this one."""

    # -- reading --------------------------------------------------------------------------------------------

    async def read(self, query: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a query on a snapshot of the database."""
        return await self._read(self._short, lambda transaction: query(transaction, *args, **kwargs))

    async def read_long(self, query: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `read`, for a query that may take long: it delays no others."""
        if self._long.waiting >= MAX_WAITING_READS:
            raise UnavailableError("too many costly reads at the same time; try again")
        return await self._read(self._long, lambda transaction: query(transaction, *args, **kwargs))

    async def _read(self, readers: Connections, query: Callable[[Transaction], T]) -> T:
        self._require_sound()
        changes = self.cache.changes
        work = partial(self._query, readers, query)
        result, loaded = await self._within_deadline(readers.run(work), "try again")
        self.cache.add(loaded, changes)
        return result

    def _query(
        self, readers: Connections, query: Callable[[Transaction], T], *, again: bool = True
    ) -> tuple[T, list[StoredJob]]:
        """Return the result of a query, and the jobs that it has loaded."""
        try:
            with readers.transaction() as transaction:
                return query(transaction), transaction.loaded
        except self.connector.error as error:
            failure = self.connector.failure(error)
            if failure is Failure.LOST and again:
                return self._query(readers, query, again=False)
            if failure is Failure.DAMAGED:
                self.note_damage(str(error))
            raise DatabaseError(error, "try again") from error

    def cached(self, job_id: str) -> StoredJob | None:
        """Return the committed state of a job if it is known without a read."""
        if self.damage or not self._is_current:
            return None
        return self.cache.get(job_id)

    def listen(
        self, on_change: Callable[[str, StoredJob | None], None], on_missed: Callable[[], None]
    ) -> None:
        """Report changes in the event loop.

        `on_change` gets the id of a job and its state, None if that is deleted or not known here; `on_missed`
        is called if changes of other services may have been missed.
        """
        loop = asyncio.get_running_loop()
        self._on_change = on_change

        def change(job_id: str, version: int) -> None:
            self._notified[job_id] = version
            known = self.cache.get(job_id)
            # This service may have committed the change, or read the job since. Waiting requests do not know
            # of what was only read.
            if version < 0 or known is None or known.version < version:
                self.cache.remove(job_id)
            on_change(job_id, self.cache.get(job_id))

        def listening(is_current: bool) -> None:
            self._is_current = is_current
            self.cache.clear()
            on_missed()

        def schedule(callback: Callable[..., None], *arguments: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(callback, *arguments)

        self.connector.listen(partial(schedule, change), partial(schedule, listening))

    # -- writing --------------------------------------------------------------------------------------------

    async def write(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of an operation once it is committed; its argument `job_id` is what it locks.

        The operation may run more than once, so it must have no effect outside the database. If it raises an
        `AdaScaleError`, it must not have changed anything.
        """
        self._require_sound()
        if self._stopping:
            raise UnavailableError("the service is stopping; nothing was stored, try again")
        if len(self._queue) >= MAX_WAITING_WRITES:
            raise UnavailableError("too many requests at the same time; nothing was stored, try again")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job_id = str(kwargs.get("job_id", ""))
        self._queue.append(_Write(lambda transaction: operation(transaction, *args, **kwargs), job_id, done))
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_all())
        return await self._within_deadline(done, "whether it was stored is unknown, try again")

    async def _commit_all(self) -> None:
        try:
            while self._queue:
                batch = [write for write in self._queue[:MAX_WRITES_PER_COMMIT] if not write.done.done()]
                del self._queue[:MAX_WRITES_PER_COMMIT]
                self._notified.clear()
                try:
                    found = await self._writer.run(partial(self._commit, batch))
                except Exception as error:
                    logger.exception("a commit failed")
                    hint = "whether it was stored is unknown, try again"
                    found = self._fail(batch, DatabaseError(f"{type(error).__name__}: {error}", hint))
                for committed in found:
                    self._take(committed)
                for write in batch:
                    if write.done.done():  # the request was cancelled
                        continue
                    if write.error is None:
                        write.done.set_result(write.result)
                    else:
                        write.done.set_exception(write.error)
        finally:
            # Otherwise no later write would start another task.
            self._committing = None

    def _take(self, committed: Transaction) -> None:
        """Note what was committed, before any request is answered: the next one finds the new state."""
        for job_id in committed.deleted:
            self.cache.remove(job_id)
        for job in committed.jobs.values():
            if 0 <= self._notified.get(job.id, 0) <= job.version:
                self.cache.put(job)
            else:
                self.cache.remove(job.id)  # another service has changed it since
        try:
            for job_id in committed.changed | committed.deleted:
                self._on_change(job_id, self.cache.get(job_id))
        except Exception:
            logger.exception("a commit is stored, but what waits for it was not notified")

    def _commit(self, batch: list[_Write]) -> list[Transaction]:
        """Commit writes together, and set their results or errors."""
        # In the order of their jobs, so that two processes lock jobs in the same order.
        batch = sorted(batch, key=lambda write: write.job_id) if self.connector.is_shared else batch
        end = time.monotonic() + DEADLINE
        while True:
            try:
                return [self._commit_together(batch)]
            except Exception as error:
                is_known = isinstance(error, self.connector.error)
                failure = self._note_failure(error) if is_known else Failure.OTHER
                if failure in (Failure.LOST, Failure.CONFLICT) and not self._stopping:
                    if time.monotonic() < end:
                        time.sleep(RETRY_INTERVAL)
                        continue
                elif failure is Failure.OTHER and len(batch) > 1:
                    # Each alone: a failed one undoes the others of its commit.
                    return [committed for write in batch for committed in self._commit([write])]
                if not is_known:
                    logger.exception("a write failed")
                return self._fail(batch, DatabaseError(error) if is_known else error)

    def _commit_together(self, batch: list[_Write]) -> Transaction:
        with self._writer.transaction() as transaction:
            for write in batch:
                try:
                    write.result, write.error = write.operation(transaction), None
                except AdaScaleError as error:
                    write.result, write.error = None, error
            write_changes(transaction, self._clock())
            transaction.commit()
        self._error, self.is_full = "", False
        return transaction

    def _fail(self, batch: list[_Write], error: Exception) -> list[Transaction]:
        for write in batch:
            write.error = error
        return []

    def _note_failure(self, error: Exception) -> Failure:
        failure = self.connector.failure(error)
        self.failures.labels(failure.name.lower()).inc()
        self.is_full = failure is Failure.FULL
        if self._error != str(error):
            self._error = str(error)
            logger.warning("the database is unavailable: %s", error)
        if failure is Failure.DAMAGED:
            self.note_damage(str(error))
        return failure

    def note_damage(self, reason: str) -> None:
        """Refuse all further requests, because the data can't be trusted any more."""
        if not self.damage:
            self.damage = reason
            logger.error("the database is damaged, all requests are refused: %s", reason)

    def _require_sound(self) -> None:
        if self.damage:
            raise DatabaseError(self.damage, "restart the service after repairing it")

    # -- health ---------------------------------------------------------------------------------------------

    async def check(self, *, thorough: bool = False) -> None:
        """Find out whether the database can be trusted, and whether there is room again."""
        if self.damage:
            return
        if reason := await asyncio.to_thread(self._problem, thorough=thorough):
            self.note_damage(reason)
        elif self.is_full:
            await self.write(lambda each: each.execute(Sql(f"UPDATE {SCHEMA} SET version = version")))

    def _problem(self, *, thorough: bool) -> str:
        try:
            with closing(self.connector.connect(writes=False)) as connection:
                return self.connector.check(connection, thorough=thorough)
        except self.connector.error as error:
            return str(error) if self.connector.failure(error) is Failure.DAMAGED else ""

    # -- the end --------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Accept no further writes."""
        self._stopping = True

    async def close(self) -> None:
        """Finish the pending writes, and close the connections."""
        self._stopping = True
        try:
            if self._committing is not None:
                await self._committing
        finally:
            # In a thread, because one that reads from a disk which does not answer ends late.
            for connections in (self._writer, self._short, self._long):
                await asyncio.to_thread(connections.close)
            self.connector.close()

    async def _within_deadline(self, result: Awaitable[T], hint: str) -> T:
        try:
            async with asyncio.timeout(DEADLINE):
                return await result
        except TimeoutError:
            raise DatabaseError(f"no answer within {DEADLINE} s", hint) from None


def open_database(url: str) -> Connector:
    """Return the connector of a database by its URL."""
    scheme = url.partition("://")[0]
    match scheme:
        case "sqlite":
            from adascale_api.data.sqlite import SqliteConnector

            return SqliteConnector(url)
        case "postgresql" | "postgres":
            with requires_extra("a PostgreSQL database", "postgres"):
                from adascale_api.data.postgresql import PostgresqlConnector

            return PostgresqlConnector(url)
    raise UnusableDatabaseError(
        f"database URL {without_password(url)!r} is not valid: use sqlite:///PATH, or "
        "postgresql://USER:PASSWORD@HOST/NAME"
    )


def without_password(url: str) -> str:
    """Return a URL with *** for its password."""
    scheme, separator, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{scheme}{separator}{user}{colon and ':***'}{at}{place}"
