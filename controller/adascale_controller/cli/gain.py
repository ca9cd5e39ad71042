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
from adascale_controller.cli.service_client import connect
from adascale_controller.gain_summary import render_gain
from adascale_controller.gain_watch import GainLines, LiveGain, watch_gain
from adascale_controller.local import service_file
from adascale_controller.local.state_dir import DEFAULT_ROOT
from adascale_core.job_id import parse_job_id


def gain(
    job: JobName,
    url: ServiceUrl = None,
    state_dir: StateRoot = DEFAULT_ROOT,
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
) -> None:
    """Show the gain of a running job, and predictions for other replica counts."""
    job_id = parse_job_id(job)
    client = connect(job, url, state_dir)
    as_json = output is Output.JSON
    if watch:
        _watch(job_id, client, as_json, lambda: not url and not service_file.find_urls(state_dir, job_id))
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
