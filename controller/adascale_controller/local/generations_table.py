"""The table of a run's generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adascale_controller.fitting_table import Column, FittingTable
from adascale_controller.formatting import count, percent, plural, significant, trimmed
from adascale_controller.local.generations import GenerationSummary, Range


def generations_table(generations: Sequence[GenerationSummary]) -> FittingTable:
    """Return a table with a row for each generation."""

    def column(header: str, rank: int, cell: Callable[[GenerationSummary], str]) -> Column:
        return Column(header, [cell(generation) for generation in generations], rank)

    columns = [
        column("\ngen.", 0, lambda each: str(each.generation)),
        column("\nreplicas", 0, lambda each: str(each.replicas)),
        column("local\nbatch", 6, _local_batch),
        column("\nscale", 2, lambda each: _format_range(each.scale)),
        column("\ngain", 0, lambda each: significant(each.gain, 2)),
        column("effi-\nciency", 4, lambda each: percent(each.efficiency)),
        column("\nsteps", 1, lambda each: count(each.steps)),
        column("\nseconds", 5, lambda each: f"{each.seconds:.1f}"),
        column("down-\ntime", 3, lambda each: "" if each.downtime is None else f"{each.downtime:.1f} s"),
    ]
    return FittingTable(columns, padding=(0, 1, 0, 0))


def repeated_steps(generations: Sequence[GenerationSummary]) -> str | None:
    """Return a sentence on the steps that were lost and repeated; None if there were none."""
    steps = sum(generation.repeated for generation in generations)
    if not steps:
        return None
    return f"{plural(steps, 'step')} {'was' if steps == 1 else 'were'} lost with a replica and repeated"


def _local_batch(generation: GenerationSummary) -> str:
    """Return the samples of a micro-batch, and the number of micro-batches if there is more than one."""
    batch = _format_range(generation.local_bsz)
    accumulation = _format_range(generation.accumulation)
    return batch if accumulation == "1" else f"{batch} x {accumulation}"


def _format_range(values: Range) -> str:
    low, high = trimmed(values.low), trimmed(values.high)
    return low if low == high else f"{low} to {high}"
