"""The commands that show jobs of this machine or of a cluster, such as `status` and `gain`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.cli.arguments import (
    Cluster,
    Context,
    JobName,
    Kubeconfig,
    Namespace,
    OptionalJobName,
    Output,
    OutputFormat,
    ServiceUrl,
    StateRoot,
    SystemNamespace,
)
from adascale_controller.cli.connections import client_at, connect, open_cluster, select_cluster
from adascale_controller.cluster.api import ClusterAccessError, ClusterTarget
from adascale_controller.formatting import OutputConsole
from adascale_controller.job_overview import (
    describe_comparison,
    render_decision,
    render_gain,
    render_goodput,
    render_goodput_list,
    render_status,
)
from adascale_controller.local.local_jobs import find_job, find_jobs, read_status
from adascale_controller.local.machine import describe_contention
from adascale_controller.local.state_dir import location
from adascale_core import names
from adascale_core.errors import AdaScaleError, UsageError
from adascale_core.job_id import parse_job_id
from adascale_core.messages import Message
from adascale_core.views.goodput import GoodputList
from adascale_core.views.job_summary import ENDED


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
        typer.echo(json.dumps(read.to_json(), indent=2))
    else:
        slow = describe_contention(read.view) if read.view is not None else ""
        typer.echo(render_status(read, time.time(), slow))


def _show_cluster(target: ClusterTarget, job: str, output: Output, system_namespace: str) -> None:
    with open_cluster(target) as jobs:
        found = jobs.find(job)
        if output is Output.JSON:
            typer.echo(json.dumps(found.to_json(), indent=2))
            return
        try:
            client = jobs.metrics(system_namespace)
            comparison = describe_comparison(client.get_generations(found.id).comparison)
            found = replace(found, view=client.get_job(found.id), comparison=comparison)
        except (ServiceError, ClusterAccessError) as error:
            # The status of the AdaScaleJob has all but the states of single replicas.
            typer.echo(f"adascale: the replicas are not shown: {error}", err=True)
        typer.echo(render_status(found, time.time()))


def gain(
    job: JobName,
    url: ServiceUrl = None,
    state_dir: StateRoot = None,
    output: OutputFormat = Output.TEXT,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    system_namespace: SystemNamespace = names.SYSTEM_NAMESPACE,
) -> None:
    """Show the gain of a job, and predictions for other replica counts."""
    target = select_cluster(cluster, namespace, context, kubeconfig, state_dir)
    with _service(target, job, url, state_dir, system_namespace) as (client, found):
        view = client.get_gain(found)
    _show(view, output, lambda: render_gain(view, time.time()))


def _show(view: Message, output: Output, render: Callable[[], RenderableType]) -> None:
    """Print a view of the metrics service as JSON, or rendered for people."""
    if output is Output.JSON:
        print(json.dumps(view.to_json(), indent=2))
    else:
        OutputConsole().print(render())


@contextmanager
def _service(
    target: ClusterTarget | None, job: str, url: str | None, state_dir: Path | None, system_namespace: str
) -> Iterator[tuple[MetricsServiceClient, str]]:
    """Yield the client of the metrics service of a job, and the id that the job has there."""
    if target is None:
        with connect(job, url, state_dir) as client:
            yield client, parse_job_id(job)
        return
    with open_cluster(target) as jobs:
        yield jobs.metrics(system_namespace) if url is None else client_at(url), jobs.find(job).id


def explain(
    job: JobName,
    url: ServiceUrl = None,
    state_dir: StateRoot = None,
    output: OutputFormat = Output.TEXT,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    system_namespace: SystemNamespace = names.SYSTEM_NAMESPACE,
) -> None:
    """Show why a job has its replica count, and what other counts would give."""
    target = select_cluster(cluster, namespace, context, kubeconfig, state_dir)
    with _service(target, job, url, state_dir, system_namespace) as (client, job_id):
        decision, view = client.get_decision(job_id), client.get_job(job_id)

    def render() -> RenderableType:
        slow = (describe_contention(view) if target is None else "") or view.slowness
        ended = view.state if view.state in ENDED else ""
        return render_decision(decision, time.time(), slow, ended, view.latest)

    _show(decision, output, render)


def goodput(
    job: OptionalJobName = None,
    every: Annotated[bool, typer.Option("--all", help="Show all jobs.")] = False,
    url: ServiceUrl = None,
    state_dir: StateRoot = None,
    output: OutputFormat = Output.TEXT,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    system_namespace: SystemNamespace = names.SYSTEM_NAMESPACE,
) -> None:
    """Show where the time of a job's replicas went, by cause."""
    if (job is None) != every:
        raise UsageError("`adascale goodput` needs the name of a job, or --all for all jobs")
    target = select_cluster(cluster, namespace, context, kubeconfig, state_dir)
    if job is None:
        found = _goodput_of_all(target, url, state_dir, system_namespace)
        _show(found, output, lambda: render_goodput_list(found))
        return
    with _service(target, job, url, state_dir, system_namespace) as (client, job_id):
        view = client.get_goodput(job_id)
    _show(view, output, lambda: render_goodput(view))


def _goodput_of_all(
    target: ClusterTarget | None, url: str | None, state_dir: Path | None, system_namespace: str
) -> GoodputList:
    if url is not None:
        return client_at(url).list_goodput()
    if target is not None:
        with open_cluster(target) as jobs:
            return jobs.metrics(system_namespace).list_goodput()
    views = []
    for job_id in sorted({each.id for each in find_jobs(state_dir)}):
        with connect(job_id, None, state_dir) as client:
            views.append(client.get_goodput(job_id))
    return GoodputList.of(views)


def export(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="The job's name, or <namespace>.<name>; or the URL of the checkpoints in an object store.",
            show_default=False,
        ),
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file, e.g. model.safetensors.", show_default=False)
    ],
    best: Annotated[
        bool, typer.Option("--best", help="Export what trainer.keep_best has kept, not the newest.")
    ] = False,
    state_dir: StateRoot = None,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Write the weights of a job's newest checkpoint to a file of the format safetensors.

    The names are those of the program's model. A job on a cluster is exported from its object store: with
    --cluster, or by the URL with the job's namespace and name, such as s3://bucket/prefix/default.digits.
    """
    target = select_cluster(cluster, namespace, context, kubeconfig, state_dir)
    if target is not None:
        source: Path | str = _url_of(target, job)
    elif "://" in job:
        source = job
    else:
        found = find_job(state_dir, job)
        source = location(found.runs[-1].checkpoints, found.folder.checkpoints)
    if find_spec("torch") is None:
        raise AdaScaleError(
            "torch is not installed here, which reads checkpoints: pip install adascale-operator[worker]"
        )
    command = [sys.executable, "-P", "-m", "adascale_worker.state.weights", str(source), str(file)]
    completed = subprocess.run([*command, *(["--best"] if best else [])], check=False)
    raise typer.Exit(completed.returncode)


def _url_of(target: ClusterTarget, job: str) -> str:
    with open_cluster(target) as jobs:
        found = jobs.find(job)
    if "://" not in found.checkpoint:
        raise AdaScaleError(
            f"the checkpoints of job {found.name} are in {found.checkpoint}, which only pods can read: run "
            "`adascale export` in a pod that mounts it, or use spec.checkpoint.url"
        )
    return found.checkpoint
