"""The database: connections, transactions, and group commits.

Reads run concurrently in threads. Writes run in one thread, which commits together all writes that arrived
during the last commit: under load, more requests share one flush to disk. A request is answered after its
commit. Writers of different processes are serialized by SQLite's lock (`BEGIN IMMEDIATE`).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, insert, make_url, select
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from adascale_api import tables
from adascale_core.errors import AdaScaleError

T = TypeVar("T")
Operation = Callable[[Connection], T]

BUSY_TIMEOUT = 10.0
"""Seconds that a writer waits for another process to commit."""
READERS = 4
"""Threads for reads."""
MAX_WRITES_PER_COMMIT = 256
"""Writes in one commit."""


class UnusableDatabaseError(AdaScaleError):
    """The database can't be used."""

    exit_code = 2


class Database:
    """Reads and writes the tables, from an event loop.

    Args:
        url: an SQLAlchemy URL of an SQLite file.

    Raises:
        UnusableDatabaseError: the URL is not valid, or the file can't be opened and written.
    """

    def __init__(self, url: str) -> None:
        self._engine = _open(url)
        self._writes = self._engine.execution_options(adascale_writes=True)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._queue: deque[tuple[Operation[Any], asyncio.Future[Any]]] = deque()
        self._committing: asyncio.Task[None] | None = None

    async def read(self, query: Operation[T]) -> T:
        """Return the result of `query` on a snapshot of the database."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._run, query)

    async def write(self, operation: Operation[T]) -> T:
        """Return the result of `operation` once it is committed.

        The operation may run more than once, so it must have no effect outside the database.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append((operation, done))
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_all())
        return await done

    async def close(self) -> None:
        """Finish the pending writes, and close the files."""
        if self._committing is not None:
            await self._committing
        self._writer.shutdown()
        self._readers.shutdown()
        self._engine.dispose()

    def _run(self, query: Operation[T]) -> T:
        with self._engine.connect() as connection:
            return query(connection)

    def _commit(self, operations: list[Operation[Any]]) -> list[Any]:
        with self._writes.begin() as connection:
            return [operation(connection) for operation in operations]

    async def _commit_all(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_WRITES_PER_COMMIT))]
            if not await self._commit_together(batch):
                # A failed write rolls back the others of its commit, so each is committed alone.
                for write in batch:
                    await self._commit_together([write])
        self._committing = None

    async def _commit_together(self, batch: list[tuple[Operation[Any], asyncio.Future[Any]]]) -> bool:
        """Commit writes and complete their futures. Return False if several writes failed together."""
        operations = [operation for operation, _ in batch]
        commit = asyncio.get_running_loop().run_in_executor(self._writer, self._commit, operations)
        await asyncio.wait([commit])
        error = commit.exception()
        if error is not None and len(batch) > 1:
            return False
        for (_, done), result in zip(batch, commit.result() if error is None else [None], strict=True):
            if done.done():  # the request was cancelled
                continue
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)
        return True


def _open(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            raise UnusableDatabaseError(
                f"database {parsed.render_as_string()} is not supported: use sqlite:///PATH"
            )
        if parsed.database in (None, "", ":memory:"):
            raise UnusableDatabaseError(
                f"database {url} is in memory and would lose all data at the end: use sqlite:///PATH"
            )
        engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT})
    except (ArgumentError, ImportError) as error:
        raise UnusableDatabaseError(
            f"database URL {url!r} is not valid: {error}; use sqlite:///PATH"
        ) from error
    event.listen(engine, "connect", _prepare_connection)
    event.listen(engine, "begin", _begin)
    try:
        _create_tables(engine)
    except SQLAlchemyError as error:
        engine.dispose()
        reason = getattr(error, "orig", None) or error
        raise UnusableDatabaseError(
            f"database {parsed.render_as_string()} can't be opened and written: {reason}"
        ) from error
    return engine


def _create_tables(engine: Engine) -> None:
    with engine.execution_options(adascale_writes=True).begin() as connection:
        tables.metadata.create_all(connection)
        found = connection.scalars(select(tables.schema.c.version)).all()
        if not found:
            connection.execute(insert(tables.schema).values(version=tables.SCHEMA_VERSION))
        elif found != [tables.SCHEMA_VERSION]:
            raise UnusableDatabaseError(
                f"database {engine.url.render_as_string()} has schema version {found[0]}, this service needs "
                f"version {tables.SCHEMA_VERSION}: use the version of the service that created it, or "
                "another database"
            )


def _prepare_connection(connection: Any, _record: object) -> None:
    # Disable the driver's implicit transactions; `_begin` starts them.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    # Commits survive a loss of power. Group commits make it affordable.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("adascale_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
