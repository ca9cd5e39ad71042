"""Follows the gain of a job until the job ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

from adascale_client import MetricsServiceClient, ServiceRefusedError, ServiceUnreachableError
from adascale_controller.gain_summary import gain_line, render_gain
from adascale_core.views.gain import GainView

INTERVAL = 1.0
"""Seconds between two reads of the gain."""


class GainDisplay(Protocol):
    """Shows a gain and the gains that follow."""

    def show(self, gain: GainView) -> None:
        """Show a gain."""

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which gains are shown."""


class LiveGain:
    """Replaces the gain on a terminal by the newest."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which gains are shown."""
        return self._live

    def show(self, gain: GainView) -> None:
        """Show a gain."""
        self._live.update(render_gain(gain, time.time()), refresh=True)


class GainLines:
    """Prints a line for each new report."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: tuple[int, int] | None = None

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which gains are shown."""
        return nullcontext()

    def show(self, gain: GainView) -> None:
        """Show a gain, unless its report was shown."""
        report = (gain.report.generation, gain.report.step)
        if report != self._shown:
            self._shown = report
            print(json.dumps(gain.to_json()) if self._as_json else gain_line(gain), flush=True)


def watch_gain(
    job_id: str,
    client: MetricsServiceClient,
    display: GainDisplay,
    has_ended: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Show the gain of a job whenever it changes, and return why no more gains follow."""
    client.get_allocation(job_id)
    with display.running():
        while True:
            try:
                # Read first, so that the last report of a job that has ended is shown.
                allocation = client.get_allocation(job_id)
                gain = _find_gain(job_id, client)
                if gain is not None:
                    display.show(gain)
                if allocation.complete:
                    return f"job {job_id} has finished"
                if allocation.desired is not None and allocation.desired.failed:
                    return f"job {job_id} has failed"
            except ServiceUnreachableError:
                if has_ended():
                    return f"the run of job {job_id} has ended"
            except ServiceRefusedError as error:
                if error.status == 404:
                    return f"job {job_id} was deleted"
                if error.status < 500:
                    raise
            sleep(INTERVAL)


def _find_gain(job_id: str, client: MetricsServiceClient) -> GainView | None:
    """Return the gain of a job; None before its first report."""
    try:
        return client.get_gain(job_id)
    except ServiceRefusedError as error:
        if error.status == 404:
            return None
        raise
