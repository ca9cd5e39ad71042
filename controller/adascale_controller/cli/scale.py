"""`adascale scale`."""

from __future__ import annotations

from typing import Annotated

import typer

from adascale_controller.cli.arguments import JobName, StateRoot
from adascale_controller.cli.stop import STOP_TIMEOUT, stop_and_report
from adascale_controller.formatting import plural
from adascale_controller.local.local_jobs import find_job
from adascale_controller.local.scale_requests import request_limit
from adascale_controller.local.state_dir import DEFAULT_ROOT

ANSWER_TIMEOUT = 30.0
"""Seconds to wait for the answer of the run."""


def scale(
    job: JobName,
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            "-r",
            metavar="N",
            min=0,
            help="The most replicas at once; 0 stops the job.",
            show_default=False,
        ),
    ],
    state_dir: StateRoot = DEFAULT_ROOT,
) -> None:
    """Set the most replicas of a job that runs on this machine, until the run ends.

    As with `kubectl scale`, this replaces spec.replicaLimit; 0 saves and stops the job.
    The job uses fewer replicas if more are not worthwhile.
    """
    found = find_job(state_dir, job)
    if replicas == 0:
        stop_and_report(found, STOP_TIMEOUT)
        return
    process = found.require_process()
    limit = request_limit(found.folder, replicas, process, lambda: found.process == process, ANSWER_TIMEOUT)
    if limit is None:
        typer.echo(
            f"{found.short_id} has not answered within {ANSWER_TIMEOUT:g} s. The request for at most "
            f"{plural(replicas, 'replica')} is kept, and carried out as soon as the run reads it"
        )
        return
    lowered = f" (spec.maxReplicas is {limit})" if limit < replicas else ""
    typer.echo(f"{found.short_id} scaled to at most {plural(limit, 'replica')}{lowered}")
