"""`adascale scale`."""

from __future__ import annotations

from typing import Annotated

import typer

from adascale_controller.cli.arguments import JobName, StateRoot
from adascale_controller.cli.of_kubectl import OfKubectl
from adascale_controller.cli.stop import STOP_TIMEOUT, stop_and_report
from adascale_controller.formatting import plural
from adascale_controller.local.local_jobs import find_job
from adascale_controller.local.replica_limit import ReplicaLimit
from adascale_controller.local.scale_requests import request_limit

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
    state_dir: StateRoot = None,
    _cluster: OfKubectl = False,
) -> None:
    """Set the most replicas of a job on this machine, until the run ends; 0 saves and stops it.

    As with `kubectl scale` on a cluster, this replaces spec.replicaLimit.
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
    typer.echo(scaled_text(found.short_id, replicas, limit))


def scaled_text(name: str, replicas: int, limit: ReplicaLimit) -> str:
    """Return the message about the limit that is used, and why it is lower than the requested one."""
    lowered = f" (spec.maxReplicas is {limit.replicas})" if limit.replicas + limit.spares < replicas else ""
    return f"{name} scaled to at most {limit}{lowered}"
