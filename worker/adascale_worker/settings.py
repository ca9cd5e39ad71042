"""What a trainer works with: the program's arguments, overruled by what the controller says of the job.

The controller plans with the job file; a program that trained with other sizes would get replica counts
that do not fit it. So the job file wins, and a difference is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adascale_core.batch import BatchBounds
from adascale_core.errors import InvalidJobError
from adascale_core.names import DEFAULT_CHECKPOINT_INTERVAL, DEFAULT_EFFICIENCY_TARGET
from adascale_worker.environment import JobEnvironment


@dataclass(frozen=True)
class Settings:
    """The settings of a trainer (see `ElasticTrainer`)."""

    bounds: BatchBounds
    efficiency_target: float
    scale_invariant_steps: int | None
    checkpoint_dir: Path | None
    checkpoint_interval: float


def settle(asked: JobEnvironment, told: JobEnvironment) -> tuple[Settings, list[str]]:
    """The settings, and where the program asked for something else than the job says, in words.

    Args:
        asked: the program's arguments.
        told: what the controller says.

    Raises:
        InvalidJobError: neither says a batch size, or the bounds contradict themselves.
    """
    differences = []
    for name in ("batch_size", "max_batch_size", "local_bsz_bounds", "scale_invariant_steps"):
        wish, word = getattr(asked, name), getattr(told, name)
        overruled = word is not None or (told.batch_size is not None and name in _BOUNDS)
        if wish is not None and overruled and wish != word:
            differences.append(
                f"the program asks for {name} {wish}, the job says {'none' if word is None else word}"
            )
    # Bounds go together: those of the job, or those of the program.
    sizes = told if told.batch_size is not None else asked
    if sizes.batch_size is None:
        raise InvalidJobError(
            "no batch size is given: pass ElasticTrainer(batch_size=...), the batch size that the learning "
            "rate was tuned for, or run the program by an AdaScaleJob"
        )
    bounds = BatchBounds(sizes.batch_size, sizes.max_batch_size, sizes.local_bsz_bounds)
    steps = told.scale_invariant_steps or asked.scale_invariant_steps
    interval = told.checkpoint_interval if told.checkpoint_interval is not None else asked.checkpoint_interval
    settings = Settings(
        bounds=bounds,
        efficiency_target=told.efficiency_target or asked.efficiency_target or DEFAULT_EFFICIENCY_TARGET,
        scale_invariant_steps=steps,
        checkpoint_dir=told.checkpoint_dir or asked.checkpoint_dir,
        checkpoint_interval=DEFAULT_CHECKPOINT_INTERVAL if interval is None else interval,
    )
    return settings, differences


_BOUNDS = ("max_batch_size", "local_bsz_bounds")
