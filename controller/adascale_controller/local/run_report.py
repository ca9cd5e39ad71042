"""What a run prints at its start and at its end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from adascale_controller.formatting import count, duration
from adascale_controller.job import Job
from adascale_controller.job_summary import describe_size, format_result
from adascale_controller.local.display import Display
from adascale_controller.local.generations import GenerationSummary
from adascale_controller.local.generations_table import generations_table, repeated_steps
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.replica_limit import ReplicaLimit
from adascale_controller.local.replicas import output_text
from adascale_controller.local.run_result import RunResult
from adascale_controller.local.state_dir import StateDir
from adascale_core.checkpoint_manifest import Manifest


def completed_message(job: Job, until: int | None, checkpoint: Manifest | None) -> str | None:
    """Return a message if the job needs no more training; None if it does."""
    if checkpoint is None:
        return None
    steps = job.spec.steps
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
    job: Job,
    url: str,
    page: str,
    folder: StateDir,
    limit: ReplicaLimit,
    command: LocalCommand,
    checkpoint: Manifest | None,
) -> None:
    """Print the job's settings, where its page, state and output are, and the step that it resumes at."""
    display.message(f"{job.short_id}: {describe_size(job.spec, limit.replicas)}", "bold")
    display.message(f"page     {page}")
    display.message(f"metrics  curl {url}/jobs/{job.short_id}/gain")
    display.message(f"state    {folder.path}")
    display.message(f"output   {folder.replica_log(0)}")
    if job.spare_replicas:
        reason = "" if limit.spares == job.spare_replicas else ", as many as this machine has room for"
        display.message(f"spares   {limit.spares} of spareReplicas {job.spare_replicas}{reason}")
    for setting in command.ignored:
        display.message(f"Ignored on this machine: {setting}", "yellow")
    if checkpoint is not None and checkpoint.finished and job.spec.steps is None:
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
    elif result.permanent:
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
