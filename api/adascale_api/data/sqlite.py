"""A database in an SQLite file: written by one process, and read by any."""

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote, unquote

from adascale_api.data.backend import (
    LITTLE_ROOM,
    Failure,
    UnusableDatabaseError,
    migrates_from,
    require_own_tables,
)
from adascale_api.data.sql import Sql
from adascale_api.data.tables import (
    READABLE_FROM,
    SCHEMA,
    SCHEMA_VERSION,
    create_statements,
    migration_statements,
)

PREFIX = "sqlite:///"
BUSY_TIMEOUT = 2.0
"""Seconds to wait for a lock that another program holds."""
READ_TIMEOUT = 4.0
"""Seconds after which a query is ended."""
RESERVE = 8 * 1024 * 1024
"""Bytes of a file that is removed when the disk is full, so that registrations, allocations and deletions
have room: a commit needs some even if it deletes."""
MAX_RESERVED_FRACTION = 0.1
"""Of the disk, for the reserve."""
_INSTRUCTIONS_PER_CHECK = 50_000
_DOUBLE = "DOUBLE"

logger = logging.getLogger(__name__)

_LOCK_ERRORS = frozenset(
    {f"SQLITE_IOERR_{name}" for name in ("LOCK", "RDLOCK", "UNLOCK", "CHECKRESERVEDLOCK")}
)

_FAILURES = {
    sqlite3.SQLITE_FULL: Failure.FULL,
    sqlite3.SQLITE_IOERR: Failure.FULL,
    sqlite3.SQLITE_BUSY: Failure.BUSY,
    sqlite3.SQLITE_LOCKED: Failure.BUSY,
    sqlite3.SQLITE_INTERRUPT: Failure.BUSY,
    sqlite3.SQLITE_CORRUPT: Failure.DAMAGED,
    sqlite3.SQLITE_NOTADB: Failure.DAMAGED,
    sqlite3.SQLITE_READONLY: Failure.LOST,
    sqlite3.SQLITE_CANTOPEN: Failure.LOST,
}


class _SqliteFile:
    """What the connections that write a file and those that only read it have in common."""

    error: type[Exception] = sqlite3.Error

    def interrupt(self, connection: sqlite3.Connection) -> None:
        """End the statement that another thread executes."""
        connection.interrupt()

    def text(self, statement: Sql) -> str:
        """Return a statement as the driver reads it."""
        return statement.sqlite

    def listen(self, on_change: Callable[[str, int], None], on_listening: Callable[[bool], None]) -> None:
        """Do nothing: SQLite reports no changes by other processes."""


class SqliteConnector(_SqliteFile):
    """Opens connections to an SQLite file, which no other process writes."""

    is_shared = False

    def __init__(self, url: str) -> None:
        self.url = url
        path = unquote(url.removeprefix(PREFIX).partition("?")[0], errors="surrogateescape")
        if not url.startswith(PREFIX) or path in ("", ":memory:"):
            raise UnusableDatabaseError(
                f"database {url} is in memory and would lose all data at the end: use sqlite:///PATH"
            )
        self._path = Path(path)
        self._reserve = self._path.with_name(f"{self._path.name}-reserve")
        self._lock_file = self._lock()
        self._vfs: str | None = None
        try:
            if self._free() < self._reserve_size():
                self._reserve.unlink(missing_ok=True)
            try:
                self._open_tables()
            except sqlite3.Error as error:
                if not getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR_SHM"):
                    raise
                # WAL has its index in shared memory, into which files of some network file systems can't be
                # mapped. This VFS keeps it in the memory of the process, which is the only one.
                self._vfs = "unix-excl"
                self._open_tables()
            self._identity = self._identify()
            self._reserve_room()
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock_file)
            if getattr(error, "sqlite_errorname", None) in _LOCK_ERRORS:
                raise UnusableDatabaseError(
                    f"database {url} can't be used: the file system of {self._path.parent.absolute()} has no "
                    "file locks, which SQLite needs. Use a file on a local disk, mount the file system with "
                    "locks (Lustre: -o flock), or use a PostgreSQL database"
                ) from error
            raise UnusableDatabaseError(f"database {url} can't be opened and written: {error}") from error
        except UnusableDatabaseError:
            os.close(self._lock_file)
            raise

    # -- connections ----------------------------------------------------------------------------------------

    def connect(self, *, writes: bool) -> sqlite3.Connection:
        """Open a connection."""
        connection = sqlite3.connect(
            self._path if self._vfs is None else f"file:{quote(os.fsencode(self._path))}?vfs={self._vfs}",
            uri=self._vfs is not None,
            timeout=BUSY_TIMEOUT,
            isolation_level=None,  # `begin` starts the transactions
            check_same_thread=False,
            cached_statements=256,
        )
        connection.execute("PRAGMA journal_mode = WAL")
        # Commits survive a loss of power. Group commits make it affordable.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {RESERVE // 4}")
        connection.execute("PRAGMA cell_size_check = ON")
        if not writes:
            connection.execute("PRAGMA query_only = ON")
        return connection

    def begin(self, connection: sqlite3.Connection, *, writes: bool) -> None:
        """Begin a transaction. A query ends after `READ_TIMEOUT`."""
        if writes:
            connection.execute("BEGIN IMMEDIATE")
        else:
            _begin_read(connection)

    def commit(self, connection: sqlite3.Connection, changed: Mapping[str, int]) -> None:  # noqa: ARG002
        """Commit a transaction, unless the file was deleted or replaced: the data would be lost."""
        if self._identify() != self._identity:
            raise sqlite3.DatabaseError(f"the file {self._path} was deleted or replaced")
        connection.execute("COMMIT")

    def close(self) -> None:
        """Unlock the file."""
        os.close(self._lock_file)

    # -- health ---------------------------------------------------------------------------------------------

    def failure(self, error: Exception) -> Failure:
        """Return what an error means."""
        return _meaning_of(error)

    def check(self, connection: sqlite3.Connection, *, thorough: bool) -> str:
        """Return the problems of the file; empty if there are none."""
        if self._identify() != self._identity:
            return f"the file {self._path} was deleted or replaced"
        found = "ok"
        try:
            _require_own_tables(connection, self.url)
            if thorough:
                (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except (sqlite3.DatabaseError, UnusableDatabaseError) as error:
            if self.failure(error) in (Failure.BUSY, Failure.FULL):
                return ""
            return str(error)
        return "" if found == "ok" else str(found)

    def has_room(self, *, was_full: bool) -> bool:  # noqa: ARG002
        """Return whether there is room on the disk and in free pages of the file, besides the reserve."""
        try:
            free_pages = self._free_pages()
        except sqlite3.Error:
            free_pages = 0
        return self._free() + free_pages >= LITTLE_ROOM

    def make_room(self) -> bool:
        """Remove the reserve, empty the write-ahead log, and return whether that made room.

        The log is emptied while the file can still grow by its pages. Otherwise it would take the room of the
        reserve, and grow until it can't be emptied any more.
        """
        try:
            before = self._free()
            self._reserve.unlink(missing_ok=True)
            with suppress(sqlite3.Error):
                connection = self.connect(writes=True)
                try:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                finally:
                    connection.close()
            return self._free() > before
        except OSError:
            return False  # the file system can't be changed, or is away

    def reserve_room(self) -> None:
        """Write the reserve again if there is room for it."""
        if not self._reserve.exists() and self._free() > 3 * self._reserve_size():
            self._reserve_room()

    def _reserve_size(self) -> int:
        status = os.statvfs(self._path.parent)
        return min(RESERVE, int(MAX_RESERVED_FRACTION * status.f_blocks * status.f_frsize))

    def _reserve_room(self) -> None:
        size = self._reserve_size()
        if self._free() < 2 * size:
            return
        with self._reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))

    def _free(self) -> int:
        status = os.statvfs(self._path.parent)
        return status.f_bavail * status.f_frsize

    def _free_pages(self) -> int:
        connection = self.connect(writes=False)
        try:
            (pages,) = connection.execute("PRAGMA freelist_count").fetchone()
            (size,) = connection.execute("PRAGMA page_size").fetchone()
        finally:
            connection.close()
        return int(pages * size)

    def _identify(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _lock(self) -> int:
        path = self._path.with_name(f"{self._path.name}-lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnusableDatabaseError(
                f"database {self.url} can't be opened and written: unable to open database file "
                f"({error.strerror})"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UnusableDatabaseError(
                f"database {self.url} is used by another metrics service: stop it, or use another file; "
                "several services can share a PostgreSQL database"
            ) from error
        except OSError:
            pass  # a file system without locks
        return descriptor

    def _open_tables(self) -> None:
        connection = self.connect(writes=True)
        try:
            version = migrates_from(_find_tables(connection), connection.execute)
            if version is not None:
                self._migrate(connection, version)
            self._create_tables(connection)
        finally:
            connection.close()

    def _migrate(self, connection: sqlite3.Connection, version: int) -> None:
        """Change the tables of an earlier version, after making a copy of the file for going back."""
        copy = self._path.with_name(f"{self._path.name}.schema-{version}")
        copy.unlink(missing_ok=True)
        try:
            connection.execute("VACUUM INTO ?", (str(copy),))
        except sqlite3.Error as error:
            # SQLite leaves what it has written, which would take the room of the data.
            copy.unlink(missing_ok=True)
            if self.failure(error) is not Failure.FULL:
                raise
            size = self._path.stat().st_size
            raise UnusableDatabaseError(
                f"database {self.url} has tables of version {version}, and no room for a copy of it, "
                f"which is made before they are changed to version {SCHEMA_VERSION}: make room for "
                f"{size >> 20} MiB more beside it, or use the version of the service that created it"
            ) from error
        self.begin(connection, writes=True)
        try:
            for statement in migration_statements(version, double=_DOUBLE):
                connection.execute(statement)
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            raise
        logger.warning(
            "changed the tables of %s from version %d to %d; the release before needs the copy %s",
            self.url,
            version,
            SCHEMA_VERSION,
            copy,
        )

    def _create_tables(self, connection: sqlite3.Connection) -> None:
        self.begin(connection, writes=True)
        try:
            _require_own_tables(connection, self.url)
            for statement in create_statements(
                key="INTEGER PRIMARY KEY AUTOINCREMENT",
                double=_DOUBLE,
                binary="BLOB",
                suffixes={"reports": "WITHOUT ROWID", "step_times": "WITHOUT ROWID"},
            ):
                connection.execute(statement)
            connection.execute(
                f"INSERT INTO {SCHEMA} SELECT {SCHEMA_VERSION}, {READABLE_FROM} "
                f"WHERE NOT EXISTS (SELECT * FROM {SCHEMA})"
            )
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()  # SQLite itself has undone it if the disk is full; then this does nothing
            raise


class SqliteReader(_SqliteFile):
    """Opens connections that read the file of a metrics service, also while that service runs.

    SQLite's write-ahead log lets other processes read while the service writes.
    """

    # Another process may change the file, so cached states may not be the committed ones.
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
        _begin_read(connection)

    def commit(self, connection: sqlite3.Connection, changed: Mapping[str, int]) -> None:  # noqa: ARG002
        """Refuse it: nothing is written."""
        self._refuse()

    def failure(self, error: Exception) -> Failure:
        """Return what an error means; damage may be that of a file which was deleted or replaced."""
        failure = _meaning_of(error)
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

    def _check_tables(self) -> None:
        connection = self.connect(writes=False)
        try:
            found = _find_tables(connection)
            if not found:
                raise UnusableDatabaseError(f"{self._path} has no data of a metrics service")
            require_own_tables(self.url, found, connection.execute, remedy="start the job over with --fresh")
        finally:
            connection.close()

    def _refuse(self) -> NoReturn:
        raise UnusableDatabaseError(f"{self._path} is only read")


def _begin_read(connection: sqlite3.Connection) -> None:
    """Begin a transaction that reads. A query ends after `READ_TIMEOUT`."""
    connection.execute("BEGIN")
    deadline = time.monotonic() + READ_TIMEOUT
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS_PER_CHECK)


def _meaning_of(error: Exception) -> Failure:
    """Return what an error of the driver means."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        # Raised here, or by the driver for a closed connection.
        return Failure.DAMAGED if isinstance(error, sqlite3.DatabaseError) else Failure.OTHER
    return _FAILURES.get(code & 0xFF, Failure.OTHER)


def _find_tables(connection: sqlite3.Connection) -> set[str]:
    """Return the names of the tables of a database."""
    rows = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )
    return {name for (name,) in rows}


def _require_own_tables(connection: sqlite3.Connection, url: str) -> None:
    require_own_tables(url, _find_tables(connection), connection.execute, remedy="use another file")
