"""The interface of a database, and the check that its tables are those of this service."""

import logging
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from adascale_api.data.sql import Sql
from adascale_api.data.tables import (
    MIGRATION,
    READABLE_FROM,
    RELEASED_VERSION,
    SCHEMA,
    SCHEMA_VERSION,
    TABLES,
)
from adascale_core.errors import UsageError

logger = logging.getLogger(__name__)


class UnusableDatabaseError(UsageError):
    """The database can't be used."""


class Failure(Enum):
    """What an error of the driver means."""

    FULL = auto()
    """There is no room to write."""
    BUSY = auto()
    """Another connection holds a lock for too long."""
    LOST = auto()
    """The connection is lost, or the server can't write now. A new connection may succeed."""
    CONFLICT = auto()
    """The transaction was undone because of another one, and may succeed when it is repeated."""
    DAMAGED = auto()
    """The database is not what the service has written."""
    OTHER = auto()
    """The statement failed."""


class Connector:
    """Opens connections to a database, and executes on them what differs between databases."""

    error: type[Exception]
    """The base class of the driver's errors."""
    url: str
    """Without a password."""
    is_shared: bool
    """Whether several processes may use it."""
    key: str
    """The column with the key of a job."""
    suffixes: Mapping[str, str] = {}
    """What follows the columns of a table."""
    text: Callable[[Sql], str]
    """Returns a statement as the driver reads it."""
    remedy = "use another database"
    """What to do if the tables can't be used."""

    def connect(self, *, writes: bool) -> Any:
        """Open a connection."""
        raise NotImplementedError

    def begin(self, connection: Any, *, writes: bool) -> None:
        """Begin a transaction, unless the first statement does."""

    def commit(self, connection: Any, changed: Mapping[str, int]) -> None:
        """Commit a transaction, which has changed jobs to these versions; a deleted one to -1."""
        raise NotImplementedError

    def failure(self, error: Exception) -> Failure:
        """Return what an error means."""
        raise NotImplementedError

    def check(self, connection: Any, *, thorough: bool) -> str:  # noqa: ARG002 (of SQLite)
        """Return why the database can't be trusted any more; empty if it can. A thorough check reads all."""
        try:
            self.require_own_tables(connection)
        except UnusableDatabaseError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Give all resources back."""

    def listen(self, on_change: Callable[[str, int], None], on_listening: Callable[[bool], None]) -> None:
        """Report the changes that services commit, from a thread, until `close`.

        `on_change` gets a job and its version, -1 if it was deleted; `on_listening` whether all later changes
        are reported.
        """

    def find_tables(self, connection: Any) -> set[str]:
        """Return the names of the tables that the database has."""
        raise NotImplementedError

    def is_released(self, connection: Any) -> bool:
        """Whether the tables are those of `RELEASED_VERSION`."""
        if SCHEMA not in self.find_tables(connection):
            return False
        versions = [row[0] for row in connection.execute(f"SELECT version FROM {SCHEMA}")]
        return versions == [RELEASED_VERSION]

    def prepare_tables(self, connection: Any) -> None:
        """Create the tables, or change those of an earlier version, in a transaction."""
        if self.is_released(connection):
            for statement in MIGRATION:
                connection.execute(statement)
            logger.warning("changed the tables of %s to version %d", self.url, SCHEMA_VERSION)
        else:
            self.require_own_tables(connection)
        for name, columns in TABLES.items():
            suffix = self.suffixes.get(name, "")
            connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns.format(key=self.key)}) {suffix}")
        connection.execute(
            f"INSERT INTO {SCHEMA} SELECT {SCHEMA_VERSION}, {READABLE_FROM} "
            f"WHERE NOT EXISTS (SELECT * FROM {SCHEMA})"
        )

    def require_own_tables(self, connection: Any) -> None:
        """Refuse tables of another version or program. A database without tables is accepted.

        Tables of a later version are accepted if they say that this version can use them.
        """
        found = self.find_tables(connection)
        if not found:
            return
        if SCHEMA not in found:
            raise UnusableDatabaseError(
                f"database {self.url} has the tables of another program ({', '.join(sorted(found)[:5])}): "
                f"{self.remedy}"
            )
        # An earlier version has no column for the oldest one that can use its tables.
        versions = [(row[0], row[-1]) for row in connection.execute(f"SELECT * FROM {SCHEMA}")]
        if len(versions) != 1 or not versions[0][1] <= SCHEMA_VERSION <= versions[0][0]:
            found_versions = ", ".join(str(version) for version, _ in versions) or "(none)"
            raise UnusableDatabaseError(
                f"database {self.url} has schema version {found_versions}, this service needs version "
                f"{SCHEMA_VERSION}: use the version of the service that created it, or {self.remedy}"
            )
        missing = TABLES.keys() - found
        if missing:
            raise UnusableDatabaseError(
                f"database {self.url} lacks the tables {', '.join(sorted(missing))}: restore it from a "
                f"backup, or {self.remedy}"
            )
