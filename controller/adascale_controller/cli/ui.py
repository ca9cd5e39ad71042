"""`adascale ui`."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from adascale_controller.cli.arguments import StateRoot
from adascale_controller.local.runs_service import runs_service
from adascale_controller.local.service_process import ServiceProcessError, page_url
from adascale_controller.local.stop_signals import StopSignals
from adascale_core import names
from adascale_core.failures import describe_exit

UPDATE_INTERVAL = 1.0
"""Seconds between two searches for runs."""


def ui(
    state_dir: StateRoot = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            help=f"The port of the page; 0 for any free port. Default: {names.DEFAULT_API_PORT}, or any free "
            "port if that is in use.",
            show_default=False,
        ),
    ] = None,
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
        print(f"The page is {url}\nCtrl-C ends it; runs go on", flush=True)
        while not signals.stop_requested:
            code = service.process.exit_code
            if code is not None:
                raise ServiceProcessError(f"the page ended ({describe_exit(code)}): start it again")
            try:
                service.runs.update()
            except OSError as error:
                print(f"adascale: cannot update the list of runs: {error}", file=sys.stderr)
            time.sleep(UPDATE_INTERVAL)
