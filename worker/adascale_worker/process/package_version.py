"""The version of this package."""

from importlib.metadata import PackageNotFoundError, version

from adascale_core.names import DISTRIBUTION


def package_version() -> str:
    """Return the version that all members of a job must have; empty if the package is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
