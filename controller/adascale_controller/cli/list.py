"""`adascale list`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from adascale_controller.cli.arguments import Output, OutputFormat, StateRoot
from adascale_controller.cli.cluster_options import (
    CLUSTER_PANEL,
    Cluster,
    Context,
    Kubeconfig,
    Namespace,
    open_cluster,
    select_cluster,
)
from adascale_controller.cluster.api import ClusterTarget
from adascale_controller.job_summary import JobSummary, render_list
from adascale_controller.local.job_status import read_status
from adascale_controller.local.local_jobs import find_jobs


def list_jobs(
    state_dir: StateRoot = None,
    output: OutputFormat = Output.TEXT,
    cluster: Cluster = False,
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool,
        typer.Option(
            "--all-namespaces",
            "-A",
            metavar="",
            help="List the jobs of all namespaces of the cluster.",
            show_default=False,
            rich_help_panel=CLUSTER_PANEL,
        ),
    ] = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List your jobs that run, or have run, on this machine; or the jobs of a cluster."""
    target = select_cluster(cluster or all_namespaces, namespace, context, kubeconfig, state_dir)
    if target is not None:
        _list_cluster(target, output, all_namespaces=all_namespaces)
        return
    statuses = [read_status(job) for job in find_jobs(state_dir)]
    for status in statuses:
        if status.checkpoint_error is not None:
            typer.echo(f"adascale: {status.job.short_id}: {status.checkpoint_error}", err=True)
    none = (
        "No jobs on this machine: start one with `adascale run FILE`, or add --cluster for those of a "
        "cluster."
        if state_dir is None
        else f"No jobs found in {state_dir}: pass another --state-dir, or omit it for all your runs."
    )
    _print([status.summary for status in statuses], output, none)


def _list_cluster(target: ClusterTarget, output: Output, *, all_namespaces: bool) -> None:
    with open_cluster(target) as connection:
        jobs = connection.jobs.read_all(all_namespaces=all_namespaces)
        place = "any namespace" if all_namespaces else f"namespace {connection.api.namespace}"
    summaries = [job.summary(with_namespace=all_namespaces) for job in jobs]
    _print(summaries, output, f"No jobs in {place}: start one with `adascale submit FILE`.")


def _print(summaries: Sequence[JobSummary], output: Output, none: str) -> None:
    if output is Output.JSON:
        typer.echo(json.dumps([summary.to_json() for summary in summaries], indent=2))
    elif summaries:
        typer.echo(render_list(summaries, time.time()))
    else:
        typer.echo(none, err=True)
