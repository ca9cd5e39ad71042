"""`adascale export`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from adascale_controller.cli.arguments import StateRoot
from adascale_controller.cli.cluster_options import (
    Cluster,
    Context,
    Kubeconfig,
    Namespace,
    open_cluster,
    select_cluster,
)
from adascale_controller.cluster.api import ClusterTarget
from adascale_controller.local.checkpoints import location
from adascale_controller.local.local_jobs import find_job
from adascale_core.errors import AdaScaleError


class ExportError(AdaScaleError):
    """Weights that cannot be exported here."""


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
        raise ExportError(
            "torch is not installed here, which reads checkpoints: pip install adascale-operator[worker]"
        )
    command = [sys.executable, "-P", "-m", "adascale_worker.state.export", str(source), str(file)]
    completed = subprocess.run([*command, *(["--best"] if best else [])], check=False)
    raise typer.Exit(completed.returncode)


def _url_of(target: ClusterTarget, job: str) -> str:
    with open_cluster(target) as connection:
        found = connection.jobs.find(job)
    if "url" not in (found.spec.get("checkpoint") or {}):
        raise ExportError(
            f"the checkpoints of job {found.name} are in {found.checkpoints}, which only pods can read: run "
            "`adascale export` in a pod that mounts it, or use spec.checkpoint.url"
        )
    return found.checkpoints
