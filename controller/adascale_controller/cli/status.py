"""`adascale status`."""

from __future__ import annotations

import json
import time

import typer

from adascale_client import ServiceError
from adascale_controller import job_summary
from adascale_controller.cli.arguments import JobName, Output, OutputFormat, StateRoot
from adascale_controller.cli.cluster_options import (
    Cluster,
    Context,
    Kubeconfig,
    Namespace,
    SystemNamespace,
    open_cluster,
    select_cluster,
)
from adascale_controller.cluster.api import ClusterTarget
from adascale_controller.cluster.errors import ClusterError
from adascale_controller.local.job_status import read_status, render_status
from adascale_controller.local.local_jobs import find_job
from adascale_core import names
from adascale_core.views.jobs import JobView


def status(
    job: JobName,
    state_dir: StateRoot = None,
    output: OutputFormat = Output.TEXT,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    system_namespace: SystemNamespace = names.SYSTEM_NAMESPACE,
) -> None:
    """Show the state, the replicas, the checkpoint and the files of a job."""
    target = select_cluster(cluster, namespace, context, kubeconfig, state_dir)
    if target is not None:
        _show_cluster(target, job, output, system_namespace)
        return
    read = read_status(find_job(state_dir, job))
    if output is Output.JSON:
        typer.echo(json.dumps(read.summary.to_json(), indent=2))
    else:
        typer.echo(render_status(read, time.time()))


def _show_cluster(target: ClusterTarget, job: str, output: Output, system_namespace: str) -> None:
    with open_cluster(target) as connection:
        found = connection.jobs.find(job)
        if output is Output.JSON:
            typer.echo(json.dumps(found.summary().to_json(), indent=2))
            return
        view: JobView | None = None
        try:
            view = connection.metrics(system_namespace).get_job(found.id)
        except (ServiceError, ClusterError) as error:
            # The status of the AdaScaleJob has all but the states of single replicas.
            typer.echo(f"adascale: the replicas are not shown: {error}", err=True)
        details = found.details(view, connection.api.context)
        typer.echo(job_summary.render_status(found.summary(), details, time.time()))
