"""The gain of a job, for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import clock, count, percent, plural, significant, trimmed


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


def render_gain(gain: Mapping[str, Any], now: float) -> RenderableType:
    """The answer of `GET /jobs/{id}/gain`, as a person would want to read it.

    Args:
        gain: the answer's members.
        now: the time, in seconds since 1970.
    """
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim")
    facts.add_column()
    for name, text in _facts(gain, now):
        facts.add_row(name, text)
    parts: list[RenderableType] = [Text(gain["job"], "bold"), facts]
    if gain["predictions"]:
        parts += [Text(), _predictions(gain)]
    return Group(*parts)


def _facts(gain: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    batch = f"{plural(gain['replicas'], 'replica')} x batch {gain['local_bsz']}"
    if gain["accumulation"] > 1:
        batch += f" x {gain['accumulation']} micro-batches"
    facts = [
        ("gain", f"{significant(gain['gain'])} at scale {trimmed(gain['scale'])}"),
        ("efficiency", percent(gain["efficiency"])),
        ("trains on", f"{batch}, generation {gain['generation']}"),
        ("progress", f"{count(gain['progress'])} steps, in {plural(gain['step'], 'optimizer step')}"),
    ]
    if gain["loss"] is not None:
        facts.append(("loss", significant(gain["loss"])))
    age = now - gain["time"]
    if age > 10:
        facts.append(("told", f"{clock(age)} ago"))
    return facts


def _predictions(gain: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_edge=False)
    for header in ("replicas", "local batch", "scale", "gain", "efficiency", "progress per second"):
        table.add_column(header, justify="right")
    for one in gain["predictions"]:
        batch = str(one["local_bsz"])
        if one["accumulation"] > 1:
            batch += f" x {one['accumulation']}"
        table.add_row(
            str(one["replicas"]),
            batch,
            trimmed(one["scale"]),
            significant(one["gain"]),
            percent(one["efficiency"]),
            significant(one["goodput"]),
            style="bold" if one["replicas"] == gain["replicas"] else "",
        )
    return table
