"""`adascale gain`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from adascale_client import MetricsServiceClient
from adascale_controller.cli.arguments import JobName, Output, OutputFormat, ServiceUrl, StateRoot
from adascale_controller.cli.cluster_options import (
    Cluster,
    Context,
    Kubeconfig,
    Namespace,
    SystemNamespace,
    open_cluster,
    select_cluster,
)
from adascale_controller.cli.service_client import connect, find_urls
from adascale_controller.gain_summary import render_gain
from adascale_controller.gain_watch import GainLines, LiveGain, watch_gain
from adascale_controller.local.local_jobs import NotRunningError, find_folders_of
from adascale_core import names
from adascale_core.job_id import parse_job_id


def gain(
    job: JobName,
    url: ServiceUrl = None,
    state_dir: StateRoot = None,
    output: OutputFormat = Output.TEXT,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            "-w",
            metavar="",
            help="Show it until the job ends: on a terminal in place, or else a line for each new report.",
            show_default=False,
        ),
    ] = False,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    system_namespace: SystemNamespace = names.SYSTEM_NAMESPACE,
) -> None:
    """Show the gain of a job, and predictions for other replica counts."""
    target = select_cluster(cluster, namespace, context, kubeconfig, state_dir)
    if target is not None:
        with open_cluster(target) as connection:
            found = connection.jobs.find(job)
            _show(found.id, connection.metrics(system_namespace, url), output, watch, lambda: False)
        return
    job_id = parse_job_id(job)
    if watch and not url and find_folders_of(state_dir, job_id) and not find_urls(state_dir, job_id):
        raise NotRunningError(f"job {job} is not running: omit --watch to show its last gain")
    with connect(job, url, state_dir) as client:
        _show(job_id, client, output, watch, lambda: not url and not find_urls(state_dir, job_id))


def _show(
    job_id: str, client: MetricsServiceClient, output: Output, watch: bool, has_ended: Callable[[], bool]
) -> None:
    as_json = output is Output.JSON
    if watch:
        _watch(job_id, client, as_json, has_ended)
        return
    view = client.get_gain(job_id)
    if as_json:
        print(json.dumps(view.to_json(), indent=2))
    else:
        Console(highlight=False).print(render_gain(view, time.time()))


def _watch(job_id: str, client: MetricsServiceClient, as_json: bool, has_ended: Callable[[], bool]) -> None:
    console = Console(highlight=False)
    display = LiveGain(console) if console.is_terminal and not as_json else GainLines(as_json=as_json)
    try:
        print(watch_gain(job_id, client, display, has_ended), file=sys.stderr)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
