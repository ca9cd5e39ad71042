"""`adascale stop`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from adascale_controller.cli.arguments import JobName, StateRoot
from adascale_controller.cli.cluster_options import (
    Cluster,
    Context,
    Kubeconfig,
    Namespace,
    open_cluster,
    select_cluster,
)
from adascale_controller.cluster.cluster_job import ClusterJob
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
            help="The seconds to wait for the end of the run, or of the replicas.",
        ),
    ] = STOP_TIMEOUT,
    state_dir: StateRoot = None,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Save and stop a job; `adascale run` resumes it, or `adascale resume` on a cluster."""
    target = select_cluster(cluster, namespace, context, kubeconfig, state_dir)
    if target is None:
        stop_and_report(find_job(state_dir, job), timeout)
        return
    with open_cluster(target) as connection:
        suspended = connection.jobs.suspend(connection.jobs.find(job))
        report_stopped(connection.jobs.wait_until_stopped(suspended, timeout))


def report_stopped(job: ClusterJob) -> None:
    """Print the progress of a job of a cluster that was stopped, or has ended before."""
    if job.has_ended:
        typer.echo(f"{job.name} has ended: it is {job.state.lower()}")
        return
    saved = "no checkpoint was saved" if job.progress is None else f"saved at progress {count(job.progress)}"
    typer.echo(f"{job.name} stopped, {saved}")


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
