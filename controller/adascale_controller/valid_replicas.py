"""Which replica counts a job may run on, as a table."""

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
    """The valid replica counts of a job, with the batches that each may use."""
    spec = job.spec
    counts = require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_edge=False)
    for header in ("replicas", "local batch", "accumulation", "global batch", "largest scale"):
        table.add_column(header, justify="right", no_wrap=True)
    for replicas in counts[:MAX_ROWS]:
        choice = batch_choice(spec.bounds, replicas)
        table.add_row(
            str(replicas),
            _range(choice.local_bsz[0], choice.local_bsz[-1]),
            str(choice.accumulation),
            _range(choice[0].global_bsz, _largest(choice)),
            trimmed(_largest(choice) / spec.batch_size),
        )
    parts: list[RenderableType] = [table]
    if len(counts) > MAX_ROWS:
        rest = counts[MAX_ROWS:]
        parts.append(Text(f" and {plural(len(rest), 'more count')} up to {rest[-1]}"))
    missing = sorted(set(range(spec.min_replicas, spec.max_replicas + 1)) - set(counts))
    if missing:
        parts.append(Text(f" not valid: {_runs(missing)}", "yellow"))
    return Group(*parts)


def _largest(choice: BatchChoice) -> int:
    return choice[len(choice) - 1].global_bsz


def _range(least: int, most: int) -> str:
    return count(least) if least == most else f"{count(least)} to {count(most)}"


def _runs(numbers: list[int]) -> str:
    """Ascending numbers, those that follow each other as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(_range(run[0], run[-1]) for run in runs)
