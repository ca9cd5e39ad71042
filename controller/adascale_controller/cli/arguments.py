"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from adascale_controller.cli.cluster_options import open_cluster, select_cluster
from adascale_controller.local.local_jobs import find_jobs
from adascale_core import names
from adascale_core.errors import AdaScaleError

JobFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A YAML file with an AdaScaleJob.", show_default=False)
]


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of jobs that begin with `incomplete`, for the completion of a shell.

    Args:
        ctx: the options before the name, which select this machine or a cluster.
        incomplete: the beginning of the name.
    """
    options = ctx.params
    try:
        target = select_cluster(
            options.get("cluster", False),
            options.get("namespace"),
            options.get("context"),
            options.get("kubeconfig"),
            options.get("state_dir"),
        )
        if target is None:
            found = [job.short_id for job in find_jobs(options.get("state_dir"))]
        else:
            with open_cluster(target) as connection:
                found = [job.name for job in connection.jobs.read_all()]
    except (AdaScaleError, OSError):
        return []  # The command itself shows the error.
    return [name for name in found if name.startswith(incomplete)]


JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="The job's name, or <namespace>.<name>.",
        show_default=False,
        autocompletion=complete_job,
    ),
]
StateRoot = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="The state folder of the run, or a folder of state folders. Default: those of all your runs on "
        "this machine.",
        show_default=False,
    ),
]


class Output(StrEnum):
    """The format of an output."""

    TEXT = "text"
    JSON = "json"


OutputFormat = Annotated[
    Output, typer.Option("--output", "-o", metavar="FORMAT", help="The format: text or json.")
]

ServiceUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar=names.ENV_API_URL,
        help="The address of the metrics service. Default: that of the run in --state-dir.",
        show_default=False,
    ),
]
