"""Renders the explained decision about a job for people."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import clock, duration, plural, significant
from adascale_core.views.decision import CountView, DecisionView


def render_decision(decision: DecisionView, now: float, slow: str = "") -> RenderableType:
    """Return the decision, what limits it, and what other counts would give."""
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts.add_row("decision", _decision(decision))
    facts.add_row("reason", decision.reason)
    for i, limit in enumerate(decision.limits):
        facts.add_row("" if i else "limits", limit.reason)
    if slow:
        facts.add_row("slow", slow)
    facts.add_row("decided", f"{clock(now - decision.time)} ago")
    parts: list[RenderableType] = [Text(decision.job, "bold"), facts]
    if decision.counts:
        parts += [Text(), _counts_table(decision)]
    return Group(*parts)


def _decision(decision: DecisionView) -> str:
    if decision.waiting:
        return "waits"
    if decision.replicas == decision.present or not decision.present:
        return plural(decision.replicas, "replica")
    return f"{decision.present} -> {plural(decision.replicas, 'replica')}"


def _counts_table(decision: DecisionView) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_edge=False)
    for header in ("replicas", "progress per second", "time left"):
        table.add_column(header, justify="right")
    gives = any(each.given for each in decision.counts)
    if gives:
        table.add_column("others would give")
    table.add_column("why", ratio=1)
    for each in decision.counts:
        cells = [
            str(each.replicas),
            "" if each.goodput is None else significant(each.goodput),
            "" if each.seconds_left is None else duration(each.seconds_left),
            *([_given(each)] if gives else []),
            each.reason,
        ]
        table.add_row(*cells, style="bold" if each.replicas == decision.replicas else "")
    return table


def _given(count: CountView) -> str:
    return ", ".join(f"{each.job}: {each.replicas}" for each in count.given)
