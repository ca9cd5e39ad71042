"""`adascale export`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from adascale_controller.cli.arguments import StateRoot
from adascale_controller.local.checkpoints import location
from adascale_controller.local.local_jobs import find_job
from adascale_controller.local.state_dir import DEFAULT_ROOT
from adascale_core.errors import AdaScaleError


class ExportError(AdaScaleError):
    """Weights that cannot be exported here."""


def export(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="The job's name, or <namespace>.<name>; or the URL of the checkpoints in an object store.",
            show_default=False,
        ),
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file, e.g. model.safetensors.", show_default=False)
    ],
    best: Annotated[
        bool, typer.Option("--best", help="Export what trainer.keep_best has kept, not the newest.")
    ] = False,
    state_dir: StateRoot = DEFAULT_ROOT,
) -> None:
    """Write the weights of a job's newest checkpoint to a file of the format safetensors.

    The names are those of the program's model. A job on a cluster is exported from its object store, by the
    URL with the job's namespace and name, such as s3://bucket/prefix/default.digits.
    """
    if "://" in job:
        source: Path | str = job
    else:
        found = find_job(state_dir, job)
        source = location(found.runs[-1].checkpoints, found.folder.checkpoints)
    if find_spec("torch") is None:
        raise ExportError(
            "torch is not installed here, which reads checkpoints: pip install adascale-operator[worker]"
        )
    command = [sys.executable, "-P", "-m", "adascale_worker.state.export", str(source), str(file)]
    completed = subprocess.run([*command, *(["--best"] if best else [])], check=False)
    raise typer.Exit(completed.returncode)
