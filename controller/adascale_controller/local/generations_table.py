"""The table of a run's generations."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from adascale_controller.formatting import count, percent, plural, significant, trimmed
from adascale_controller.local.generations import GenerationSummary, Range


def generations_table(generations: Sequence[GenerationSummary]) -> Table:
    """Return a table with a row for each generation."""
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
    for generation in generations:
        table.add_row(
            str(generation.generation),
            str(generation.replicas),
            _format_range(generation.local_bsz),
            _format_range(generation.scale),
            significant(generation.gain, 2),
            percent(generation.efficiency),
            count(generation.steps),
            f"{generation.seconds:.1f}",
            "" if generation.downtime is None else f"{generation.downtime:.1f} s",
        )
    return table


def repeated_steps(generations: Sequence[GenerationSummary]) -> str | None:
    """Return a sentence on the steps that were lost and repeated; None if there were none."""
    steps = sum(generation.repeated for generation in generations)
    if not steps:
        return None
    return f"{plural(steps, 'step')} {'was' if steps == 1 else 'were'} lost with a replica and repeated"


def _format_range(values: Range) -> str:
    low, high = trimmed(values.low), trimmed(values.high)
    return low if low == high else f"{low} to {high}"
