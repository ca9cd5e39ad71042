"""The settings of a trainer: the program's arguments, overridden by the job's environment variables.

The controller plans with the job file. A program that trained with other batch sizes would get replica
counts that do not fit them, so the job file takes precedence. A difference that changes the result is
reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from adascale_core.batch.plans import BatchBounds
from adascale_core.errors import InvalidJobError
from adascale_core.names import DEFAULT_CHECKPOINT_INTERVAL, DEFAULT_EFFICIENCY_TARGET
from adascale_worker.process.environment import JobSettings

DEFAULT_MAX_NONFINITE_STEPS = 10


@dataclass(frozen=True)
class TrainerSettings:
    """The settings that a trainer uses; `ElasticTrainer` documents each of them."""

    bounds: BatchBounds
    efficiency_target: float
    scale_invariant_steps: int | None
    epochs: int | None
    checkpoint_dir: str | Path | None
    checkpoint_interval: float
    max_nonfinite_steps: int = DEFAULT_MAX_NONFINITE_STEPS


def describe_differences(program: JobSettings, job: JobSettings) -> list[str]:
    """Return a description of each argument that the job overrides, if that changes the result of training.

    Other bounds change only how fast a job trains: the gain makes up for the batch sizes that it uses.

    Args:
        program: the program's arguments.
        job: the settings from the environment.
    """
    used = "the job's setting is used"
    differences = [
        f"the program sets {name} to {argument}, the job sets it to {setting}; {used}"
        for name in ("batch_size", "scale_invariant_steps")
        for argument, setting in [(getattr(program, name), getattr(job, name))]
        if None not in (argument, setting) and argument != setting
    ]
    if program.epochs is not None and job.scale_invariant_steps is not None:
        differences.append(
            f"the program sets epochs to {program.epochs}, the job sets scale_invariant_steps to "
            f"{job.scale_invariant_steps}; {used}"
        )
    return differences


def resolve_settings(program: JobSettings, job: JobSettings) -> TrainerSettings:
    """Return the settings to use.

    The batch size and its bounds are taken together: all from the job if it sets `batch_size`, otherwise
    all from the program.

    Args:
        program: the program's arguments.
        job: the settings from the environment.

    Raises:
        InvalidJobError: neither sets a batch size, the bounds contradict each other, or an argument of the
            program is out of range.
    """
    sizes = job if job.batch_size is not None else program
    if sizes.batch_size is None:
        raise InvalidJobError(
            "batch_size is not set: pass ElasticTrainer(batch_size=...), the batch size that the learning "
            "rate was tuned for, or run the program as an AdaScaleJob"
        )
    check_arguments(program)
    nonfinite = program.max_nonfinite_steps
    interval = job.checkpoint_interval if job.checkpoint_interval is not None else program.checkpoint_interval
    return TrainerSettings(
        bounds=BatchBounds(
            sizes.batch_size,
            sizes.max_batch_size,
            sizes.local_bsz_bounds,
            job.elastic_single_replica,
            job.local_bsz_limit,
        ),
        efficiency_target=job.efficiency_target or program.efficiency_target or DEFAULT_EFFICIENCY_TARGET,
        scale_invariant_steps=job.scale_invariant_steps or program.scale_invariant_steps,
        epochs=program.epochs,
        checkpoint_dir=job.checkpoint_dir or program.checkpoint_dir,
        checkpoint_interval=DEFAULT_CHECKPOINT_INTERVAL if interval is None else interval,
        max_nonfinite_steps=DEFAULT_MAX_NONFINITE_STEPS if nonfinite is None else nonfinite,
    )


def check_arguments(program: JobSettings) -> None:
    """Check the arguments that a program may pass with any type. `BatchBounds` checks the others.

    Raises:
        InvalidJobError: one is out of range.
    """
    target: object = program.efficiency_target
    interval: object = program.checkpoint_interval
    folder: object = program.checkpoint_dir
    for name in ("scale_invariant_steps", "epochs", "max_nonfinite_steps"):
        value = getattr(program, name)
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidJobError(f"{name} must be an integer of at least 1, got {value!r}")
    if target is not None and not (isinstance(target, float | int) and 0 < target <= 1):
        raise InvalidJobError(f"efficiency_target must be a number above 0 and at most 1, got {target!r}")
    if interval is not None and not (isinstance(interval, float | int) and interval >= 0):
        raise InvalidJobError(
            f"checkpoint_interval must be a number of seconds, at least 0, got {interval!r}"
        )
    if folder is not None and not isinstance(folder, str | PathLike):
        raise InvalidJobError(f"checkpoint_dir must be a folder or a URL, got {folder!r}")
