"""`adascale resume`."""

from __future__ import annotations

import typer

from adascale_controller.cli.arguments import JobName
from adascale_controller.cli.cluster_options import (
    Cluster,
    Context,
    Kubeconfig,
    Namespace,
    PlaceError,
    open_cluster,
    select_cluster,
)


def resume(
    job: JobName,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Resume a job of a cluster that was stopped. On this machine, `adascale run` resumes a job."""
    target = select_cluster(cluster, namespace, context, kubeconfig)
    if target is None:
        raise PlaceError(
            "on this machine, `adascale run FILE` resumes a job; for one of a cluster add --cluster"
        )
    with open_cluster(target) as connection:
        found = connection.jobs.find(job)
        if not found.is_stopped:
            typer.echo(f"{found.name} is not stopped: it is {found.state.lower()}")
            return
        connection.jobs.resume(found)
    typer.echo(f"{found.name} resumed")
