"""What `adascale validate` shows of a job: its valid replica counts, and what its deadline needs."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from adascale_controller.formatting import count, numbers_table, plural, significant, trimmed
from adascale_controller.job_definition import JobDefinition
from adascale_core.batch.plans import BatchChoice, batch_choice, require_valid_replicas

MAX_ROWS = 64


def render_valid_replicas(job: JobDefinition) -> RenderableType:
    """Return a table of the valid replica counts of a job, with the batches that each may use."""
    spec = job.spec
    counts = require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)
    rows = [(replicas, batch_choice(spec.bounds, replicas)) for replicas in counts[:MAX_ROWS]]
    table = numbers_table(
        {
            "replicas": [str(replicas) for replicas, _ in rows],
            "local batch": [_format_range(each.local_bsz[0], each.local_bsz[-1]) for _, each in rows],
            "accumulation": [str(each.accumulation) for _, each in rows],
            "global batch": [_format_range(each[0].global_bsz, _largest_batch(each)) for _, each in rows],
            "largest scale": [trimmed(_largest_batch(each) / spec.batch_size) for _, each in rows],
        },
        padding=(0, 1),
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


def describe_deadline(job: JobDefinition) -> str | None:
    """Return what the deadline of a job needs, and where to see whether it can be met; None without one."""
    seconds, steps = job.completion_deadline_seconds, job.spec.steps
    if seconds is None:
        return None
    if steps is None:
        need = (
            "can be compared with the end of training once the program reports it: set scaleInvariantSteps "
            "or trainSamples"
        )
    else:
        need = f"needs {significant(steps / seconds)} steps at batchSize per second for {count(steps)} steps"
    return (
        f"completionDeadlineSeconds {count(seconds)} {need}. Whether a replica count meets it is predicted "
        "from step times, of this job or of earlier jobs of its template: see the condition "
        "DeadlineFeasible, or the messages of `adascale run`"
    )
