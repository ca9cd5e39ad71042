"""The command line `adascale`."""

import sys
from typing import NoReturn

__all__ = ["kubectl_main", "main"]

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as in shells."""


def main() -> NoReturn:
    """Run the command line. Ctrl-C during its imports ends it without a traceback."""
    _run(plugin=False)


def kubectl_main() -> NoReturn:
    """Run the command line as a plugin of kubectl: all commands are for the cluster of the kubeconfig."""
    _run(plugin=True)


def _run(*, plugin: bool) -> NoReturn:
    try:
        from adascale_controller.cli.app import main as run_command

        run_command(plugin=plugin)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
