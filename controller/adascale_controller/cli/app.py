"""The application: its commands, its version option, and how errors are shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from adascale_controller.cli.connections import PLUGIN, always_for_cluster
from adascale_controller.cli.job_commands import explain, export, gain, goodput, status
from adascale_controller.cli.local_commands import list_jobs, logs, rm, run, scale, stop, ui, validate
from adascale_controller.cli.operator import operator
from adascale_controller.cli.simulate import simulate_workload
from adascale_core import names
from adascale_core.errors import AdaScaleError

_COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "ui": ui,
    "validate": validate,
    "list": list_jobs,
    "status": status,
    "logs": logs,
    "gain": gain,
    "explain": explain,
    "goodput": goodput,
    "scale": scale,
    "stop": stop,
    "rm": rm,
    "export": export,
    "simulate": simulate_workload,
    "operator": operator,
}
_OF_A_CLUSTER = ("status", "gain", "explain", "goodput", "export")
"""The commands that also show jobs of a cluster."""


def _application(name: str, commands: dict[str, Callable[..., None]], summary: str) -> typer.Typer:
    application = typer.Typer(
        name=name,
        help=summary,
        no_args_is_help=True,
        add_completion=name == "adascale",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(adascale)
    for command, function in commands.items():
        application.command(command)(function)
    return application


def main(*, plugin: bool = False) -> NoReturn:
    """Run the command line, as a plugin of kubectl if `plugin`. Errors of users have no traceback."""
    try:
        if plugin:
            plugin_app(prog_name=PLUGIN)
        else:
            # Otherwise Click makes the name from how Python was started, and completes for that one.
            app(prog_name="adascale")
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


def adascale(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """The options before the command."""


app = _application(
    "adascale", _COMMANDS, "Elastic training of PyTorch models, at the accuracy of the small batch."
)
plugin_app = _application(
    PLUGIN,
    {"validate": validate, **{name: always_for_cluster(_COMMANDS[name]) for name in _OF_A_CLUSTER}},
    "Elastic training of PyTorch models, at the accuracy of the small batch: the jobs of a cluster.",
)
