"""The settings of a trainer: the program's arguments, overridden by the job's environment variables.

The controller plans with the job file. A program that trained with other batch sizes would get replica
counts that do not fit them, so the job file takes precedence. A difference that changes the result is
reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import get_args

from adascale_core.batch.plans import BatchBounds, EfficiencyBound
from adascale_core.errors import InvalidJobError
from adascale_core.messages.job_spec import steps_of
from adascale_core.names import DEFAULT_CHECKPOINT_INTERVAL
from adascale_worker.process.environment import JobSettings, SingleReplicaGain

DEFAULT_MAX_NONFINITE_STEPS = 10
ENDS = ("scale_invariant_steps", "train_samples")
"""The settings that end training, of which a job or a program has at most one."""


@dataclass(frozen=True)
class TrainerSettings:
    """The settings that a trainer uses; `ElasticTrainer` documents each of them.

    With `train_samples`, `scale_invariant_steps` are those in which so many samples are trained.
    """

    bounds: BatchBounds
    efficiency: EfficiencyBound
    scale_invariant_steps: int | None
    epochs: int | None
    checkpoint_dir: str | Path | None
    checkpoint_interval: float
    max_nonfinite_steps: int = DEFAULT_MAX_NONFINITE_STEPS
    single_replica_gain: SingleReplicaGain = "divided"
    train_samples: int | None = None
    max_gain: float | None = None


def describe_differences(program: JobSettings, job: JobSettings) -> list[str]:
    """Return a description of each argument that the job overrides, if that changes the result of training.

    Other bounds change only how fast a job trains: the gain makes up for the batch sizes that it uses.
    """
    used = "the job's setting is used"
    differences = [
        f"the program sets {name} to {argument}, the job sets it to {setting}; {used}"
        for name in ("batch_size", *ENDS)
        for argument, setting in [(getattr(program, name), getattr(job, name))]
        if None not in (argument, setting) and argument != setting
    ]
    differences += [
        f"the program sets {name} to {argument}, the job sets {end} to {getattr(job, end)}; {used}"
        for end in ENDS
        for name in (*ENDS, "epochs")
        for argument in [getattr(program, name)]
        if name != end and None not in (argument, getattr(job, end))
    ]
    return differences


def resolve_settings(program: JobSettings, job: JobSettings) -> TrainerSettings:
    """Return the settings to use.

    The batch size and its bounds are taken together: all from the job if it sets `batch_size`, otherwise
    all from the program.
    """
    sizes = job if job.batch_size is not None else program
    if sizes.batch_size is None:
        raise InvalidJobError(
            "batch_size is not set: pass ElasticTrainer(batch_size=...), the batch size that the learning "
            "rate was tuned for, or run the program as an AdaScaleJob"
        )
    check_arguments(program)
    for source in (program, job):
        if None not in (steps := source.scale_invariant_steps, source.train_samples):
            raise InvalidJobError(
                f"scale_invariant_steps ({steps}) and train_samples ({source.train_samples}) are both set, "
                "but training has one end: leave out one of them"
            )
    steps, samples = next(
        (
            end
            for end in ((each.scale_invariant_steps, each.train_samples) for each in (job, program))
            if any(end)
        ),
        (None, None),
    )
    if samples is not None:
        steps = steps_of(samples, sizes.batch_size)
    nonfinite = program.max_nonfinite_steps
    interval = job.checkpoint_interval if job.checkpoint_interval is not None else program.checkpoint_interval
    return TrainerSettings(
        bounds=BatchBounds(
            sizes.batch_size,
            sizes.max_batch_size,
            sizes.local_bsz_bounds,
            job.elastic_single_replica,
            job.local_bsz_limit,
            job.processes_per_replica or 1,
        ),
        efficiency=EfficiencyBound(job.efficiency_target or program.efficiency_target, samples is not None),
        scale_invariant_steps=steps,
        train_samples=samples,
        epochs=program.epochs,
        checkpoint_dir=job.checkpoint_dir or program.checkpoint_dir,
        checkpoint_interval=DEFAULT_CHECKPOINT_INTERVAL if interval is None else interval,
        max_nonfinite_steps=DEFAULT_MAX_NONFINITE_STEPS if nonfinite is None else nonfinite,
        single_replica_gain=program.single_replica_gain or "divided",
        max_gain=program.max_gain,
    )


def check_arguments(program: JobSettings) -> None:
    """Check the arguments that a program may pass with any type. `BatchBounds` checks the others."""
    target: object = program.efficiency_target
    limit: object = program.max_gain
    interval: object = program.checkpoint_interval
    folder: object = program.checkpoint_dir
    for name in (*ENDS, "epochs", "max_nonfinite_steps"):
        value = getattr(program, name)
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidJobError(f"{name} must be an integer of at least 1, got {value!r}")
    if target is not None and not (isinstance(target, float | int) and 0 < target <= 1):
        raise InvalidJobError(f"efficiency_target must be a number above 0 and at most 1, got {target!r}")
    if limit is not None and not (isinstance(limit, float | int) and 1 < limit < math.inf):
        raise InvalidJobError(f"max_gain must be a finite number above 1, got {limit!r}")
    if interval is not None and not (isinstance(interval, float | int) and interval >= 0):
        raise InvalidJobError(
            f"checkpoint_interval must be a number of seconds, at least 0, got {interval!r}"
        )
    allowed = get_args(SingleReplicaGain)
    if program.single_replica_gain not in (None, *allowed):
        names = " or ".join(map(repr, allowed))
        raise InvalidJobError(f"single_replica_gain must be {names}, got {program.single_replica_gain!r}")
    if folder is not None and not isinstance(folder, str | PathLike):
        raise InvalidJobError(f"checkpoint_dir must be a folder or a URL, got {folder!r}")
