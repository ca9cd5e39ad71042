"""The command `adascale`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from adascale_client import MetricsServiceClient, ServiceUnreachableError
from adascale_controller.gain_summary import render_gain, service_urls
from adascale_controller.jobfile import load_job
from adascale_controller.local.display import open_display
from adascale_controller.local.machine import MIN_ON_CPU
from adascale_controller.local.runner import RunOptions, run_job
from adascale_controller.local.state_dir import DEFAULT_ROOT
from adascale_controller.valid_replicas import render_valid_replicas
from adascale_core import names
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import parse_job_id

app = typer.Typer(
    name="adascale",
    help="Train PyTorch models on as many replicas as help, at the accuracy of the small batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="An AdaScaleJob in YAML.", show_default=False)]


def main() -> NoReturn:
    """Run the command line; an error that the user can put right is told without a traceback."""
    try:
        app()
    except AdaScaleError as error:
        # Several lines stand below each other.
        print("adascale:", str(error).replace("\n", "\n          "), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # A full disk, a folder that may not be written: the system's words, and which file.
        print(f"adascale: {error}", file=sys.stderr)
        sys.exit(os.EX_IOERR)
    sys.exit(0)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"adascale {version('adascale-operator')}")
        raise typer.Exit


@app.callback()
def adascale(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
) -> None:
    """Train PyTorch models on as many replicas as help, at the accuracy of the small batch."""


@app.command()
def run(
    file: JobFile,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            "-r",
            metavar="N",
            min=1,
            help="The most replicas at once. Default: the number of GPUs; without one, the number of cores, "
            f"or {MIN_ON_CPU} if that is more.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(
            "--until",
            metavar="STEPS",
            min=1,
            help="Save and leave at this progress, before spec.scaleInvariantSteps.",
            show_default=False,
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="Where all state is kept. Default: .adascale/<namespace>.<name>",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            help=f"Where the metrics service listens. Default: {names.DEFAULT_API_PORT}, or any free port if "
            "that is taken.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", metavar="", help="Forget what was saved, and begin anew.", show_default=False
        ),
    ] = False,
) -> None:
    """Train a job on this machine, moving it to more replicas while that helps.

    Ctrl-C saves and leaves; the same command goes on from there.
    """
    options = RunOptions(replicas, until, state_dir, port, fresh)
    job = load_job(file)
    raise typer.Exit(run_job(job, options, open_display(Console(highlight=False))))


@app.command()
def validate(file: JobFile) -> None:
    """Say what is wrong with a job, or which replica counts it may run on."""
    job = load_job(file)
    console = Console(highlight=False)
    console.print(f"{file}: {job.id} is valid\n", markup=False, soft_wrap=True)
    console.print(render_valid_replicas(job))


@app.command()
def gain(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Its name, or <namespace>.<name>.", show_default=False)
    ],
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            envvar=names.ENV_API_URL,
            help="The metrics service. Default: that of the run in --state-dir.",
            show_default=False,
        ),
    ] = None,
    state_dir: Annotated[
        Path,
        typer.Option(
            "--state-dir", metavar="DIR", help="Where the run keeps its state, or a folder of such."
        ),
    ] = DEFAULT_ROOT,
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="Print the service's answer as it is.", show_default=False),
    ] = False,
) -> None:
    """Show the gain of a job that runs, and what other replica counts would be worth."""
    job_id = parse_job_id(job)
    urls = [url] if url else service_urls(state_dir, job_id)
    if not urls:
        raise ServiceUnreachableError(
            f"no run of {job} is under way in {state_dir}: start one with `adascale run`, or say where the "
            "metrics service is with --url"
        )
    service = MetricsServiceClient(urls[0], os.environ.get(names.ENV_TOKEN))
    gain = service.get_gain(job_id)
    if as_json:
        print(json.dumps(gain.to_json(), indent=2))
    else:
        Console(highlight=False).print(render_gain(gain, time.time()))


@app.command()
def operator(
    api_url: Annotated[
        str,
        typer.Option("--api-url", metavar="URL", help="The metrics service, as the operator reaches it."),
    ] = f"http://{names.API_SERVICE}.{names.SYSTEM_NAMESPACE}.svc:{names.DEFAULT_API_PORT}",
    pod_api_url: Annotated[
        str | None,
        typer.Option(
            "--pod-api-url",
            metavar="URL",
            help="The metrics service as pods reach it. Default: as --api-url.",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="PATH",
            envvar=names.ENV_TOKEN_FILE,
            help="The operator's token for the metrics service; read again as it is renewed.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="NAME",
            help="The only namespace to look after. Default: all of them.",
            show_default=False,
        ),
    ] = None,
    lease_namespace: Annotated[
        str | None,
        typer.Option(
            "--lease-namespace",
            metavar="NAME",
            help="Where the lease is that lets one operator work at a time. Default: no lease.",
            show_default=False,
        ),
    ] = None,
    identity: Annotated[
        str,
        typer.Option(
            "--identity", metavar="NAME", envvar="POD_NAME", help="The name of this operator among others."
        ),
    ] = socket.gethostname(),
    liveness: Annotated[
        str | None,
        typer.Option(
            "--liveness",
            metavar="HOST:PORT",
            help="Where GET /healthz answers while the operator is well. Default: nowhere.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Look after the AdaScaleJobs of a cluster: the one that this runs in, or that of KUBECONFIG."""
    # Imported here because it takes a second, which the other commands need not wait.
    from adascale_controller.operator.runtime.main import run_operator
    from adascale_controller.operator.runtime.settings import OperatorSettings

    run_operator(
        OperatorSettings(
            api_url=api_url,
            pod_api_url=pod_api_url,
            token_file=token_file,
            namespace=namespace,
            lease_namespace=lease_namespace,
            identity=identity,
            liveness=liveness,
        )
    )
