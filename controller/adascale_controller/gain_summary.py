"""Renders the gain of a job for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import clock, count, percent, plural, significant, trimmed
from adascale_core.views import GainView, PredictionView

MAX_FRESH_SECONDS = 10.0
"""The age of a report is shown if it is older than this."""


def render_gain(gain: GainView, now: float) -> RenderableType:
    """Return the latest report of a job and the predictions for other replica counts.

    Args:
        gain: the answer of the metrics service.
        now: seconds since 1970.
    """
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim")
    facts.add_column()
    for name, text in _facts(gain, now):
        facts.add_row(name, text)
    parts: list[RenderableType] = [Text(gain.job, "bold"), facts]
    if gain.predictions:
        parts += [Text(), _predictions_table(gain.predictions, gain.report.replicas)]
    return Group(*parts)


def _facts(gain: GainView, now: float) -> list[tuple[str, str]]:
    report = gain.report
    batch = f"{plural(report.replicas, 'replica')} x batch {report.local_bsz}"
    if report.accumulation > 1:
        batch += f" x {report.accumulation} micro-batches"
    facts = [
        ("gain", f"{significant(report.gain)} at scale {trimmed(report.scale)}"),
        ("efficiency", percent(gain.efficiency)),
        ("trains on", f"{batch}, generation {report.generation}"),
        ("progress", f"{count(report.progress)} steps, in {plural(report.step, 'optimizer step')}"),
    ]
    if report.loss is not None:
        facts.append(("loss", significant(report.loss)))
    age = now - report.time
    if age > MAX_FRESH_SECONDS:
        facts.append(("reported", f"{clock(age)} ago"))
    return facts


def _predictions_table(predictions: Sequence[PredictionView], replicas: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_edge=False)
    for header in ("replicas", "local batch", "scale", "gain", "efficiency", "progress per second"):
        table.add_column(header, justify="right")
    for prediction in predictions:
        batch = str(prediction.local_bsz)
        if prediction.accumulation > 1:
            batch += f" x {prediction.accumulation}"
        table.add_row(
            str(prediction.replicas),
            batch,
            trimmed(prediction.scale),
            significant(prediction.gain),
            percent(prediction.efficiency),
            significant(prediction.goodput),
            style="bold" if prediction.replicas == replicas else "",
        )
    return table
