"""`adascale run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adascale_controller.cli.arguments import JobFile
from adascale_controller.jobfile import load_job
from adascale_controller.local.display import open_display
from adascale_controller.local.machine import MIN_CPU_REPLICAS
from adascale_controller.local.runner import RunOptions, run_job
from adascale_core import names


def run(
    file: JobFile,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            "-r",
            metavar="N",
            min=1,
            help="The most replicas at once, spares included. Default: the number of GPUs, or without a "
            f"GPU the number of CPU cores, but at least {MIN_CPU_REPLICAS}.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(
            "--until",
            metavar="STEPS",
            min=1,
            help="Save and stop at this progress, even if spec.scaleInvariantSteps is higher.",
            show_default=False,
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="The folder for checkpoints, logs and metrics. Default: .adascale/<namespace>.<name>.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            help=f"The port of the metrics service; 0 for any free port. Default: {names.DEFAULT_API_PORT}, "
            "or any free port if that is in use.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", metavar="", help="Delete the saved state and start over.", show_default=False
        ),
    ] = False,
) -> None:
    """Train a job on this machine.

    The number of replicas changes during training, as the gain that the job reports makes it worthwhile.
    Ctrl-C saves and stops; run the same command to resume.
    """
    options = RunOptions(replicas, until, state_dir, port, fresh)
    job = load_job(file)
    raise typer.Exit(run_job(job, options, open_display(Console(highlight=False))))
