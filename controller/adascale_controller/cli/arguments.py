"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from adascale_controller.cli.connections import open_cluster, select_cluster
from adascale_controller.local.local_jobs import find_jobs
from adascale_core import names
from adascale_core.errors import AdaScaleError
from adascale_core.names import DEFAULT_FAIRNESS, DEFAULT_FAIRNESS_ACROSS_TYPES

JobFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A YAML file with an AdaScaleJob.", show_default=False)
]


def option(*flags: str, **settings: Any) -> Any:
    """Return an option without a type or a default in the help, where the text says what they are."""
    return typer.Option(*flags, **{"metavar": "", "show_default": False, **settings})


StateRoot = Annotated[
    Path | None,
    option(
        "--state-dir",
        metavar="DIR",
        help="The state folder of the run, or a folder of state folders. Default: those of all your runs on "
        "this machine.",
    ),
]
ServiceUrl = Annotated[
    str | None,
    option(
        "--url",
        metavar="URL",
        envvar=names.ENV_API_URL,
        help="The address of the metrics service. Default: that of the run in --state-dir.",
    ),
]


CLUSTER_PANEL = "Options for a Kubernetes cluster"
"""The heading of these options in the help."""
ENV_SYSTEM_NAMESPACE = "ADASCALE_SYSTEM_NAMESPACE"
"""The default of `--system-namespace`."""
cluster_option = partial(option, rich_help_panel=CLUSTER_PANEL)
Cluster = Annotated[
    bool,
    cluster_option(
        "--cluster",
        help="The job is on the Kubernetes cluster of the kubeconfig, and not on this machine. Each of the "
        "options below but --system-namespace means this too.",
    ),
]
Namespace = Annotated[
    str | None,
    cluster_option(
        "--namespace", "-n", metavar="NAME", help="The job's namespace. Default: that of the context."
    ),
]
Context = Annotated[
    str | None,
    cluster_option(
        "--context", metavar="NAME", help="The context of the kubeconfig. Default: its current context."
    ),
]
Kubeconfig = Annotated[
    Path | None,
    cluster_option(
        "--kubeconfig", metavar="FILE", help="The kubeconfig. Default: $KUBECONFIG, or else ~/.kube/config."
    ),
]
SystemNamespace = Annotated[
    str,
    typer.Option(
        "--system-namespace",
        metavar="NAME",
        envvar=ENV_SYSTEM_NAMESPACE,
        help="The namespace of the metrics service.",
        rich_help_panel=CLUSTER_PANEL,
    ),
]


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of jobs that begin with `incomplete`, for the completion of a shell."""
    options = ctx.params  # those before the name, which select this machine or a cluster
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
            with open_cluster(target) as jobs:
                found = jobs.names()
    except (AdaScaleError, OSError):
        return []  # The command itself shows the error.
    return [name for name in found if name.startswith(incomplete)]


_JOB = typer.Argument(
    metavar="JOB",
    help="The job's name, or <namespace>.<name>.",
    show_default=False,
    autocompletion=complete_job,
)
JobName = Annotated[str, _JOB]
OptionalJobName = Annotated[str | None, _JOB]


class Output(StrEnum):
    """The format of an output."""

    TEXT = "text"
    JSON = "json"


OutputFormat = Annotated[
    Output, typer.Option("--output", "-o", metavar="FORMAT", help="The format: text or json.")
]


def _require_fairness(fairness: float | None) -> float | None:
    # Not a range of the option, which would allow nan.
    if fairness is not None and not 0 <= fairness <= 1:
        raise typer.BadParameter(f"a number from 0 to 1 is needed, got {fairness}")
    return fairness


Fairness = Annotated[
    float | None,
    typer.Option(
        "--fairness",
        metavar="X",
        callback=_require_fairness,
        help="0: short jobs first, for the lowest mean completion time. 1: equal weights of all jobs.",
        show_default=f"{DEFAULT_FAIRNESS:g}; {DEFAULT_FAIRNESS_ACROSS_TYPES:g} across types of accelerators",
    ),
]
