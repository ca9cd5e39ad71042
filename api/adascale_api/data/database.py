"""The database as the event loop uses it: reads in threads, and group commits.

Writes run in one thread, which commits together all writes that arrived during the last commit, and soon
after it: under load, more requests share one flush to disk. A request is answered after its commit. Reads run
concurrently, those that may take long in threads of their own, so that they never delay registrations and
allocations.

Every call ends within its deadline. While the disk is full, reports are refused, and the rest of the space is
left to registrations, allocations and deletions.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from adascale_api.data.backend import Connector, Failure, UnusableDatabaseError
from adascale_api.data.job import JobCache, StoredJob
from adascale_api.data.sql import Transaction
from adascale_api.data.store.jobs import write_changes
from adascale_api.errors import UnavailableError
from adascale_core.errors import AdaScaleError, requires_extra

T = TypeVar("T")
Operation = Callable[[Transaction], T]

DEADLINE = 4.5
"""Seconds within which a read or write ends; clients wait 5 for an answer."""
STOP_GRACE = 1.2
"""Seconds that reads and writes may take to end after the service begins to stop."""
READERS = 2
"""Threads for short reads, and as many for long ones."""
MAX_WAITING_READS = 64
"""Long reads that may wait for a thread."""
SWEEP_INTERVAL = 0.25
"""Seconds between two searches for overdue writes."""
MAX_WRITES_PER_COMMIT = 256
"""Writes in one commit."""
MAX_GATHERING = 0.02
"""Seconds, at most, for which a commit waits for further writes."""
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


class _RetryError(Exception):
    """The transaction may succeed if it is repeated."""


@dataclass(frozen=True)
class Committed:
    """The jobs that a commit has changed, and the ids of the jobs that it has deleted."""

    changed: tuple[StoredJob, ...]
    deleted: frozenset[str]


@dataclass
class _Write:
    operation: Operation[Any]
    job_id: str  # the job that it locks; empty if it locks none
    is_report: bool  # refused first when there is little room
    deadline: float
    done: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


@dataclass
class DatabaseCondition:
    """What is wrong with the database. Probes and metrics show it, except for `error`."""

    damage: str = ""  # why its data can't be trusted until a restart; empty if it can
    is_full: bool = False  # whether reports are refused because there is little room
    error: str = ""  # why the last write failed, logged once; empty if it succeeded
    failures: dict[str, int] = field(default_factory=dict)  # reason -> number of failed transactions


class DatabaseListener(Protocol):
    """Is notified of changes of the database."""

    def committed(self, committed: Committed) -> None:
        """This service has committed changes."""
        ...

    def changed(self, job_id: str) -> None:
        """Any service has changed a job, this one too."""
        ...

    def missed_changes(self) -> None:
        """Changes of other services may have been missed."""
        ...


class Database:
    """Reads and writes the tables, from an event loop."""

    def __init__(self, url: str | Connector, clock: Callable[[], float] = time.time) -> None:
        self.connector = open_database(url) if isinstance(url, str) else url
        self.cache = JobCache()
        self.condition = DatabaseCondition()
        self._listener: DatabaseListener | None = None
        self._clock = clock
        self._short = _Readers(self, "reader")
        self._long = _Readers(self, "long-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._write_connection: Any = None
        self._queue: deque[_Write] = deque()
        self._committing: asyncio.Task[None] | None = None
        self._expected = 0
        self._gathered = asyncio.Event()
        self._waiting: deque[_Write] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._pending: set[asyncio.Timeout] = set()
        self._stopping = False
        # Whether this service learns of all changes, so that cached states are the committed ones.
        self._is_current = not self.connector.is_shared

    # -- reading --------------------------------------------------------------------------------------------

    async def read(self, query: Operation[T], *, is_long: bool = False) -> T:
        """Return the result of `query` on a snapshot of the database. A long one never delays others."""
        readers = self._long if is_long else self._short
        if is_long and readers.waiting >= MAX_WAITING_READS:
            raise UnavailableError("too many large requests at the same time; try again")
        if self.condition.damage:
            raise DatabaseError(self.condition.damage, "restart the service after repairing it")
        return await self._within_deadline(readers.submit(query), "try again")

    def cached(self, job_id: str) -> StoredJob | None:
        """Return the committed state of a job if it is known without a read."""
        if self.condition.damage or not self._is_current:
            return None
        return self.cache.get(job_id)

    def listen(self, listener: DatabaseListener) -> None:
        """Report the changes that this service and others commit to a listener, in the event loop."""
        loop = asyncio.get_running_loop()
        self._listener = listener

        def change(job_id: str, version: int) -> None:
            known = self.cache.get(job_id)
            # This service may have committed the change, or read the job since. Waiting requests do not know
            # of what was only read.
            if version < 0 or known is None or known.version < version:
                self.cache.remove(job_id)
            listener.changed(job_id)

        def listening(*, is_current: bool) -> None:
            self._is_current = is_current
            self.cache.clear()
            listener.missed_changes()

        def schedule(callback: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(callback)

        self.connector.listen(
            lambda job_id, version: schedule(partial(change, job_id, version)),
            lambda is_current: schedule(partial(listening, is_current=is_current)),
        )

    # -- writing --------------------------------------------------------------------------------------------

    async def write(self, operation: Operation[T], *, job_id: str = "", is_report: bool = False) -> T:
        """Return the result of `operation` once it is committed.

        The operation may run more than once, so it must have no effect outside the database. If it raises an
        `AdaScaleError`, it must not have changed anything.
        """
        if self.condition.damage:
            raise DatabaseError(self.condition.damage, "restart the service after repairing it")
        if is_report and self.condition.is_full:
            raise DatabaseError("the disk is full", "reports are refused until there is room, try again")
        if self._stopping:
            raise UnavailableError("the service is stopping; nothing was stored, try again")
        if len(self._queue) >= MAX_WAITING_WRITES:
            raise UnavailableError("too many requests at the same time; nothing was stored, try again")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        write = _Write(operation, job_id, is_report, time.monotonic() + DEADLINE, done)
        self._queue.append(write)
        self._waiting.append(write)
        if len(self._queue) >= self._expected:
            self._gathered.set()
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_all())
        # Not a timer for each, which would take longer than the write.
        if self._sweep is None:
            self._sweep = loop.call_later(SWEEP_INTERVAL, self._end_overdue)
        return await done

    def _end_overdue(self) -> None:
        now = time.monotonic()
        while self._waiting and (self._waiting[0].done.done() or self._waiting[0].deadline < now):
            done = self._waiting.popleft().done
            if not done.done():
                hint = "whether it was stored is unknown, try again"
                done.set_exception(DatabaseError(f"no answer within {DEADLINE} s", hint))
        self._sweep = None
        if self._waiting:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_INTERVAL, self._end_overdue)

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_WRITES_PER_COMMIT))]
                batch = [write for write in batch if not write.done.done()]
                if not batch:
                    continue
                started = loop.time()
                await self._commit_and_answer(batch)
                if self._queue:
                    await self._gather(len(batch), min((loop.time() - started) / 2, MAX_GATHERING))
        finally:
            # Otherwise no later write would start another task.
            self._committing = None

    async def _commit_and_answer(self, batch: list[_Write]) -> None:
        """Commit writes together and answer them, whatever fails: they wait for this only."""
        try:
            committed = await asyncio.get_running_loop().run_in_executor(self._writer, self._commit, batch)
        except Exception as error:
            logger.exception("a commit failed")
            hint = "whether it was stored is unknown, try again"
            committed = self._fail(batch, DatabaseError(f"{type(error).__name__}: {error}", hint))
        try:
            if self._listener is not None:
                self._listener.committed(committed)
        except Exception:
            logger.exception("a commit is stored, but what waits for it was not notified")
        for write in batch:
            if write.done.done():  # the request was cancelled
                continue
            if write.error is None:
                write.done.set_result(write.result)
            else:
                write.done.set_exception(write.error)

    async def _gather(self, answered: int, seconds: float) -> None:
        """Wait until the clients that were just answered may have sent their next writes.

        They share the next commit with the writes that wait for it. Otherwise two groups of clients would
        take turns, each waiting for the commits of both.
        """
        self._expected = min(len(self._queue) + answered, MAX_WRITES_PER_COMMIT)
        self._gathered = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gathered.wait()

    def _commit(self, batch: list[_Write]) -> Committed:
        """Commit writes together, and set their results or errors."""
        # In the order of their jobs, so that two processes lock jobs in the same order.
        batch = sorted(batch, key=lambda write: write.job_id) if self.connector.is_shared else batch
        may_repeat = True
        while True:
            try:
                return self._commit_together(batch)
            except _RetryError as error:
                if self._stopping or time.monotonic() > min(write.deadline for write in batch):
                    return self._fail(batch, DatabaseError(error.__cause__))
                time.sleep(RETRY_INTERVAL)
            except self.connector.error as error:
                failure = self._note_failure(error)
                if failure is Failure.FULL:
                    made_room = self.connector.make_room()
                    reports = [write for write in batch if write.is_report]
                    others = [write for write in batch if not write.is_report]
                    if others and (reports or (made_room and may_repeat)):
                        self._fail(reports, DatabaseError(error))
                        batch, may_repeat = others, may_repeat and not made_room
                        continue
                if failure is Failure.OTHER and len(batch) > 1:
                    return self._commit_alone(batch)
                return self._fail(batch, DatabaseError(error))
            except Exception as error:
                if len(batch) > 1:
                    return self._commit_alone(batch)
                logger.exception("a write failed")
                return self._fail(batch, error)

    def _commit_alone(self, batch: list[_Write]) -> Committed:
        """Commit each write alone: a failed one undoes the others of its commit."""
        changed: dict[str, StoredJob] = {}
        deleted: set[str] = set()
        for write in batch:
            committed = self._commit([write])
            for job in committed.changed:
                changed[job.id] = job
            for job_id in committed.deleted:
                changed.pop(job_id, None)
                deleted.add(job_id)
        return Committed(tuple(changed.values()), frozenset(deleted))

    def _commit_together(self, batch: list[_Write]) -> Committed:
        connector = self.connector
        try:
            if self._write_connection is None:
                self._write_connection = connector.connect(writes=True)
            connection = self._write_connection
            connector.begin(connection, writes=True)
            transaction = Transaction(connector, connection, self.cache)
            for write in batch:
                try:
                    write.result, write.error = write.operation(transaction), None
                except AdaScaleError as error:
                    write.result, write.error = None, error
            write_changes(transaction, self._clock())
            versions = {job_id: transaction.jobs[job_id].version for job_id in transaction.changed}
            connector.commit(connection, {**dict.fromkeys(transaction.deleted, -1), **versions})
        except connector.error as error:
            self._roll_back()
            if connector.failure(error) in (Failure.LOST, Failure.CONFLICT):
                self._note_failure(error)
                raise _RetryError from error
            raise
        except BaseException:
            self._roll_back()
            raise
        self.condition.error = ""
        # Before any request is answered, so that the next request of the same client finds the new state.
        for job_id in transaction.deleted:
            self.cache.remove(job_id)
        changed = tuple(transaction.jobs[job_id] for job_id in transaction.changed)
        for job in changed:
            self.cache.put(job)
        return Committed(changed, frozenset(transaction.deleted - transaction.changed))

    def _roll_back(self) -> None:
        connection, self._write_connection = self._write_connection, None
        if connection is None:
            return
        # If the connection is lost, the database has undone the transaction.
        with suppress(self.connector.error):
            connection.rollback()
        with suppress(self.connector.error):
            connection.close()

    def _fail(self, batch: list[_Write], error: Exception) -> Committed:
        for write in batch:
            write.error = error
        return Committed((), frozenset())

    def _note_failure(self, error: Exception) -> Failure:
        failure = self.connector.failure(error)
        condition = self.condition
        condition.failures[failure.name.lower()] = condition.failures.get(failure.name.lower(), 0) + 1
        if condition.error != str(error):
            condition.error = str(error)
            logger.warning("the database is unavailable: %s", error)
        if failure is Failure.FULL:
            condition.is_full = True
        if failure is Failure.DAMAGED:
            self.note_damage(str(error))
        return failure

    def note_damage(self, reason: str) -> None:
        """Refuse all further requests, because the data can't be trusted any more."""
        if not self.condition.damage:
            self.condition.damage = reason
            self.cache.clear()
            logger.error("the database is damaged, all requests are refused: %s", reason)

    # -- health ---------------------------------------------------------------------------------------------

    async def check(self, *, thorough: bool = False) -> None:
        """Find out whether the database can be trusted, and whether it has room."""
        if not self.condition.damage:
            reason = await self._within_deadline(
                self._long.submit_check(thorough=thorough), "try again", None if thorough else DEADLINE
            )
            if reason:
                self.note_damage(reason)
        was_full = self.condition.is_full
        has_room = partial(self.connector.has_room, was_full=was_full)
        self.condition.is_full = not await asyncio.get_running_loop().run_in_executor(None, has_room)
        if self.condition.is_full and not was_full:
            logger.warning("there is little room left, reports are refused")
        if not self.condition.is_full:
            self.connector.reserve_room()

    # -- the end --------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Accept no further writes, and cancel writes that do not end soon. Called in the event loop."""
        if not self._stopping:
            self._stopping = True
            asyncio.get_running_loop().call_later(STOP_GRACE, self._abandon)

    def _abandon(self) -> None:
        for write in self._waiting:
            if not write.done.done():
                hint = "whether it was stored is unknown, try again"
                write.done.set_exception(DatabaseError("the service is stopping", hint))
        now = asyncio.get_running_loop().time()
        for timeout in self._pending:
            timeout.reschedule(now)
        self._short.interrupt()
        self._long.interrupt()

    async def close(self) -> None:
        """Finish the pending writes, and close the connections."""
        self._stopping = True
        with ExitStack() as stack:  # closes the others if one fails
            stack.callback(self.connector.close)
            stack.callback(self._roll_back)
            stack.callback(self._long.close)
            stack.callback(self._short.close)
            stack.callback(self._writer.shutdown)
            if self._committing is not None:
                await self._committing

    async def _within_deadline(
        self, future: "asyncio.Future[T]", hint: str, seconds: float | None = DEADLINE
    ) -> T:
        try:
            async with asyncio.timeout(seconds) as timeout:
                self._pending.add(timeout)
                try:
                    return await future
                finally:
                    self._pending.discard(timeout)
        except TimeoutError:
            reason = "the service is stopping" if self._stopping else f"no answer within {seconds} s"
            raise DatabaseError(reason, hint) from None


class _Readers:
    """Threads that read, each with a connection of its own."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix=name)
        self._local = threading.local()
        self._connections: list[Any] = []
        self.waiting = 0

    def submit(self, query: Operation[T]) -> "asyncio.Future[T]":
        return self._submit(lambda: self._run(query))

    def submit_check(self, *, thorough: bool) -> "asyncio.Future[str]":
        def check() -> str:
            connector = self._database.connector
            try:
                connection = connector.connect(writes=False)
                try:
                    return connector.check(connection, thorough=thorough)
                finally:
                    connection.close()
            except connector.error as error:
                return str(error) if connector.failure(error) is Failure.DAMAGED else ""

        return self._submit(check)

    def _submit(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        self.waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, function)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: "asyncio.Future[Any]") -> None:
        self.waiting -= 1
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio logs none of a request that was cancelled

    def _run(self, query: Operation[T]) -> T:
        database, connector = self._database, self._database.connector
        for attempt in (1, 2):
            try:
                connection = self._connection()
                connector.begin(connection, writes=False)
                try:
                    return query(Transaction(connector, connection, database.cache))
                finally:
                    connection.rollback()
            except connector.error as error:
                self._forget_connection()
                failure = connector.failure(error)
                if failure is Failure.LOST and attempt == 1:
                    continue
                if failure is Failure.DAMAGED:
                    database.note_damage(str(error))
                raise DatabaseError(error, "try again") from error
        raise AssertionError

    def _connection(self) -> Any:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._database.connector.connect(writes=False)
            self._connections.append(connection)
        return connection

    def _forget_connection(self) -> None:
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None:
            self._connections.remove(connection)
            with suppress(self._database.connector.error):
                connection.close()

    def interrupt(self) -> None:
        for connection in list(self._connections):
            with suppress(self._database.connector.error):  # its thread has closed it meanwhile
                self._database.connector.interrupt(connection)

    def close(self) -> None:
        self.interrupt()
        self._threads.shutdown()
        for connection in self._connections:
            with suppress(self._database.connector.error):
                connection.close()
        self._connections.clear()  # `interrupt` may be called once more


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
