"""Reads the SQLite file of a metrics service, also while that service runs.

Nothing of it is changed. SQLite's write-ahead log lets other processes read while the service writes.
"""

import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from adascale_api.data.backends.base import Failure, UnusableDatabaseError
from adascale_api.data.backends.ownership import require_own_tables
from adascale_api.data.backends.sqlite import BUSY_TIMEOUT, begin_read, find_tables, meaning_of
from adascale_api.data.sql import Sql


class SqliteReader:
    """Opens connections that read an SQLite file."""

    error: type[Exception] = sqlite3.Error
    # Another process may change it, so that cached states may not be the committed ones.
    is_shared = True

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        self._path = path
        # In the folder of another user, or on a file system without shared memory, only the file itself can
        # be read, which is complete after the end of its service.
        self._options = "mode=rw"
        try:
            try:
                self._check_tables()
            except sqlite3.Error:
                self._options = "mode=ro&immutable=1"
                self._check_tables()
        except sqlite3.Error as error:
            raise UnusableDatabaseError(f"{path} can't be read: {error}") from error

    def connect(self, *, writes: bool) -> sqlite3.Connection:
        """Open a connection, which cannot write."""
        if writes:
            self._refuse()
        connection = sqlite3.connect(
            f"file:{quote(os.fsencode(self._path.absolute()))}?{self._options}",
            uri=True,
            timeout=BUSY_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.execute("PRAGMA query_only = ON")
        return connection

    def begin(self, connection: sqlite3.Connection, *, writes: bool) -> None:
        """Begin a transaction that reads."""
        if writes:
            self._refuse()
        begin_read(connection)

    def commit(self, connection: sqlite3.Connection, changed: Mapping[str, int]) -> None:  # noqa: ARG002
        """Refuse it: nothing is written."""
        self._refuse()

    def interrupt(self, connection: sqlite3.Connection) -> None:
        """End the statement that another thread executes."""
        connection.interrupt()

    def failure(self, error: Exception) -> Failure:
        """Return what an error means; damage may be that of a file which was deleted or replaced."""
        failure = meaning_of(error)
        return Failure.LOST if failure is Failure.DAMAGED else failure

    def check(self, connection: sqlite3.Connection, *, thorough: bool) -> str:  # noqa: ARG002
        """Return no problem: the service that writes the file checks it."""
        return ""

    def has_room(self, *, was_full: bool) -> bool:  # noqa: ARG002
        """Return True: nothing is written."""
        return True

    def make_room(self) -> bool:
        """Return False: nothing is written."""
        return False

    def reserve_room(self) -> None:
        """Do nothing: nothing is written."""

    def close(self) -> None:
        """Do nothing: the file is not locked."""

    def text(self, statement: Sql) -> str:
        """Return a statement as the driver reads it."""
        return statement.sqlite

    def listen(self, on_change: Callable[[str, int], None], on_listening: Callable[[bool], None]) -> None:
        """Do nothing: SQLite reports no changes of other processes."""

    def _check_tables(self) -> None:
        connection = self.connect(writes=False)
        try:
            found = find_tables(connection)
            if not found:
                raise UnusableDatabaseError(f"{self._path} has no data of a metrics service")
            require_own_tables(self.url, found, connection.execute, remedy="start the job over with --fresh")
        finally:
            connection.close()

    def _refuse(self) -> NoReturn:
        raise UnusableDatabaseError(f"{self._path} is only read")
