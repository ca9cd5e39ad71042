"""Explained decisions: which are stored next, and how `adascale explain` shows them."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import clock, duration, plural, significant
from adascale_core.decision.decide import Decision
from adascale_core.messages.reports import GainReport
from adascale_core.views.decision import CountView, DecisionView

INTERVAL = 30.0
"""Seconds after which an unchanged decision is explained again, with newer predictions."""
MAX_JOBS = 8
"""Jobs that are explained at the same time, so that a cycle with many jobs is not delayed."""


class ExplanationSchedule:
    """Which decisions are explained next."""

    def __init__(self) -> None:
        self._explained: dict[str, tuple[Decision, float]] = {}
        self.has_more = False
        """Whether there are more changed decisions than were explained the last time."""

    def due(self, decisions: Mapping[str, Decision], now: float) -> list[str]:
        """Return the jobs to explain now, those with a changed decision first, and drop all other jobs."""
        self._explained = {job: known for job, known in self._explained.items() if job in decisions}
        due: list[tuple[float, str]] = []
        for job, decision in decisions.items():
            known = self._explained.get(job)
            if known is None or known[0] != decision:
                due.append((float("-inf"), job))
            elif now - known[1] >= INTERVAL:
                due.append((known[1], job))
        self.has_more = sum(moment == float("-inf") for moment, _ in due) > MAX_JOBS
        jobs = [job for _, job in sorted(due)[:MAX_JOBS]]
        for job in jobs:
            self._explained[job] = decisions[job], now
        return jobs

    def repeat(self, job: str) -> None:
        """Explain the decision about a job again, because it could not be stored."""
        self._explained.pop(job, None)


def render_decision(
    decision: DecisionView,
    now: float,
    slow: str = "",
    ended: str = "",
    latest: GainReport | None = None,
) -> RenderableType:
    """Return the decision, what limits it, and what other counts would give; less if it has ended."""
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts.add_row("decision", _decision(decision))
    if ended:
        facts.add_row("ended", ended)
    else:
        facts.add_row("reason", decision.reason)
        limits = [limit.reason for limit in decision.limits if limit.reason not in decision.reason]
        for i, limit in enumerate(limits):
            facts.add_row("" if i else "limits", limit)
        if slow:
            facts.add_row("slow", slow)
        if latest is not None and latest.goodput:
            speed, count = significant(latest.goodput), plural(latest.replicas, "replica")
            facts.add_row("measured", f"{speed} progress per second on {count}, mean of the last minute")
    facts.add_row("decided", f"{clock(now - decision.time)} ago")
    parts: list[RenderableType] = [Text(decision.job, "bold"), facts]
    if decision.counts and not ended:
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
    for header in ("replicas", "predicted per second", "time left"):
        table.add_column(header, justify="right")
    gives = any(each.given for each in decision.counts)
    if gives:
        table.add_column("others would give")
    table.add_column("why", ratio=1)
    shown = {decision.reason, *(limit.reason for limit in decision.limits)}
    for each in decision.counts:
        cells = [
            str(each.replicas),
            "" if each.goodput is None else significant(each.goodput),
            "" if each.seconds_left is None else duration(each.seconds_left),
            *([_given(each)] if gives else []),
            "" if each.reason in shown else each.reason,
        ]
        table.add_row(*cells, style="bold" if each.replicas == decision.replicas else "")
    return table


def _given(count: CountView) -> str:
    return ", ".join(f"{each.job}: {each.replicas}" for each in count.given)
