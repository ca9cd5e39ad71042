"""The base classes of errors that a user can cause, and the error of a missing extra.

A message states the value that was found, the values that are allowed, and what to do. Programs print the
message of an `AdaScaleError` and exit with its exit code. A traceback is only shown for a defect of the
program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adascale_core.names import DISTRIBUTION


class AdaScaleError(Exception):
    """An error that the user can correct."""

    exit_code = 1


class UsageError(AdaScaleError):
    """A command can't begin with the options, variables, files and machines that it was given."""

    exit_code = 2


class InvalidJobError(AdaScaleError):
    """A job whose bounds no number of replicas satisfies."""

    exit_code = 2


class MissingExtraError(AdaScaleError):
    """A command or an option needs an extra that is not installed."""

    exit_code = 2


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def requires_extra(feature: str, extra: str) -> Iterator[None]:
    """Import packages of an extra. `feature` is the subject of the error's sentence."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("adascale"):
            raise
        reason = str(error).partition("\n")[0]
        raise MissingExtraError(
            f"{feature} needs the extra {extra!r}, which is not installed ({reason}): "
            f"run `{install_command(extra)}`"
        ) from None
