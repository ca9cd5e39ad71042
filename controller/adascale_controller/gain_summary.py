"""Renders the gain of a job for people, once or until the job ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from adascale_client import MetricsServiceClient, ServiceRefusedError, ServiceUnreachableError
from adascale_controller.formatting import (
    Column,
    FittingTable,
    clock,
    count,
    describe_batch,
    local_batch,
    memory,
    percent,
    plural,
    significant,
    trimmed,
)
from adascale_core.views.gain import GainView, PredictionView

MAX_FRESH_SECONDS = 10.0
"""The age of a report is shown if it is older than this."""


INTERVAL = 1.0
"""Seconds between two reads of the gain."""


def render_gain(gain: GainView, now: float) -> RenderableType:
    """Return the latest report of a job and the predictions for other replica counts."""
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim")
    facts.add_column()
    for name, text in _facts(gain, now):
        facts.add_row(name, text)
    parts: list[RenderableType] = [Text(gain.job, "bold"), facts]
    if gain.predictions:
        parts += [Text(), _predictions_table(gain.predictions, gain.report.replicas)]
    return Group(*parts)


def gain_line(gain: GainView) -> str:
    """Return the latest report of a job in one line."""
    report = gain.report
    loss = "" if report.loss is None else f", loss {significant(report.loss)}"
    return (
        f"step {report.step} on {plural(report.replicas, 'replica')}, progress {report.progress:.0f}: "
        f"gain {significant(report.gain)} at scale {trimmed(report.scale)} ({describe_batch(report)}), "
        f"efficiency {percent(gain.efficiency)}{loss}"
    )


def _facts(gain: GainView, now: float) -> list[tuple[str, str]]:
    report = gain.report
    facts = [
        ("gain", f"{significant(report.gain)} at scale {trimmed(report.scale)}"),
        ("efficiency", percent(gain.efficiency)),
        ("trains on", f"{plural(report.replicas, 'replica')}, generation {report.generation}"),
        ("batch", describe_batch(report)),
        ("progress", f"{count(report.progress)}, in {plural(report.step, 'step')}"),
    ]
    if gain.local_bsz_limit is not None:
        facts.append(("memory", memory(gain.local_bsz_limit)))
    if report.loss is not None:
        facts.append(("loss", significant(report.loss)))
    facts += [(name, significant(value)) for name, value in sorted(report.metrics.items())]
    age = now - report.time
    if age > MAX_FRESH_SECONDS:
        facts.append(("reported", f"{clock(age)} ago"))
    return facts


def _predictions_table(predictions: Sequence[PredictionView], replicas: int) -> FittingTable:
    columns = [
        Column("replicas", [str(each.replicas) for each in predictions]),
        Column("local batch", [local_batch(each.local_bsz, each.accumulation) for each in predictions], 3),
        Column("scale", [trimmed(each.scale) for each in predictions], 2),
        Column("gain", [_gain(each) for each in predictions], 1),
        Column("efficiency", [percent(each.efficiency) for each in predictions], 4),
        Column("progress per second", [significant(each.goodput) for each in predictions]),
    ]
    styles = ["bold" if each.replicas == replicas else "" for each in predictions]
    return FittingTable(columns, padding=(0, 1), row_styles=styles)


def _gain(prediction: PredictionView) -> str:
    """Return a gain, and between which it is at one standard error."""
    low, high = significant(prediction.gain_low), significant(prediction.gain_high)
    gain = significant(prediction.gain)
    return gain if low == high else f"{gain} ({low} to {high})"


class LiveGain(Live):
    """Replaces the gain on a terminal by the newest."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, auto_refresh=False, vertical_overflow="crop")

    def show(self, gain: GainView) -> None:
        """Show a gain."""
        self.update(render_gain(gain, time.time()), refresh=True)


class GainLines(nullcontext[None]):
    """Prints a line for each new report."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json
        self._shown: tuple[int, int] | None = None

    def show(self, gain: GainView) -> None:
        """Show a gain, unless its report was shown."""
        report = (gain.report.generation, gain.report.step)
        if report != self._shown:
            self._shown = report
            print(json.dumps(gain.to_json()) if self._as_json else gain_line(gain), flush=True)


def watch_gain(
    job_id: str,
    client: MetricsServiceClient,
    display: LiveGain | GainLines,
    has_ended: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Show the gain of a job whenever it changes, and return why no more gains follow.

    `has_ended` returns whether a service that does not answer has ended, so that it will not answer again.
    """
    client.get_allocation(job_id)  # Errors of this first call are raised, such as for an unknown job.
    with display:
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
