"""`adascale logs`."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from adascale_controller.cli.arguments import JobName, StateRoot
from adascale_controller.cli.of_kubectl import OfKubectl
from adascale_controller.local.local_jobs import find_job
from adascale_controller.local.log_follower import print_log
from adascale_controller.local.state_dir import StateDir
from adascale_core.errors import AdaScaleError


class NoLogError(AdaScaleError):
    """A replica without a log."""


def logs(
    job: JobName,
    replica: Annotated[
        int,
        typer.Option("--replica", metavar="N", min=0, help="The replica whose output to print."),
    ] = 0,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", metavar="", help="Print new output until the run ends.", show_default=False
        ),
    ] = False,
    tail: Annotated[
        int,
        typer.Option(
            "--tail", metavar="LINES", min=-1, help="The number of last lines to print; -1 for all."
        ),
    ] = -1,
    state_dir: StateRoot = None,
    _cluster: OfKubectl = False,
) -> None:
    """Print the output of a replica of a job."""
    lines = None if tail < 0 else tail
    found = find_job(state_dir, job)
    log = found.folder.replica_log(replica)
    if not log.exists():
        raise NoLogError(f"replica {replica} of job {job} has no output; {_with_output(found.folder)}")
    try:
        print_log(log, sys.stdout, lines, follow, lambda: found.process is not None)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _with_output(folder: StateDir) -> str:
    ranks = sorted(int(log.stem.removeprefix("replica-")) for log in folder.logs.glob("replica-*.log"))
    if not ranks:
        return "no replica has started yet"
    return f"the replicas with output are {', '.join(map(str, ranks))}"
