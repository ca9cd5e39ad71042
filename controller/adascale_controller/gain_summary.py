"""Renders the gain of a job for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import (
    clock,
    count,
    describe_batch,
    local_batch,
    memory,
    numbers_table,
    percent,
    plural,
    significant,
    trimmed,
)
from adascale_core.views.gain import GainView, PredictionView

MAX_FRESH_SECONDS = 10.0
"""The age of a report is shown if it is older than this."""


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


def _predictions_table(predictions: Sequence[PredictionView], replicas: int) -> Table:
    columns = {
        "replicas": [str(each.replicas) for each in predictions],
        "local batch": [local_batch(each.local_bsz, each.accumulation) for each in predictions],
        "scale": [trimmed(each.scale) for each in predictions],
        "gain": [_gain(each) for each in predictions],
        "efficiency": [percent(each.efficiency) for each in predictions],
        "progress per second": [significant(each.goodput) for each in predictions],
    }
    styles = ["bold" if each.replicas == replicas else "" for each in predictions]
    return numbers_table(columns, padding=(0, 1), row_styles=styles)


def _gain(prediction: PredictionView) -> str:
    """Return a gain, and between which it is at one standard error."""
    low, high = significant(prediction.gain_low), significant(prediction.gain_high)
    gain = significant(prediction.gain)
    return gain if low == high else f"{gain} ({low} to {high})"
