"""A database in an SQLite file: written by one process, and read by any."""

import fcntl
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from urllib.parse import quote, unquote

from adascale_api.data.backend import Connector, Failure, UnusableDatabaseError
from adascale_api.data.tables import RELEASED_VERSION, SCHEMA_VERSION

PREFIX = "sqlite:///"
BUSY_TIMEOUT = 2.0
"""Seconds to wait for a lock that another program holds."""
READ_TIMEOUT = 4.0
"""Seconds after which a query is ended."""
LOG_SIZE = 8 * 1024 * 1024
"""Bytes of the write-ahead log that are kept for later commits, also if the disk is full then."""
_INSTRUCTIONS_PER_CHECK = 50_000

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


class _SqliteFile(Connector):
    """What the connections that write a file and those that only read it have in common."""

    error = sqlite3.Error
    key = "key INTEGER PRIMARY KEY AUTOINCREMENT"
    suffixes = dict.fromkeys(("reports", "step_times"), "WITHOUT ROWID")
    text = attrgetter("sqlite")
    remedy = "use another file"

    _path: Path
    _options: str
    """Of the URI of the file."""

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            f"file://{quote(os.fsencode(self._path.absolute()))}?{self._options}",
            uri=True,
            timeout=BUSY_TIMEOUT,
            isolation_level=None,  # `begin` starts the transactions
            check_same_thread=False,
            cached_statements=256,
        )

    def begin(self, connection: sqlite3.Connection, *, writes: bool) -> None:
        """Begin a transaction. A query ends after `READ_TIMEOUT`."""
        connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        if not writes:
            deadline = time.monotonic() + READ_TIMEOUT
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS_PER_CHECK)

    def failure(self, error: Exception) -> Failure:
        """Return what an error means."""
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            # Raised here, or by the driver for a closed connection.
            return Failure.DAMAGED if isinstance(error, sqlite3.DatabaseError) else Failure.OTHER
        return _FAILURES.get(code & 0xFF, Failure.OTHER)

    def find_tables(self, connection: sqlite3.Connection) -> set[str]:
        """Return the names of all tables."""
        rows = connection.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        )
        return {name for (name,) in rows}


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
        self._lock_file = self._lock()
        self._options = "mode=rwc"
        try:
            try:
                self._open_tables()
            except sqlite3.Error as error:
                if not getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR_SHM"):
                    raise
                # WAL has its index in shared memory, into which files of some network file systems can't be
                # mapped. This VFS keeps it in the memory of the process, which is the only one.
                self._options = "vfs=unix-excl"
                self._open_tables()
            self._identity = self._identify()
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

    def connect(self, *, writes: bool) -> sqlite3.Connection:
        """Open a connection."""
        connection = self._connect()
        connection.execute("PRAGMA journal_mode = WAL")
        # Commits survive a loss of power. Group commits make it affordable.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_SIZE}")
        connection.execute("PRAGMA cell_size_check = ON")
        if not writes:
            connection.execute("PRAGMA query_only = ON")
        return connection

    def commit(self, connection: sqlite3.Connection, changed: Mapping[str, int]) -> None:  # noqa: ARG002
        """Commit a transaction, unless the file was deleted or replaced: the data would be lost."""
        if self._identify() != self._identity:
            raise sqlite3.DatabaseError(f"the file {self._path} was deleted or replaced")
        connection.execute("COMMIT")

    def close(self) -> None:
        """Unlock the file."""
        os.close(self._lock_file)

    def check(self, connection: sqlite3.Connection, *, thorough: bool) -> str:
        """Return the problems of the file; empty if there are none."""
        if self._identify() != self._identity:
            return f"the file {self._path} was deleted or replaced"
        found = "ok"
        try:
            self.require_own_tables(connection)
            if thorough:
                (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except (sqlite3.DatabaseError, UnusableDatabaseError) as error:
            if self.failure(error) in (Failure.BUSY, Failure.FULL):
                return ""
            return str(error)
        return "" if found == "ok" else str(found)

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
        with closing(self.connect(writes=True)) as connection:
            if self.is_released(connection):
                self._copy(connection)
            # The end of the connection undoes what is not committed.
            self.begin(connection, writes=True)
            self.prepare_tables(connection)
            connection.execute("COMMIT")

    def _copy(self, connection: sqlite3.Connection) -> None:
        """Copy the file before its tables of an earlier version are changed, for going back."""
        copy = self._path.with_name(f"{self._path.name}.schema-{RELEASED_VERSION}")
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
                f"database {self.url} has tables of version {RELEASED_VERSION}, and no room for a copy of "
                f"it, which is made before they are changed to version {SCHEMA_VERSION}: make room for "
                f"{size >> 20} MiB more beside it, or use the version of the service that created it"
            ) from error


class SqliteReader(_SqliteFile):
    """Opens connections that read the file of a metrics service, also while that service runs.

    SQLite's write-ahead log lets other processes read while the service writes.
    """

    # Another process may change the file, so cached states may not be the committed ones.
    is_shared = True
    remedy = "start the job over with --fresh"

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

    def connect(self, *, writes: bool) -> sqlite3.Connection:  # noqa: ARG002
        """Open a connection, which cannot write."""
        connection = self._connect()
        connection.execute("PRAGMA query_only = ON")
        return connection

    def failure(self, error: Exception) -> Failure:
        """Return what an error means; damage may be that of a file which was deleted or replaced."""
        failure = super().failure(error)
        return Failure.LOST if failure is Failure.DAMAGED else failure

    def _check_tables(self) -> None:
        with closing(self.connect(writes=False)) as connection:
            if not self.find_tables(connection):
                raise UnusableDatabaseError(f"{self._path} has no data of a metrics service")
            self.require_own_tables(connection)
