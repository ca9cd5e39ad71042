"""The optional parts of the distribution, which `pip install 'adascale-operator[EXTRA]'` adds."""

from collections.abc import Iterator
from contextlib import contextmanager

from adascale_core.errors import AdaScaleError
from adascale_core.names import DISTRIBUTION


class MissingExtraError(AdaScaleError):
    """A command or an option needs an extra that is not installed."""

    exit_code = 2


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def requires_extra(feature: str, extra: str) -> Iterator[None]:
    """Import packages of an extra."""
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
