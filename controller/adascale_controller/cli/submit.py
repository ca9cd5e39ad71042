"""`adascale submit`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from adascale_controller.cli.arguments import JobFile
from adascale_controller.cli.cluster_options import (
    Connection,
    Context,
    Kubeconfig,
    Namespace,
    SystemNamespace,
    open_cluster,
)
from adascale_controller.cluster.api import FIELD_MANAGER, ApiObject, ClusterTarget
from adascale_controller.cluster.cluster_job import ClusterJob
from adascale_controller.cluster.cluster_jobs import (
    AmbiguousNamespaceError,
    ClusterJobs,
    NoSuchJobError,
    manifest,
)
from adascale_controller.cluster.errors import RejectedError
from adascale_controller.cluster.job_follower import JobFollower
from adascale_controller.deadline_summary import describe_deadline
from adascale_controller.job_summary import describe_size
from adascale_controller.jobfile import JobFileError, JobSource, read_job
from adascale_controller.local.display import open_display
from adascale_core import names
from adascale_core.errors import AdaScaleError
from adascale_core.placement.replica_gpus import describe_unused_gpus

INTERRUPTED = 130
"""128 + SIGINT, as in shells."""


class ConflictError(AdaScaleError):
    """Fields that another program or person has set otherwise."""


def submit(
    file: JobFile,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            metavar="",
            help="Show the job until it ends, as `adascale run`.",
            show_default=False,
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force-conflicts",
            metavar="",
            help="Change also fields that another program or person has set.",
            show_default=False,
        ),
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    system_namespace: SystemNamespace = names.SYSTEM_NAMESPACE,
) -> None:
    """Train a job on a Kubernetes cluster; change or resume it, if it is there.

    The file is that of `adascale run`. It is checked before anything is sent. A stopped job is resumed.
    """
    source = read_job(file, command_required=False)
    target = ClusterTarget(context, namespace, kubeconfig)
    with open_cluster(target) as connection:
        document = manifest(source.content, _namespace(source, namespace, connection.api.namespace))
        job = _apply(connection, source, document, force=force)
        _warn(source)
        if follow:
            raise typer.Exit(_follow(connection, source, job, system_namespace))


def _namespace(source: JobSource, option: str | None, default: str) -> str:
    """Return the namespace of the file, or else that of the option or the context."""
    written = source.content["metadata"].get("namespace")
    if written is None:
        return default
    if option not in (None, written):
        raise AmbiguousNamespaceError(
            f"{source.name}: metadata.namespace is {written}, but --namespace is {option}: omit one of them"
        )
    return str(written)


def _apply(connection: Connection, source: JobSource, document: ApiObject, *, force: bool) -> ClusterJob:
    """Apply the document, resume the job if it was stopped, and print what was done."""
    jobs = connection.jobs
    identity = f"{document['metadata']['namespace']}.{document['metadata']['name']}"
    try:
        before: ClusterJob | None = jobs.find(identity)
    except NoSuchJobError:
        before = None
    try:
        job = _apply_over_own(jobs, document, force=force)
    except RejectedError as error:
        raise _explained(error, source) from error
    resumes = job.is_stopped and not _stops(document) and not job.has_ended
    job = jobs.resume(job) if resumes else job
    if before is None or before.uid != job.uid:
        done = "created"
    elif resumes:
        done = "resumed"
    else:
        done = "unchanged" if before.generation == job.generation else "changed"
    context = f" of context {connection.api.context}" if connection.api.context else ""
    typer.echo(f"{job.name} {done} in namespace {job.namespace}{context}")
    return job


def _apply_over_own(jobs: ClusterJobs, document: ApiObject, *, force: bool) -> ClusterJob:
    """Apply the document. What `adascale scale` and `adascale stop` have set is replaced without `force`."""
    try:
        return jobs.apply(document, force=force)
    except RejectedError as error:
        own = f'"{FIELD_MANAGER}"'
        if error.status != 409 or not error.causes or not all(own in text for _, text in error.causes):
            raise
    return jobs.apply(document, force=True)


def _stops(document: ApiObject) -> bool:
    return ClusterJob(document).is_stopped


def _explained(error: RejectedError, source: JobSource) -> AdaScaleError:
    """Return the error as `adascale validate` shows errors, with the lines of the fields."""
    if error.status == 409:
        fields = "".join(f"\n  {field.removeprefix('.')}: {message}" for field, message in error.causes)
        return ConflictError(
            f"{source.name}: another program or person has set other values:{fields or ' ' + error.message}\n"
            "Correct the file, or replace their values with --force-conflicts"
        )
    if error.status in {400, 422} and error.causes:
        return JobFileError(source.name, [source.error_at(*cause) for cause in error.causes])
    return error


def _warn(source: JobSource) -> None:
    warning = describe_unused_gpus(source.job.gpus, source.job.spec.processes_per_replica)
    if warning is not None:
        typer.echo(f"Warning: {warning}", err=True)
    deadline = describe_deadline(source.job)
    if deadline is not None:
        typer.echo(deadline)


def _follow(connection: Connection, source: JobSource, job: ClusterJob, system_namespace: str) -> int:
    display = open_display(Console(highlight=False))
    display.message(f"{job.name}: {describe_size(source.job.spec, source.job.spec.max_replicas)}", "bold")
    client = connection.metrics(system_namespace)
    try:
        return JobFollower(connection.api, connection.jobs, client, display).follow(job)
    except KeyboardInterrupt:
        display.close()
        place = f"-n {job.namespace}"
        display.message(
            f"The job goes on: `adascale logs {job.name} {place} -f` shows its output, "
            f"`adascale stop {job.name} {place}` stops it"
        )
        return INTERRUPTED
    finally:
        display.close()
