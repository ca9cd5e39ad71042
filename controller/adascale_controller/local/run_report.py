"""What a run prints at its start and at its end, with the table of its generations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import (
    count,
    duration,
    numbers_table,
    percent,
    plural,
    significant,
    trimmed,
)
from adascale_controller.job.reasons import Reason
from adascale_controller.job_overview import describe_size, format_result
from adascale_controller.local.display import Display
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.replica_limit import ReplicaLimit
from adascale_controller.local.replicas import RunResult, output_text
from adascale_controller.local.state_dir import StateDir
from adascale_controller.schema import JobDefinition
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.messages.reports import GainReport
from adascale_core.views.jobs import downtime

Range = tuple[float, float]
"""The lowest and the highest of some values."""


@dataclass(frozen=True)
class GenerationSummary:
    """A generation."""

    generation: int
    replicas: int
    local_bsz: Range  # samples in a micro-batch of one replica
    accumulation: Range  # micro-batches of one replica in a step
    scale: Range
    gain: float  # the mean of a step
    efficiency: float  # the mean of gain divided by scale
    steps: int
    repeated: int  # those of its steps that the previous generation had made and lost
    seconds: float  # from the start of its first step to the end of its last
    # seconds from the last step of the previous generation to its first step; None for the first
    # generation of a job or a run
    downtime: float | None


def summarize_generations(
    reports: Sequence[GainReport], run_starts: Sequence[float] = ()
) -> list[GenerationSummary]:
    """Return a summary of each generation. Between two runs of the job is no downtime and no lost step."""
    ordered = sorted(reports, key=lambda report: (report.generation, report.step))
    groups = [list(group) for _, group in groupby(ordered, key=lambda report: report.generation)]
    previous: list[list[GainReport] | None] = [None, *groups]
    return [_summarize(group, before, run_starts) for before, group in zip(previous, groups, strict=False)]


def _summarize(
    reports: Sequence[GainReport], previous: Sequence[GainReport] | None, run_starts: Sequence[float]
) -> GenerationSummary:
    first, last = reports[0], reports[-1]
    since, repeated = None, 0
    if previous is not None and not any(previous[-1].time < start <= first.time for start in run_starts):
        repeated = max(previous[-1].step + 1 - first.step, 0)
        since = downtime(previous[-1].time, first.time)
    return GenerationSummary(
        generation=first.generation,
        replicas=first.replicas,
        local_bsz=_range([report.local_bsz for report in reports]),
        accumulation=_range([report.accumulation for report in reports]),
        scale=_range([report.scale for report in reports]),
        gain=_mean_gain(reports),
        efficiency=fmean(report.efficiency for report in reports),
        steps=last.step - first.step + 1,
        repeated=repeated,
        seconds=last.time - first.time + first.step_time,
        downtime=since,
    )


def _mean_gain(reports: Sequence[GainReport]) -> float:
    """Return the mean gain of the steps after the first report: progress is the sum of gains."""
    first, last = reports[0], reports[-1]
    if last.step == first.step:
        return last.gain
    return (last.progress - first.progress) / (last.step - first.step)


def generations_table(generations: Sequence[GenerationSummary]) -> Table:
    """Return a table with a row for each generation."""
    columns = {
        "\ngen.": [str(each.generation) for each in generations],
        "\nreplicas": [str(each.replicas) for each in generations],
        "local\nbatch": [_local_batch(each) for each in generations],
        "\nscale": [_format_range(each.scale) for each in generations],
        "\ngain": [significant(each.gain, 2) for each in generations],
        "effi-\nciency": [percent(each.efficiency) for each in generations],
        "\nsteps": [count(each.steps) for each in generations],
        "\nseconds": [f"{each.seconds:.1f}" for each in generations],
        "down-\ntime": ["" if each.downtime is None else f"{each.downtime:.1f} s" for each in generations],
    }
    return numbers_table(columns, padding=(0, 1, 0, 0))


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


def _range(values: Sequence[float]) -> Range:
    return min(values), max(values)


def _format_range(values: Range) -> str:
    low, high = map(trimmed, values)
    return low if low == high else f"{low} to {high}"


def completed_message(job: JobDefinition, until: int | None, checkpoint: Manifest | None) -> str | None:
    """Return a message if the job needs no more training; None if it does."""
    if checkpoint is None:
        return None
    steps = job.declaration.steps
    result = f": {format_result(checkpoint.result)}" if checkpoint.result else ""
    finished = f"{job.short_id} has already finished, at progress {_progress(checkpoint)}{result}"
    if checkpoint.finished and checkpoint.finish_reason:
        return f"{finished}. To start over, use --fresh"
    # A job without steps has as many epochs as its program now requires.
    if checkpoint.finished and steps is not None and checkpoint.progress >= steps:
        field = "scaleInvariantSteps" if job.spec.train_samples is None else "trainSamples"
        return f"{finished}. To continue, raise spec.{field}; to start over, use --fresh"
    if until is not None and checkpoint.progress >= until:
        progress = count(checkpoint.progress)
        return f"{job.short_id} has already reached --until {until}: its progress is {progress}"
    return None


def print_start(
    display: Display,
    job: JobDefinition,
    url: str,
    page: str,
    folder: StateDir,
    limit: ReplicaLimit,
    command: LocalCommand,
    checkpoint: Manifest | None,
) -> None:
    """Print the job's settings, where its page, state and output are, and the step that it resumes at."""
    below = f" (maxReplicas is {job.spec.max_replicas}; {limit.source})" if limit.source else ""
    display.message(f"{job.short_id}: {describe_size(job.declaration, limit.replicas)}{below}", "bold")
    # On a line of its own, which is not wrapped.
    display.message("page")
    display.print(Text(page))
    display.message(f"metrics  curl {url}/jobs/{job.short_id}/gain")
    display.message(f"state    {folder.path}")
    display.message(f"output   {folder.replica_log(0)}")
    if job.spec.spare_replicas:
        reason = "" if limit.spares == job.spec.spare_replicas else ", as many as this machine has room for"
        display.message(f"spares   {limit.spares} of spareReplicas {job.spec.spare_replicas}{reason}")
    for setting in command.ignored:
        display.message(f"Ignored on this machine: {setting}", "yellow")
    if checkpoint is not None and checkpoint.finished and job.declaration.steps is None:
        display.message(
            f"Finished before, at step {count(checkpoint.step)}, progress {_progress(checkpoint)}; "
            "continuing if more is required now"
        )
    elif checkpoint is not None:
        display.message(f"Resuming at step {count(checkpoint.step)}, progress {count(checkpoint.progress)}")


def print_summary(
    display: Display,
    result: RunResult,
    generations: Sequence[GenerationSummary],
    checkpoint: Manifest | None,
    progress: float | None,
    seconds: float,
) -> None:
    """Print a table of the generations, and the result of the job."""
    if generations:
        display.print(Text())
        display.print(generations_table(generations))
        repeated = repeated_steps(generations)
        if repeated is not None:
            display.print(Text(f" {repeated}", "dim"))
        display.print(Text())
    if result.log:
        display.print(output_text(result.log))
    if result.finished:
        # A program without a required end saves nothing when it ends.
        at = f" at progress {count(progress)}" if progress is not None else ""
        if checkpoint is not None and (checkpoint.finished or progress is None):
            at = f" at progress {_progress(checkpoint)}"
        values = f": {format_result(checkpoint.result)}" if checkpoint and checkpoint.result else ""
        display.message(f"Finished{at} in {duration(seconds)}{values}", "bold green")
        if result.comparison:
            display.message(result.comparison)
        display.message("`adascale ui` shows it from now on")
    elif result.end is not None and result.end.reason is Reason.PROGRAM_FAILED:
        display.message("Correct the cause, and run the command again", "bold")
    elif checkpoint is None:
        display.message("No checkpoint was saved; run the same command to start over")
    else:
        # A program that has failed, was killed or could not write has saved nothing at the end of the run.
        has_saved = checkpoint.saved_at >= result.stopped_at
        saved = "Saved at step" if has_saved else "The last checkpoint is of step"
        lost = ""
        if not has_saved and progress is not None and progress > checkpoint.progress:
            lost = f", and the training after it, up to progress {count(progress)}, is lost"
        display.message(
            f"{saved} {count(checkpoint.step)}, progress {count(checkpoint.progress)}{lost}; "
            "run the same command to resume",
            "bold",
        )


def _progress(checkpoint: Manifest) -> str:
    """Return the progress of a checkpoint, and the reason for its end if the program has declared it."""
    reason = f" ({checkpoint.finish_reason})" if checkpoint.finish_reason else ""
    return f"{count(checkpoint.progress)}{reason}"
