"""Renders the replica counts that a job may run on, for people."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import count, plural, trimmed
from adascale_controller.job import Job
from adascale_core.batch import BatchChoice, batch_choice, require_valid_replicas

MAX_ROWS = 64


def render_valid_replicas(job: Job) -> RenderableType:
    """Return a table of the valid replica counts of a job, with the batches that each may use."""
    spec = job.spec
    counts = require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_edge=False)
    for header in ("replicas", "local batch", "accumulation", "global batch", "largest scale"):
        table.add_column(header, justify="right", no_wrap=True)
    for replicas in counts[:MAX_ROWS]:
        choice = batch_choice(spec.bounds, replicas)
        table.add_row(
            str(replicas),
            _format_range(choice.local_bsz[0], choice.local_bsz[-1]),
            str(choice.accumulation),
            _format_range(choice[0].global_bsz, _largest_batch(choice)),
            trimmed(_largest_batch(choice) / spec.batch_size),
        )
    parts: list[RenderableType] = [table]
    if len(counts) > MAX_ROWS:
        others = counts[MAX_ROWS:]
        parts.append(Text(f" and {plural(len(others), 'more count')} up to {others[-1]}"))
    invalid = sorted(set(range(spec.min_replicas, spec.max_replicas + 1)) - set(counts))
    if invalid:
        parts.append(Text(f" not valid: {_format_ranges(invalid)}", "yellow"))
    return Group(*parts)


def _largest_batch(choice: BatchChoice) -> int:
    return choice[len(choice) - 1].global_bsz


def _format_range(low: int, high: int) -> str:
    return count(low) if low == high else f"{count(low)} to {count(high)}"


def _format_ranges(numbers: list[int]) -> str:
    """Return ascending numbers, with consecutive ones as a range: `1, 3 to 5`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(_format_range(numbers[0], numbers[-1]) for numbers in ranges)
