"""The end of a run: a table of its generations, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from adascale_controller.formatting import count, percent, plural, significant, trimmed
from adascale_controller.local.generations import GenerationSummary, Span


def generations_table(generations: Sequence[GenerationSummary]) -> Table:
    """A row for each generation."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    table.add_column("\ngen.", justify="right")
    table.add_column("\nreplicas", justify="right")
    table.add_column("local\nbatch", justify="right", no_wrap=True)
    table.add_column("\nscale", justify="right", no_wrap=True)
    table.add_column("\ngain", justify="right")
    table.add_column("effi-\nciency", justify="right")
    table.add_column("\nsteps", justify="right")
    table.add_column("\nseconds", justify="right")
    table.add_column("down-\ntime", justify="right", no_wrap=True)
    for one in generations:
        table.add_row(
            str(one.generation),
            str(one.replicas),
            _span(one.local_bsz),
            _span(one.scale),
            significant(one.gain, 2),
            percent(one.efficiency),
            count(one.steps),
            f"{one.seconds:.1f}",
            "" if one.downtime is None else f"{one.downtime:.1f} s",
        )
    return table


def _span(span: Span) -> str:
    least, most = trimmed(span.least), trimmed(span.most)
    return least if least == most else f"{least} to {most}"


def repeated_steps(generations: Sequence[GenerationSummary]) -> str | None:
    """What was lost with replicas, in words; none if nothing was."""
    lost = sum(one.repeated for one in generations)
    return f"{plural(lost, 'step')} had been lost with a replica, and made again" if lost else None


def result_text(result: Mapping[str, float | str]) -> str:
    """What the program told of its result."""
    return ", ".join(f"{name} {_value(value)}" for name, value in result.items())


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
