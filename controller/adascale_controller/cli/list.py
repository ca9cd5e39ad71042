"""`adascale list`."""

from __future__ import annotations

import json
import time

import typer

from adascale_controller.cli.arguments import Output, OutputFormat, StateRoot
from adascale_controller.local.job_status import read_status, render_list
from adascale_controller.local.local_jobs import find_jobs
from adascale_controller.local.state_dir import DEFAULT_ROOT


def list_jobs(state_dir: StateRoot = DEFAULT_ROOT, output: OutputFormat = Output.TEXT) -> None:
    """List the jobs that run, or have run, on this machine."""
    statuses = [read_status(job) for job in find_jobs(state_dir)]
    for status in statuses:
        if status.checkpoint_error is not None:
            typer.echo(f"adascale: {status.job.short_id}: {status.checkpoint_error}", err=True)
    if output is Output.JSON:
        typer.echo(json.dumps([status.to_json() for status in statuses], indent=2))
    elif statuses:
        typer.echo(render_list(statuses, time.time()))
    else:
        typer.echo(
            f"No jobs found in {state_dir}: pass the --state-dir of a run, or change to the folder in which "
            "it was started.",
            err=True,
        )
