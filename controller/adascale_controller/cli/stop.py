"""`adascale stop`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from adascale_controller.cli.arguments import JobName, StateRoot
from adascale_controller.cli.of_kubectl import OfKubectl
from adascale_controller.formatting import count
from adascale_controller.local.local_jobs import LocalJob, find_job
from adascale_controller.local.stop_run import stop_run

STOP_TIMEOUT = 60.0
"""Seconds to wait for the end of the run, by default."""


def stop(
    job: JobName,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            "-t",
            metavar="SECONDS",
            min=0,
            help="The seconds to wait for the end of the run.",
        ),
    ] = STOP_TIMEOUT,
    state_dir: StateRoot = None,
    _cluster: OfKubectl = False,
) -> None:
    """Save and stop a job; `adascale run` resumes it."""
    stop_and_report(find_job(state_dir, job), timeout)


def stop_and_report(job: LocalJob, timeout: float) -> None:
    """Stop the run of `job`, and print its last step."""
    stopped_at = time.time()
    stop_run(job, timeout)
    checkpoint = job.checkpoint
    if checkpoint is None:
        saved = "no checkpoint was saved"
    elif checkpoint.saved_at < stopped_at:
        saved = f"the last checkpoint is of step {count(checkpoint.step)}"
    else:
        saved = f"saved at step {count(checkpoint.step)}"
    typer.echo(f"{job.short_id} stopped, {saved}")
