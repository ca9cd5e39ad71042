"""Formats numbers, durations and tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from adascale_core.messages.reports import GainReport

Padding = tuple[int, int] | tuple[int, int, int, int]
_UNLIMITED = 10_000


def count(number: float) -> str:
    """Return a whole number in groups of three digits: `1,234`."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """Return a number with a noun: `1 replica`, `2 replicas`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def capitalized(text: str) -> str:
    """Return a text with a capital letter first."""
    return f"{text[:1].upper()}{text[1:]}"


def significant(number: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits; whole numbers keep all theirs."""
    if number == 0:
        return "0"
    whole = len(f"{abs(number):.0f}") if abs(number) >= 1 else 0
    if whole:
        return f"{number:,.{max(digits - whole, 0)}f}"
    return f"{number:.{digits}g}"


def trimmed(number: float) -> str:
    """Return a number with at most three significant digits, without trailing zeros."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def percent(fraction: float) -> str:
    """Return a fraction in percent: `45%`."""
    return f"{100 * fraction:.0f}%"


def progress_text(progress: float, steps: float | None) -> str:
    """Return progress as a share of the progress that is required, or else the number."""
    return f"{min(int(100 * progress / steps), 100)}%" if steps else count(int(progress))


def local_batch(local_bsz: int, accumulation: int) -> str:
    """Return a local batch: the samples of a micro-batch, and how many a step has if there are several."""
    return str(local_bsz) if accumulation == 1 else f"{local_bsz} x {accumulation}"


def describe_batch(report: GainReport) -> str:
    """Return the batch of a step in words: `batch size 256, local batch 64, accumulation 2`."""
    accumulation = f", accumulation {report.accumulation}" if report.accumulation > 1 else ""
    return f"batch size {count(report.plan.global_bsz)}, local batch {report.local_bsz}{accumulation}"


def clock(seconds: float) -> str:
    """Return a duration as `m:ss` or `h:mm:ss`."""
    whole = max(int(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def duration(seconds: float) -> str:
    """Return a duration with units: `1.2 s`, `3 min 4 s`, `2 h 1 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def age(seconds: float) -> str:
    """Return a duration as `kubectl get` shows it: `45s`, `2m12s`, `3h`, `4d`."""
    whole = max(int(seconds), 0)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole}s"
    if minutes < 10:
        return f"{minutes}m{whole % 60}s" if whole % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if hours < 48 else f"{days}d"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells below each other, as `kubectl get` aligns them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def memory(local_bsz_limit: int) -> str:
    """Return what the memory of the replicas holds, for a table."""
    return f"holds local batches of at most {local_bsz_limit}"


def describe_limit(local_bsz: int) -> str:
    """Return the message about a batch that did not fit into memory."""
    return (
        "A local batch did not fit into memory. Its samples are repeated in smaller batches, and local "
        f"batches have at most {local_bsz} samples from now on"
    )


class OutputConsole(Console):
    """The console of a command: off a terminal nothing is wrapped, and a closed pipe is an error."""

    def __init__(self, file: IO[str] | None = None) -> None:
        super().__init__(file=file, highlight=False)
        if not self.is_terminal:
            self.width = _UNLIMITED

    def on_broken_pipe(self) -> None:
        """Raise the error; for rich it is a reason to exit."""
        raise


def numbers_table(
    columns: Mapping[str, Sequence[str]], padding: Padding, row_styles: Sequence[str] = ()
) -> Table:
    """Return a table of numbers: header -> the cells of the column."""
    table = Table(box=box.SIMPLE_HEAD, padding=padding, header_style="bold", show_edge=False)
    for header in columns:
        table.add_column(header, justify="right", overflow="fold")
    rows = list(zip(*columns.values(), strict=True))
    for cells, style in zip(rows, row_styles or [""] * len(rows), strict=True):
        table.add_row(*cells, style=style)
    return table
