"""The gain of a job, for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import clock, count, percent, plural, significant, trimmed
from adascale_core.views import GainView, PredictionView


def service_urls(root: Path, job_id: str) -> list[str]:
    """Where runs of a job, whose state folders are in `root` or are `root`, have announced their service."""
    found = []
    for file in sorted([root / "service.json", *root.glob("*/service.json")]):
        try:
            told = json.loads(file.read_text())
            if told["job"] == job_id:
                found.append(str(told["url"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def render_gain(gain: GainView, now: float) -> RenderableType:
    """The answer of `GET /jobs/{id}/gain`, as a person would want to read it.

    Args:
        gain: the answer of the metrics service.
        now: the time, in seconds since 1970.
    """
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim")
    facts.add_column()
    for name, text in _facts(gain, now):
        facts.add_row(name, text)
    parts: list[RenderableType] = [Text(gain.job, "bold"), facts]
    if gain.predictions:
        parts += [Text(), _predictions(gain.predictions, gain.report.replicas)]
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
    if age > 10:
        facts.append(("reported", f"{clock(age)} ago"))
    return facts


def _predictions(predictions: Sequence[PredictionView], replicas: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_edge=False)
    for header in ("replicas", "local batch", "scale", "gain", "efficiency", "progress per second"):
        table.add_column(header, justify="right")
    for predicted in predictions:
        batch = str(predicted.local_bsz)
        if predicted.accumulation > 1:
            batch += f" x {predicted.accumulation}"
        table.add_row(
            str(predicted.replicas),
            batch,
            trimmed(predicted.scale),
            significant(predicted.gain),
            percent(predicted.efficiency),
            significant(predicted.goodput),
            style="bold" if predicted.replicas == replicas else "",
        )
    return table
