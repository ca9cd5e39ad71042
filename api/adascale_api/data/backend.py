"""The interface of a database, and the check that its tables are those of this service."""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any, Protocol

from adascale_api.data.sql import Sql
from adascale_api.data.tables import MIGRATIONS, SCHEMA, SCHEMA_VERSION, TABLES
from adascale_core.errors import AdaScaleError

LITTLE_ROOM = 4 * 1024 * 1024
"""Bytes of room below which reports are refused."""


class UnusableDatabaseError(AdaScaleError):
    """The database can't be used."""

    exit_code = 2


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


class Connector(Protocol):
    """Opens connections to a database, and executes on them what differs between databases."""

    error: type[Exception]  # the base class of the driver's errors
    url: str  # without a password
    is_shared: bool  # whether several processes may use it

    def connect(self, *, writes: bool) -> Any:
        """Open a connection."""
        ...

    def begin(self, connection: Any, *, writes: bool) -> None:
        """Begin a transaction."""
        ...

    def commit(self, connection: Any, changed: Mapping[str, int]) -> None:
        """Commit a transaction, which has changed jobs to these versions; a deleted one to -1."""
        ...

    def interrupt(self, connection: Any) -> None:
        """End the statement that another thread executes on the connection."""
        ...

    def failure(self, error: Exception) -> Failure:
        """Return what an error means."""
        ...

    def check(self, connection: Any, *, thorough: bool) -> str:
        """Return why the database can't be trusted any more; empty if it can. A thorough check reads all."""
        ...

    def has_room(self, *, was_full: bool) -> bool:
        """Return whether there is room for reports; `was_full`: whether there was none before."""
        ...

    def make_room(self) -> bool:
        """Free the space that the service can do without, and return whether there was any."""
        ...

    def reserve_room(self) -> None:
        """Reserve that space again, if there is enough."""
        ...

    def close(self) -> None:
        """Give all resources back."""
        ...

    def text(self, statement: Sql) -> str:
        """Return a statement as the driver reads it."""
        ...

    def listen(self, on_change: Callable[[str, int], None], on_listening: Callable[[bool], None]) -> None:
        """Report the changes that services commit, from a thread, until `close`.

        `on_change` gets a job and its version, -1 if it was deleted; `on_listening` whether all later changes
        are reported.
        """
        ...


def migrates_from(found: set[str], execute: Callable[[str], Iterable[tuple[Any, ...]]]) -> int | None:
    """Return the version of tables that can be changed to those of this release; None without such tables."""
    if SCHEMA not in found:
        return None
    versions = [row[0] for row in execute(f"SELECT version FROM {SCHEMA}")]
    return versions[0] if len(versions) == 1 and versions[0] in MIGRATIONS else None


def _readable_from(row: tuple[Any, ...]) -> int:
    """Return the oldest version that can use tables, from their row with the version."""
    version, *rest = row
    return int(rest[0] if rest else version)


def require_own_tables(
    url: str, found: set[str], execute: Callable[[str], Iterable[tuple[Any, ...]]], *, remedy: str
) -> None:
    """Refuse tables of another version or program. A database without tables is accepted.

    Tables of a later version are accepted if they say that this version can use them.
    """
    if not found:
        return
    if SCHEMA not in found:
        raise UnusableDatabaseError(
            f"database {url} has the tables of another program ({', '.join(sorted(found)[:5])}): {remedy}"
        )
    versions = [(row[0], _readable_from(row)) for row in execute(f"SELECT * FROM {SCHEMA}")]
    if len(versions) != 1 or not versions[0][1] <= SCHEMA_VERSION <= versions[0][0]:
        found_versions = ", ".join(str(version) for version, _ in versions) or "(none)"
        raise UnusableDatabaseError(
            f"database {url} has schema version {found_versions}, this service needs version "
            f"{SCHEMA_VERSION}: use the version of the service that created it, or {remedy}"
        )
    missing = TABLES.keys() - found
    if missing:
        raise UnusableDatabaseError(
            f"database {url} lacks the tables {', '.join(sorted(missing))}: restore it from a backup, or "
            f"{remedy}"
        )
