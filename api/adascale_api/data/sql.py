"""SQL statements for SQLite and PostgreSQL, and the transactions that execute them.

Statements are written by hand and executed by the drivers: building them would take longer than running them.
They use the SQL that both databases have.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from adascale_api.data.job import JobCache, StoredJob

if TYPE_CHECKING:
    from adascale_api.data.backend import Connector  # whose methods take statements

Row = tuple[Any, ...]
T = TypeVar("T")


class Sql:
    """A statement with named parameters, written `:name`, or with parameters by position, written `?`.

    With `lock`, PostgreSQL locks the selected rows until the end of the transaction. SQLite's writers run one
    after another.
    """

    def __init__(self, text: str, *, lock: bool = False) -> None:
        self.sqlite = text
        named = re.sub(r":(\w+)", r"%(\1)s", text).replace("?", "%s")
        self.postgresql = named + (" FOR UPDATE" if lock else "")


@lru_cache
def _with_ids(query: str, count: int) -> Sql:
    """Return a query for so many jobs, made once."""
    return Sql(query.format(ids=", ".join(f":id_{number}" for number in range(count))))


def upsert(table: str, key: str, *columns: str) -> Sql:
    """Return the statement that stores a row, in place of the one that has its key."""
    names = [*key.split(", "), *columns]
    return Sql(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)}) "
        f"ON CONFLICT ({key}) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in columns)}"
    )


class Transaction:
    """Executes statements in a transaction.

    Several operations may share a transaction, so a job that they change is written once, before the commit.
    """

    def __init__(self, connector: "Connector", connection: Any, cache: JobCache) -> None:
        self._connector = connector
        self._connection = connection
        self.cache = cache
        self.loaded: list[StoredJob] = []  # the states that were read from the database
        self.jobs: dict[str, StoredJob] = {}  # those that this transaction has locked, as it leaves them
        self.changed: set[str] = set()
        self.activated: set[str] = set()  # those whose active generation it has changed or ended
        self.deleted: set[str] = set()

    def all(self, statement: Sql, **parameters: Any) -> list[Row]:
        """Return all rows of a query."""
        cursor = self._connection.execute(self._connector.text(statement), parameters)
        rows: list[Row] = cursor.fetchall()
        return rows

    def all_of(self, query: str, ids: Sequence[str]) -> list[Row]:
        """Return all rows of a query for some jobs, which has `{ids}` for the list of their ids."""
        parameters = {f"id_{number}": job_id for number, job_id in enumerate(ids)}
        return self.all(_with_ids(query, len(ids)), **parameters)

    def first(self, statement: Sql, **parameters: Any) -> Row | None:
        """Return the first row of a query; None if there is none."""
        cursor = self._connection.execute(self._connector.text(statement), parameters)
        row: Row | None = cursor.fetchone()
        return row

    def execute(self, statement: Sql, **parameters: Any) -> int:
        """Execute a statement, and return the number of rows that it has changed."""
        cursor = self._connection.execute(self._connector.text(statement), parameters)
        count: int = cursor.rowcount
        return count

    def commit(self) -> None:
        """Commit what was written, with the versions of the jobs that it has changed."""
        changed = {job_id: self.jobs[job_id].version for job_id in self.changed}
        self._connector.commit(self._connection, {**dict.fromkeys(self.deleted, -1), **changed})

    def execute_for_each(self, statement: Sql, rows: Sequence[Row]) -> None:
        """Execute a statement once for each row of its parameters, by position."""
        self._connection.cursor().executemany(self._connector.text(statement), rows)


class Connections:
    """Threads with a connection for each, which is opened again after an error of the driver."""

    def __init__(
        self,
        connector: "Connector",
        cache: JobCache,
        threads: int,
        name: str,
        *,
        writes: bool = False,
    ) -> None:
        self._connector = connector
        self._cache = cache
        self._writes = writes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._open: dict[int, Any] = {}
        """The connection of each thread that has one."""
        self.waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of work that a thread does."""
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.waiting -= 1

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Begin a transaction, which is undone at the end unless it was committed."""
        connector, thread = self._connector, get_ident()
        if thread not in self._open:
            self._open[thread] = connector.connect(writes=self._writes)
        connection = self._open[thread]
        try:
            connector.begin(connection, writes=self._writes)
            try:
                yield Transaction(connector, connection, self._cache)
            except BaseException:
                with suppress(connector.error):  # that of a lost connection, which hides why it was lost
                    connection.rollback()
                raise
            connection.rollback()
        except connector.error:
            del self._open[thread]
            # If it is lost, the database has undone the transaction.
            with suppress(connector.error):
                connection.close()
            raise

    def close(self) -> None:
        """Finish the work, and close the connections."""
        self._threads.shutdown()
        for connection in self._open.values():
            with suppress(self._connector.error):
                connection.close()
