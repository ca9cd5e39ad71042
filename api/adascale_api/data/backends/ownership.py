"""Whether a database belongs to this service."""

from collections.abc import Callable, Iterable
from typing import Any

from adascale_api.data.backends.base import UnusableDatabaseError
from adascale_api.data.tables import MIGRATIONS, SCHEMA, SCHEMA_VERSION, TABLES


def migrates_from(found: set[str], execute: Callable[[str], Iterable[tuple[Any, ...]]]) -> int | None:
    """Return the version of tables of an earlier release that can be changed to those of this one.

    Returns: None if there are no such tables.
    """
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
