"""What a run tells of itself at its beginning and at its end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from adascale_controller.formatting import count, duration, plural
from adascale_controller.job import Job
from adascale_controller.local.control_loop import RunResult
from adascale_controller.local.display import Display
from adascale_controller.local.generations import GenerationSummary
from adascale_controller.local.generations_table import generations_table, repeated_steps, result_text
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.state_dir import StateDir
from adascale_core.checkpoint_manifest import Manifest


def already_done(job: Job, until: int | None, saved: Manifest | None) -> str | None:
    """That there is nothing to do, in words; none if there is."""
    if saved is None:
        return None
    steps = job.spec.scale_invariant_steps
    if saved.finished and (steps is None or saved.progress >= steps):
        result = f": {result_text(saved.result)}" if saved.result else ""
        return (
            f"{job.short_id} has finished already, at progress {count(saved.progress)}{result}. "
            "To go on, raise spec.scaleInvariantSteps; to begin anew, give --fresh"
        )
    if until is not None and saved.progress >= until:
        return f"{job.short_id} is at progress {count(saved.progress)} already; --until is {until}"
    return None


def introduce(
    display: Display,
    job: Job,
    url: str,
    folder: StateDir,
    capacity: int,
    program: LocalCommand,
    saved: Manifest | None,
) -> None:
    """Tell what runs, where it is found, and from where it goes on."""
    spec = job.spec
    batch = f"batch {spec.batch_size}" + (f" to {spec.max_batch_size}" if spec.max_batch_size else "")
    fewest = f"{spec.min_replicas} to " if spec.min_replicas < capacity else ""
    steps = f", {plural(spec.scale_invariant_steps, 'step')}" if spec.scale_invariant_steps else ""
    display.note(f"{job.short_id}: {batch} on {fewest}{plural(capacity, 'replica')}{steps}", "bold")
    display.note(f"service  curl {url}/jobs/{job.short_id}/gain")
    display.note(f"state    {folder.path}")
    display.note(f"output   {folder.replica_log(0)}")
    for setting in program.ignored:
        display.note(f"Ignored on this machine: {setting}", "yellow")
    if saved is not None:
        display.note(f"Going on from step {count(saved.step)}, progress {count(saved.progress)}")


def conclude(
    display: Display,
    ending: RunResult,
    generations: Sequence[GenerationSummary],
    saved: Manifest | None,
    seconds: float,
) -> None:
    """Tell what each generation came to, and what the job has come to.

    Args:
        display: what the user sees.
        ending: why the run ends.
        generations: those of the job.
        saved: its newest checkpoint, if there is one.
        seconds: how long the run took.
    """
    if generations:
        display.show(Text())
        display.show(generations_table(generations))
        repeated = repeated_steps(generations)
        if repeated is not None:
            display.show(Text(f" {repeated}", "dim"))
        display.show(Text())
    if ending.log:
        display.show(Text(f"\nThe last lines of its output:\n{ending.log}\n", "dim"))
    if ending.finished:
        progress = f" at progress {count(saved.progress)}" if saved else ""
        result = f": {result_text(saved.result)}" if saved and saved.result else ""
        display.note(f"Finished{progress} in {duration(seconds)}{result}", "bold green")
    elif saved is None:
        display.note("Nothing was saved yet; the same command begins anew")
    else:
        display.note(
            f"Saved at step {count(saved.step)}, progress {count(saved.progress)}; "
            "the same command goes on from there",
            "bold",
        )
