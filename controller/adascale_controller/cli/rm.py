"""`adascale rm`."""

from __future__ import annotations

import sys
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
from adascale_controller.cluster.cluster_job import ClusterJob
from adascale_controller.local.local_jobs import find_job
from adascale_controller.local.remove_run import remove_run
from adascale_core.errors import AdaScaleError


class NotConfirmedError(AdaScaleError):
    """A deletion that nobody has confirmed."""

    exit_code = 2


class OwnClaimError(AdaScaleError):
    """Checkpoints that cannot outlive their job."""

    exit_code = 2


def rm(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB...", help="The jobs' names, or <namespace>.<name>.", show_default=False),
    ],
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", metavar="", help="Keep the checkpoints.", show_default=False)
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", metavar="", help="Do not ask.", show_default=False)
    ] = False,
    state_dir: StateRoot = None,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete jobs that do not run: reports, logs, checkpoints, and their place in the list.

    Checkpoints stay that are in a folder, an object store or a claim which the job file names.
    """
    target = select_cluster(cluster, namespace, context, kubeconfig, state_dir)
    if target is not None:
        _delete_from_cluster(target, jobs, keep_checkpoints=keep_checkpoints, yes=yes)
        return
    found = [find_job(state_dir, job) for job in dict.fromkeys(jobs)]
    for job in found:
        deleted = "reports and logs" if keep_checkpoints else "reports, logs and checkpoints"
        if not yes and not _confirm(f"Delete the {deleted} of {job.short_id} in {job.folder.path}?"):
            continue
        kept = remove_run(job, keep_checkpoints=keep_checkpoints)
        where = f"; its checkpoints stay in {kept}" if kept is not None else ""
        typer.echo(f"{job.short_id} deleted{where}")


def _delete_from_cluster(
    target: ClusterTarget, jobs: list[str], *, keep_checkpoints: bool, yes: bool
) -> None:
    with open_cluster(target) as connection:
        for job in [connection.jobs.find(name) for name in dict.fromkeys(jobs)]:
            if keep_checkpoints and job.own_claim is not None:
                raise OwnClaimError(
                    f"the claim {job.own_claim} of job {job.name} is deleted with it: omit "
                    "--keep-checkpoints, and name a claim, a path or a URL in spec.checkpoint of a job whose "
                    "checkpoints are to stay"
                )
            what = _deleted_with(job)
            context = f" of context {connection.api.context}" if connection.api.context else ""
            if not yes and not _confirm(
                f"Delete job {job.name} in namespace {job.namespace}{context}, {what}?"
            ):
                continue
            connection.jobs.delete(job)
            where = f"; its checkpoints stay in {job.checkpoints}" if job.own_claim is None else ""
            typer.echo(f"{job.name} deleted{where}")


def _deleted_with(job: ClusterJob) -> str:
    if job.own_claim is None:
        return "with its reports and logs"
    return f"with its reports, logs and checkpoints (claim {job.own_claim})"


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise NotConfirmedError(f"{question} Confirm it with --yes")
    return typer.confirm(question)
