"""The place that a command is for, this machine or a cluster, and the connection to its metrics service.

A command is for this machine unless an option names the cluster, because a run here and a job there may have
the same name. `kubectl adascale` is for the cluster always.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from adascale_client import MetricsServiceClient, ServiceUnreachableError
from adascale_controller.cluster.api import ClusterTarget
from adascale_controller.local.local_jobs import LocalJob, find_folders_of
from adascale_controller.local.runs_service import runs_service
from adascale_core import names
from adascale_core.errors import UsageError, requires_extra
from adascale_core.job_id import parse_job_id

if TYPE_CHECKING:
    from adascale_controller.cluster.cluster_jobs import ClusterJobs

PLUGIN = "kubectl adascale"
"""The name of the command line as a plugin of kubectl."""


def client_at(url: str) -> MetricsServiceClient:
    """Return the client of the service at `url`, with the token and the authority of the environment."""
    ca_file = os.environ.get(names.ENV_CA_FILE)
    return MetricsServiceClient(
        url, os.environ.get(names.ENV_TOKEN), ca_file=Path(ca_file) if ca_file else None
    )


@contextmanager
def connect(job: str, url: str | None, state_dir: Path | None) -> Iterator[MetricsServiceClient]:
    """Yield the client of the service at `url`, or of the service of the job's run.

    After the end of the run, a service is started that shows it.
    """
    job_id = parse_job_id(job)
    found = [] if url else find_folders_of(state_dir, job_id)
    urls = [url] if url else [each.service.url for each in found if each.service is not None]
    if urls:
        yield client_at(urls[0])
        return
    if not found:
        place = "on this machine" if state_dir is None else f"in {state_dir}"
        raise ServiceUnreachableError(
            f"no run of job {job} found {place}: start it with `adascale run`, or set the address of the "
            "metrics service with --url"
        )
    latest: LocalJob = max(found, key=lambda each: each.runs[-1].began)
    with runs_service(latest.folder.path, 0, required=False) as service:
        if service is not None:
            yield MetricsServiceClient(service.process.url)


def always_for_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that is for the cluster, without the options for this machine."""
    # Typer does not evaluate the annotations of a signature that it is given.
    signature = inspect.signature(command, eval_str=True)
    if "cluster" not in signature.parameters:
        return command
    chosen = {"cluster", "state_dir"}

    @functools.wraps(command)
    def run(**arguments: object) -> None:
        command(cluster=True, **arguments)

    kept = [each for name, each in signature.parameters.items() if name not in chosen]
    run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return run


def select_cluster(
    cluster: bool,
    namespace: str | None,
    context: str | None,
    kubeconfig: Path | None,
    state_dir: Path | None = None,
) -> ClusterTarget | None:
    """Return the cluster that a command is for; None for this machine."""
    named = cluster or any(each is not None for each in (namespace, context, kubeconfig))
    if not named:
        return None
    if state_dir is not None:
        raise UsageError(
            "--state-dir is for a run on this machine, and the other options are for a cluster: omit one of "
            "them"
        )
    return ClusterTarget(context, namespace, kubeconfig)


@contextmanager
def open_cluster(target: ClusterTarget) -> Iterator[ClusterJobs]:
    """Yield the jobs of a cluster."""
    # Imported here because importing the Kubernetes client takes a second.
    with requires_extra("a command for a cluster", "kubernetes"):
        from adascale_controller.cluster import cluster_jobs
    with cluster_jobs.open_cluster(target) as jobs:
        yield jobs
