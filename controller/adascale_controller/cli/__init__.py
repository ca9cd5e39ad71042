"""The command line `adascale`: one module for each command."""

import sys
from typing import NoReturn

__all__ = ["main"]

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as in shells."""


def main() -> NoReturn:
    """Run the command line. Ctrl-C during its imports ends it without a traceback."""
    try:
        from adascale_controller.cli.app import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
