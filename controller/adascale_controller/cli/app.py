"""The application: its commands, its version option, and how errors are shown."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from adascale_controller.cli.explain import explain
from adascale_controller.cli.export import export
from adascale_controller.cli.gain import gain
from adascale_controller.cli.list import list_jobs
from adascale_controller.cli.logs import logs
from adascale_controller.cli.operator import operator
from adascale_controller.cli.run import run
from adascale_controller.cli.scale import scale
from adascale_controller.cli.simulate import simulate_workload
from adascale_controller.cli.status import status
from adascale_controller.cli.stop import stop
from adascale_controller.cli.validate import validate
from adascale_core import names
from adascale_core.errors import AdaScaleError

app = typer.Typer(
    name="adascale",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, command in (
    ("run", run),
    ("validate", validate),
    ("list", list_jobs),
    ("status", status),
    ("logs", logs),
    ("gain", gain),
    ("explain", explain),
    ("scale", scale),
    ("stop", stop),
    ("export", export),
    ("simulate", simulate_workload),
    ("operator", operator),
):
    app.command(name)(command)


def main() -> NoReturn:
    """Run the command line; show errors that the user can correct without a traceback."""
    try:
        app()
    except AdaScaleError as error:
        # Indented, so that the lines of a message stand below each other.
        print("adascale:", str(error).replace("\n", "\n          "), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # Such as a full disk or a folder without write permission; the message names the file.
        print(f"adascale: {error}", file=sys.stderr)
        sys.exit(os.EX_IOERR)
    sys.exit(0)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"adascale {version(names.DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def adascale(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Elastic training of PyTorch models, at the accuracy of the small batch."""
