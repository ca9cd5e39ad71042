"""`adascale rm`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from adascale_controller.cli.arguments import StateRoot
from adascale_controller.cli.of_kubectl import OfKubectl
from adascale_controller.local.local_jobs import find_job
from adascale_controller.local.remove_run import remove_run
from adascale_core.errors import AdaScaleError


class NotConfirmedError(AdaScaleError):
    """A deletion that nobody has confirmed."""

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
    _cluster: OfKubectl = False,
) -> None:
    """Delete jobs that do not run: reports, logs, checkpoints, and their place in the list.

    Checkpoints stay that are in a folder or an object store that the job file names.
    """
    found = [find_job(state_dir, job) for job in dict.fromkeys(jobs)]
    for job in found:
        deleted = "reports and logs" if keep_checkpoints else "reports, logs and checkpoints"
        if not yes and not _confirm(f"Delete the {deleted} of {job.short_id} in {job.folder.path}?"):
            continue
        kept = remove_run(job, keep_checkpoints=keep_checkpoints)
        where = f"; its checkpoints stay in {kept}" if kept is not None else ""
        typer.echo(f"{job.short_id} deleted{where}")


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise NotConfirmedError(f"{question} Confirm it with --yes")
    return typer.confirm(question)
