"""`adascale status`."""

from __future__ import annotations

import json
import time

import typer

from adascale_controller.cli.arguments import JobName, Output, OutputFormat, StateRoot
from adascale_controller.local.job_status import read_status, render_status
from adascale_controller.local.local_jobs import find_job
from adascale_controller.local.state_dir import DEFAULT_ROOT


def status(job: JobName, state_dir: StateRoot = DEFAULT_ROOT, output: OutputFormat = Output.TEXT) -> None:
    """Show the state, the replicas, the checkpoint and the files of a job on this machine."""
    read = read_status(find_job(state_dir, job))
    if output is Output.JSON:
        typer.echo(json.dumps(read.to_json(), indent=2))
    else:
        typer.echo(render_status(read, time.time()))
