"""The version of the tables."""

from adascale_api.databases.base import UnusableDatabaseError
from adascale_api.tables import SCHEMA_VERSION


def require_version(url: str, versions: list[int]) -> None:
    """Refuse a schema of another version.

    Raises:
        UnusableDatabaseError: the versions are not the one that this service needs.
    """
    if versions != [SCHEMA_VERSION]:
        found = ", ".join(map(str, versions)) or "none"
        raise UnusableDatabaseError(
            f"database {url} has schema version {found}, this service needs version {SCHEMA_VERSION}: "
            "use the version of the service that created it, or another database"
        )
