"""What a run shows: sentences as things happen, and below them, on a terminal, where the job stands."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import clock, count, percent, plural, significant, trimmed
from adascale_core.messages import GainReport

PLAIN_INTERVAL = 10.0
"""Seconds between two lines about where the job stands, where there is no terminal."""


@dataclass(frozen=True)
class Status:
    """Where a job stands.

    Args:
        doing: what it does, in a word or two.
        progress: steps at `batch_size` made.
        total: those to make, if bounded.
        report: the last report of the active generation, if there is one.
        left: seconds until the end as predicted, if it can be.
    """

    doing: str
    progress: float = 0.0
    total: float | None = None
    report: GainReport | None = None
    left: float | None = None


class Display(Protocol):
    """Shows a run to its user."""

    def note(self, text: str, style: str = "") -> None:
        """Tell something that has happened."""

    def update(self, status: Status) -> None:
        """Show where the job stands by now."""

    def show(self, renderable: RenderableType) -> None:
        """Show something as it is."""

    def close(self) -> None:
        """Take the status away; sentences may still be told."""


def open_display(console: Console) -> Display:
    """The display that suits a console."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class _Sentences:
    """Tells sentences, each with the time since the beginning."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    def note(self, text: str, style: str = "") -> None:
        """Tell something that has happened."""
        if not self._console.is_terminal:
            # Whoever reads lines from a pipe wants them whole.
            self._console.print(f"{clock(self._elapsed()):>7}  {text}", soft_wrap=True, markup=False)
            return
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(width=7, justify="right", style="dim", no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(clock(self._elapsed()), Text(text, style))
        self._console.print(line)

    def show(self, renderable: RenderableType) -> None:
        """Show something as it is."""
        self._console.print(renderable)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began


class LiveDisplay(_Sentences):
    """For a terminal: the status stays at the bottom and changes in place."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        # Refreshed by hand: a thread of rich's would be there when processes are forked.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def update(self, status: Status) -> None:
        """Show where the job stands by now."""
        if not self._live.is_started:
            self._live.start()
        self._live.update(Padding(Group(*_status_lines(status)), (1, 0, 0, 2)), refresh=True)

    def close(self) -> None:
        """Take the status away."""
        self._live.stop()


class PlainDisplay(_Sentences):
    """For a file or a pipe: a line now and then."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._told_at = self._began
        self._told: Status | None = None

    def update(self, status: Status) -> None:
        """Tell where the job stands, unless that was told just now."""
        now = time.monotonic()
        if now - self._told_at < PLAIN_INTERVAL or status.report is None or status == self._told:
            return
        self._told_at, self._told = now, status
        self.note("  ".join(part for part in (_progress_text(status), *_facts(status)) if part))

    def close(self) -> None:
        """Nothing stays to be taken away."""


def _status_lines(status: Status) -> list[RenderableType]:
    bar = ProgressBar(
        total=status.total or 100.0,
        completed=min(status.progress, status.total or 0.0),
        complete_style="cyan",
        finished_style="cyan",
        style="grey30",
    )
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    text = _progress_text(status)
    if status.left is not None:
        text += f"  {clock(status.left)} left"
    line.add_row(bar if status.total else Text(""), Text(text))
    facts = Text("   ").join(Text(fact) for fact in (*_facts(status), status.doing) if fact)
    facts.stylize("dim")
    return [line, facts]


def _progress_text(status: Status) -> str:
    if status.total is None:
        return f"{count(status.progress)} steps"
    share = percent(int(100 * status.progress / status.total) / 100)
    return f"{count(status.progress)} / {count(status.total)} steps  {share}"


def _facts(status: Status) -> list[str]:
    report = status.report
    if report is None:
        return []
    facts = [] if report.loss is None else [f"loss {significant(report.loss)}"]
    scale = trimmed(report.scale)
    facts.append(f"gain {significant(report.gain, 2)} of {scale} ({percent(report.efficiency)})")
    batch = f"{plural(report.replicas, 'replica')} x batch {report.local_bsz}"
    facts.append(batch if report.accumulation == 1 else f"{batch} x {report.accumulation}")
    return facts
