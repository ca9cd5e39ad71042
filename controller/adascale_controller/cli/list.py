"""`adascale list`."""

from __future__ import annotations

import json
import time

import typer

from adascale_controller.cli.arguments import Output, OutputFormat, StateRoot
from adascale_controller.cli.of_kubectl import OfKubectl
from adascale_controller.job_summary import render_list
from adascale_controller.local.job_status import read_status
from adascale_controller.local.local_jobs import find_jobs


def list_jobs(
    state_dir: StateRoot = None,
    output: OutputFormat = Output.TEXT,
    _cluster: OfKubectl = False,
) -> None:
    """List your jobs that run, or have run, on this machine."""
    statuses = [read_status(job) for job in find_jobs(state_dir)]
    for status in statuses:
        if status.checkpoint_error is not None:
            typer.echo(f"adascale: {status.job.short_id}: {status.checkpoint_error}", err=True)
    summaries = [status.summary for status in statuses]
    if output is Output.JSON:
        typer.echo(json.dumps([summary.to_json() for summary in summaries], indent=2))
    elif summaries:
        typer.echo(render_list(summaries, time.time()))
    elif state_dir is None:
        typer.echo("No jobs on this machine: start one with `adascale run FILE`.", err=True)
    else:
        typer.echo(
            f"No jobs found in {state_dir}: pass another --state-dir, or omit it for all your runs.", err=True
        )
