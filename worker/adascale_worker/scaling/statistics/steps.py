"""How a step is made of backward passes and replicas, and which steps are measured.

The moving average covers about 1 / (1 - smoothing) steps. As long as many measured steps fall into that
window, leaving out the others changes the estimates by less than their own noise (`bench/accuracy` shows it).
"""

from dataclasses import dataclass

from adascale_core.batch.gain import default_smoothing, require_max_gain, require_scale, require_smoothing
from adascale_worker.scaling.statistics.all_reduce import Shards


@dataclass(frozen=True, slots=True)
class GainOptions:
    """How a step is made, and how the gain is estimated from its gradients."""

    world_size: int
    accumulation: int
    scale: float
    is_scaled_loss: bool  # whether each loss is divided by `accumulation`
    # the number of steps for which the measurement of this step stands, if the training loop has chosen
    # to measure it. 0: `sampling_interval` chooses.
    interval: int = 0
    chosen_smoothing: float | None = None  # weight of the past in the moving average; None follows the scale
    sample_every: int | None = None  # the interval between measured steps; None for the default
    # whether the pairs of consecutive steps that are compared have no step in common
    disjoint_pairs: bool = False
    compares_steps: bool = True  # whether consecutive steps are compared at all
    debias: bool = True
    observes_backward: bool = True  # whether hooks read the gradients; if not, the caller passes them
    shards: Shards | None = None  # set if each process of a replica has shards of the gradients
    max_gain: float | None = None  # the limit of all gains, as of `GradientEstimate.limited`

    @property
    def micro_gradients(self) -> int:
        """n: the number of gradients that a step is the mean of."""
        return self.world_size * self.accumulation

    @property
    def smoothing(self) -> float:
        """Weight of the past in the moving average."""
        return default_smoothing(self.scale) if self.chosen_smoothing is None else self.chosen_smoothing


def require_valid(options: GainOptions) -> None:
    """Raise ValueError if a number is out of range."""
    require_count("world_size", options.world_size)
    require_count("num_gradients_to_accumulate", options.accumulation)
    require_scale(options.scale)
    if options.chosen_smoothing is not None:
        require_smoothing(options.chosen_smoothing)
    if options.sample_every is not None and options.sample_every < 1:
        raise ValueError(
            f"got sample_every={options.sample_every}; it must be at least 1, or None for the default"
        )
    if options.max_gain is not None:
        require_max_gain(options.max_gain)


def require_count(name: str, value: int) -> None:
    """Raise ValueError unless `value` is an integer, at least 1."""
    if value != int(value) or value < 1:
        raise ValueError(f"got {name}={value}; it must be an integer, at least 1")


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The weights of the micro-batches of a step, by which their losses are multiplied."""

    # the sum over all ranks, divided by the number of ranks. The sum over the backward passes of the
    # averaged gradients is divided by it, in place of the accumulation count.
    divisor: float
    positive: int  # how many are above 0, on all ranks


FIRST_STEPS = 100
"""Number of steps at the start that are all measured, so that the gain is estimated soon."""

MAX_INTERVAL = 16
"""Largest interval between measured steps."""

SAMPLES_PER_WINDOW = 16
"""Smallest number of measured steps within the window of the moving average."""


def sampling_interval(step: int, smoothing: float) -> int:
    """Return the number of steps from one measured step to the next at `step`, counted from 0."""
    if step < FIRST_STEPS:
        return 1
    # Rounded so that the last bits of 1 - 0.984 do not decide whether the window is 62.5 steps.
    window = round(1.0 / (1.0 - smoothing), 6)
    return int(min(max(window / SAMPLES_PER_WINDOW, 1), MAX_INTERVAL))
