"""The commands for jobs of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from adascale_controller.cli.arguments import JobFile, JobName, Output, OutputFormat, StateRoot, option
from adascale_controller.formatting import OutputConsole, count, plural
from adascale_controller.job_overview import describe_deadline, render_list, render_valid_replicas
from adascale_controller.jobfile import load_job
from adascale_controller.local.display import open_display
from adascale_controller.local.local_command import LocalCommandError, resolve_command
from adascale_controller.local.local_jobs import (
    LocalJob,
    find_job,
    find_jobs,
    read_status,
    remove_run,
    stop_run,
)
from adascale_controller.local.machine import MIN_CPU_REPLICAS
from adascale_controller.local.processes import StopSignals
from adascale_controller.local.replica_limit import ReplicaLimit, request_limit
from adascale_controller.local.runner import RunOptions, run_job
from adascale_controller.local.runs_service import runs_service
from adascale_controller.local.service_process import ServiceProcessError, page_url
from adascale_controller.local.state_dir import StateDir
from adascale_core import names
from adascale_core.errors import AdaScaleError, UsageError
from adascale_core.failures import describe_exit
from adascale_core.job_id import short_id
from adascale_core.placement.replica_gpus import describe_unused_gpus

STOP_TIMEOUT = 60.0
"""Seconds to wait for the end of the run, by default."""


UPDATE_INTERVAL = 1.0
"""Seconds between two searches for runs."""
ANSWER_TIMEOUT = 30.0
"""Seconds to wait for the answer of the run."""


def stop(
    job: JobName,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            "-t",
            metavar="SECONDS",
            min=0,
            help="The seconds to wait for the end of the run.",
        ),
    ] = STOP_TIMEOUT,
    state_dir: StateRoot = None,
) -> None:
    """Save and stop a job; `adascale run` resumes it."""
    stop_and_report(find_job(state_dir, job), timeout)


def stop_and_report(job: LocalJob, timeout: float) -> None:
    """Stop the run of `job`, and print its last step."""
    stopped_at = time.time()
    stop_run(job, timeout)
    checkpoint = job.checkpoint
    if checkpoint is None:
        saved = "no checkpoint was saved"
    elif checkpoint.saved_at < stopped_at:
        saved = f"the last checkpoint is of step {count(checkpoint.step)}"
    else:
        saved = f"saved at step {count(checkpoint.step)}"
    typer.echo(f"{job.short_id} stopped, {saved}")


def _port_of(what: str) -> Any:
    """Return the option for the port of the metrics service or its page."""
    return option(
        "--port",
        metavar="PORT",
        min=0,
        max=65535,
        help=f"The port of the {what}; 0 for any free port. Default: {names.DEFAULT_API_PORT}, or any free "
        "port if that is in use.",
    )


def run(
    file: JobFile,
    replicas: Annotated[
        int | None,
        option(
            "--replicas",
            "-r",
            metavar="N",
            min=1,
            help="The most replicas at once, spares included. Default: the number of GPUs, or without a "
            f"GPU the number of CPU cores, but at least {MIN_CPU_REPLICAS}.",
        ),
    ] = None,
    until: Annotated[
        int | None,
        option(
            "--until",
            metavar="STEPS",
            min=1,
            help="Save and stop at this progress, even if spec.scaleInvariantSteps is higher.",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        option(
            "--state-dir",
            metavar="DIR",
            help="The folder for checkpoints, logs and metrics. Default: .adascale/<namespace>.<name>.",
        ),
    ] = None,
    port: Annotated[int | None, _port_of("metrics service")] = None,
    fresh: Annotated[
        bool,
        option("--fresh", help="Delete the saved state and start over."),
    ] = False,
) -> None:
    """Train a job on this machine.

    The number of replicas changes during training, as the gain that the job reports makes it worthwhile.
    Ctrl-C saves and stops; run the same command to resume.
    """
    options = RunOptions(replicas, until, state_dir, port, fresh)
    job = load_job(file)
    raise typer.Exit(run_job(job, options, open_display(OutputConsole())))


def ui(
    state_dir: StateRoot = None,
    port: Annotated[int | None, _port_of("page")] = None,
) -> None:
    """Show the page with your runs on this machine, those that run and those that have ended.

    It only reads: runs may begin, end and continue while it shows them. Ctrl-C ends it.
    """
    preferred = names.DEFAULT_API_PORT if port is None else port
    with (
        StopSignals() as signals,
        runs_service(
            state_dir, preferred, required=port is not None, cancelled=lambda: signals.stop_requested
        ) as service,
    ):
        if service is None:
            return
        url = page_url(service.process.url, service.process.read_token)
        print(f"The page with your runs (Ctrl-C ends it; runs go on):\n{url}", flush=True)
        while not signals.stop_requested:
            code = service.process.exit_code
            if code is not None:
                raise ServiceProcessError(f"the page ended ({describe_exit(code)}): start it again")
            try:
                service.runs.update()
            except OSError as error:
                print(f"adascale: cannot update the list of runs: {error}", file=sys.stderr)
            time.sleep(UPDATE_INTERVAL)


def validate(file: JobFile) -> None:
    """Check a job file; show its errors and warnings, and the replica counts that the job may run on."""
    job = load_job(file)
    console = OutputConsole()
    console.print(f"{file}: {job.id} is valid\n", markup=False, soft_wrap=True)
    warnings = [describe_unused_gpus(job.gpus, job.spec.processes_per_replica)]
    try:
        resolve_command(job, Path(), os.environ, threads=1)
    except LocalCommandError as error:
        # On a cluster, the program is in the image.
        warnings.append(f"`adascale run` refuses it here: {error}")
    for warning in filter(None, warnings):
        console.print(f"Warning: {warning}\n", markup=False, soft_wrap=True)
    console.print(render_valid_replicas(job))
    deadline = describe_deadline(job)
    if deadline is not None:
        console.print(f"\n{deadline}", markup=False, soft_wrap=True)


def list_jobs(
    state_dir: StateRoot = None,
    output: OutputFormat = Output.TEXT,
) -> None:
    """List your jobs that run, or have run, on this machine."""
    summaries = [read_status(job) for job in find_jobs(state_dir)]
    for summary in summaries:
        if summary.checkpoint_error is not None:
            typer.echo(f"adascale: {short_id(summary.id)}: {summary.checkpoint_error}", err=True)
    if output is Output.JSON:
        typer.echo(json.dumps([summary.to_json() for summary in summaries], indent=2))
    elif summaries:
        typer.echo(render_list(summaries, time.time()))
    elif state_dir is None:
        typer.echo("No jobs on this machine: start one with `adascale run FILE`.", err=True)
    else:
        typer.echo(
            f"No jobs found in {state_dir}: pass another --state-dir, or omit it for all your runs.", err=True
        )


def logs(
    job: JobName,
    replica: Annotated[
        int,
        typer.Option("--replica", metavar="N", min=0, help="The replica whose output to print."),
    ] = 0,
    follow: Annotated[
        bool,
        option("--follow", "-f", help="Print new output until the run ends."),
    ] = False,
    tail: Annotated[
        int,
        typer.Option(
            "--tail", metavar="LINES", min=-1, help="The number of last lines to print; -1 for all."
        ),
    ] = -1,
    state_dir: StateRoot = None,
) -> None:
    """Print the output of a replica of a job."""
    found = find_job(state_dir, job)
    log, process = found.folder.replica_log(replica), found.process
    if not log.exists():
        raise AdaScaleError(f"replica {replica} of job {job} has no output; {_with_output(found.folder)}")
    command = ["tail", "-n", "+1" if tail < 0 else str(tail)]
    if follow and process is not None:
        command += ["-f", f"--pid={process}"]
    try:
        raise typer.Exit(subprocess.run([*command, str(log)], check=False).returncode)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _with_output(folder: StateDir) -> str:
    ranks = sorted(int(log.stem.removeprefix("replica-")) for log in folder.logs.glob("replica-*.log"))
    if not ranks:
        return "no replica has started yet"
    return f"the replicas with output are {', '.join(map(str, ranks))}"


def scale(
    job: JobName,
    replicas: Annotated[
        int,
        option("--replicas", "-r", metavar="N", min=0, help="The most replicas at once; 0 stops the job."),
    ],
    state_dir: StateRoot = None,
) -> None:
    """Set the most replicas of a job on this machine, until the run ends; 0 saves and stops it.

    As with `kubectl scale` on a cluster, this replaces spec.replicaLimit.
    The job uses fewer replicas if more are not worthwhile.
    """
    found = find_job(state_dir, job)
    if replicas == 0:
        stop_and_report(found, STOP_TIMEOUT)
        return
    process = found.require_process()
    limit = request_limit(found.folder, replicas, process, lambda: found.process == process, ANSWER_TIMEOUT)
    if limit is None:
        typer.echo(
            f"{found.short_id} has not answered within {ANSWER_TIMEOUT:g} s. The request for at most "
            f"{plural(replicas, 'replica')} is kept, and carried out as soon as the run reads it"
        )
        return
    typer.echo(scaled_text(found.short_id, replicas, limit))


def scaled_text(name: str, replicas: int, limit: ReplicaLimit) -> str:
    """Return the message about the limit that is used, and why it is lower than the requested one."""
    lowered = f" (spec.maxReplicas is {limit.replicas})" if limit.replicas + limit.spares < replicas else ""
    return f"{name} scaled to at most {limit}{lowered}"


def rm(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB...", help="The jobs' names, or <namespace>.<name>.", show_default=False),
    ],
    keep_checkpoints: Annotated[bool, option("--keep-checkpoints", help="Keep the checkpoints.")] = False,
    yes: Annotated[bool, option("--yes", "-y", help="Do not ask.")] = False,
    state_dir: StateRoot = None,
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
        raise UsageError(f"{question} Confirm it with --yes")
    return typer.confirm(question)
