"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from adascale_core import names

JobFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A YAML file with an AdaScaleJob.", show_default=False)
]
JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's name, or <namespace>.<name>.", show_default=False)
]
StateRoot = Annotated[
    Path,
    typer.Option(
        "--state-dir", metavar="DIR", help="The state folder of the run, or a folder of state folders."
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
