"""The interface of a database."""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, Protocol

from adascale_api.data.sql import Sql
from adascale_core.errors import AdaScaleError


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


LITTLE_ROOM = 4 * 1024 * 1024
"""Bytes of room below which reports are refused."""


class Connector(Protocol):
    """Opens connections to a database, and executes on them what differs between databases."""

    error: type[Exception]  # the base class of the driver's errors
    url: str  # the URL of the database, without a password
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
        """Return whether there is room for reports."""
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
        """Report the changes that services commit, from a thread, until `close`."""
        ...
