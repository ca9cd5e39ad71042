"""Whether a database belongs to this service."""

from collections.abc import Callable, Iterable
from typing import Any

from adascale_api.data.backends.base import UnusableDatabaseError
from adascale_api.data.tables import SCHEMA, SCHEMA_VERSION, TABLES


def require_own_tables(
    url: str, found: set[str], execute: Callable[[str], Iterable[tuple[Any, ...]]], *, remedy: str
) -> None:
    """Refuse tables of another version or program. A database without tables is accepted.

    Args:
        url: the URL of the database, without a password.
        found: names of the tables that it has.
        execute: executes a statement, and returns its rows.
        remedy: what the user can do, for messages.

    Raises:
        UnusableDatabaseError: tables are missing, or belong to another version or program.
    """
    if not found:
        return
    if SCHEMA not in found:
        raise UnusableDatabaseError(
            f"database {url} has the tables of another program ({', '.join(sorted(found)[:5])}): {remedy}"
        )
    versions = [version for (version,) in execute(f"SELECT version FROM {SCHEMA}")]
    if versions != [SCHEMA_VERSION]:
        raise UnusableDatabaseError(
            f"database {url} has schema version {', '.join(map(str, versions)) or '(none)'}, this service "
            f"needs version {SCHEMA_VERSION}: use the version of the service that created it, or {remedy}"
        )
    missing = TABLES.keys() - found
    if missing:
        raise UnusableDatabaseError(
            f"database {url} lacks the tables {', '.join(sorted(missing))}: restore it from a backup, or "
            f"{remedy}"
        )
