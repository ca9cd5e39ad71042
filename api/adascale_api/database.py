"""The database: connections, transactions, and the commits of many requests in one.

Reads run side by side in threads. Writes go through one thread, which commits together whatever has come
in while it was busy with the last commit: the fuller the house, the more requests share the wait for the
disk. A request is answered after its commit. Across processes, SQLite's own lock (`BEGIN IMMEDIATE`) makes
writers take turns.
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
"""Threads that read."""
MAX_PER_COMMIT = 256
"""Writes that share a commit, at most."""


class UnusableDatabaseError(AdaScaleError):
    """A database that the service can't work with."""

    exit_code = 2


class Database:
    """The one way to the tables, for use on an event loop.

    Args:
        url: an SQLAlchemy URL of an SQLite file.

    Raises:
        UnusableDatabaseError: the URL is not one, or names what can't be opened and written.
    """

    def __init__(self, url: str) -> None:
        self._engine = _open(url)
        self._writes = self._engine.execution_options(adascale_writes=True)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._queue: deque[tuple[Operation[Any], asyncio.Future[Any]]] = deque()
        self._committing: asyncio.Task[None] | None = None

    async def read(self, query: Operation[T]) -> T:
        """The result of `query` on one snapshot of the database."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._run, query)

    async def write(self, operation: Operation[T]) -> T:
        """The result of `operation` once it is committed.

        It may run more than once, so it may change nothing but the database.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append((operation, done))
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_all())
        return await done

    async def close(self) -> None:
        """Finish the writes that have begun, and let go of the files."""
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
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_PER_COMMIT))]
            if not await self._commit_together(batch):
                # One of them failed and took the others with it. Each for itself, then.
                for one in batch:
                    await self._commit_together([one])
        self._committing = None

    async def _commit_together(self, batch: list[tuple[Operation[Any], asyncio.Future[Any]]]) -> bool:
        """Commit a batch and answer its requests; whether that is done."""
        operations = [operation for operation, _ in batch]
        commit = asyncio.get_running_loop().run_in_executor(self._writer, self._commit, operations)
        await asyncio.wait([commit])
        error = commit.exception()
        if error is not None and len(batch) > 1:
            return False
        for (_, done), result in zip(batch, commit.result() if error is None else [None], strict=True):
            if done.done():  # the one who asked has been cancelled
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
                f"database {url} would forget everything at the end: use sqlite:///PATH"
            )
        engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT})
    except (ArgumentError, ImportError) as error:
        raise UnusableDatabaseError(f"database {url!r} is not one: {error}; use sqlite:///PATH") from error
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
                f"database {engine.url.render_as_string()} has tables of version {found[0]}, this service "
                f"needs version {tables.SCHEMA_VERSION}: use the service that made it, or another database"
            )


def _prepare_connection(connection: Any, _record: object) -> None:
    # The driver would begin transactions at times of its own; `_begin` does instead.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    # What was committed survives the loss of power too. Shared commits make it affordable.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("adascale_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
