"""How a step is made of backward passes and replicas, and which steps are measured.

The moving average covers about 1 / (1 - smoothing) steps. As long as many measured steps fall into that
window, leaving out the others changes the estimates by less than their own noise (`bench/accuracy` shows it).
"""

from dataclasses import dataclass

from adascale_worker.scaling.statistics.all_reduce import Shards


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How a step is made."""

    world_size: int
    accumulation: int
    scale: float
    is_scaled_loss: bool  # whether each loss is divided by `accumulation`
    # the number of steps for which the measurement of this step stands, if the training loop has chosen
    # to measure it. 0: `Sampling` chooses.
    interval: int = 0

    @property
    def micro_gradients(self) -> int:
        """n: the number of gradients that a step is the mean of."""
        return self.world_size * self.accumulation


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
"""Largest interval between measured steps; it bounds the delay of flags, which only measured steps
exchange."""

SAMPLES_PER_WINDOW = 16
"""Smallest number of measured steps within the window of the moving average."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rule that selects the measured steps, the same on all ranks."""

    # the interval between measured steps; 1 measures every step. None for the default: all of the first
    # steps, then as few as the window allows.
    every: int | None = None
    # whether the pairs of consecutive steps that are compared have no step in common
    disjoint_pairs: bool = False
    compares_steps: bool = True  # whether consecutive steps are compared at all

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"got sample_every={self.every}; it must be at least 1, or None for the default")

    def interval(self, step: int, smoothing: float) -> int:
        """Return the number of steps from one measured step to the next at `step`, counted from 0."""
        if self.every is not None:
            return self.every
        if step < FIRST_STEPS:
            return 1
        # Rounded so that the last bits of 1 - 0.984 do not decide whether the window is 62.5 steps.
        window = round(1.0 / (1.0 - smoothing), 6)
        return int(min(max(window / SAMPLES_PER_WINDOW, 1), MAX_INTERVAL))

    def is_measured(self, step: int, smoothing: float) -> bool:
        """Whether `step`, counted from 0, is measured."""
        return step % self.interval(step, smoothing) == 0

    def pair_interval(self, step: int, smoothing: float) -> int:
        """Return the number of steps from one comparison of two consecutive steps to the next at `step`."""
        return max(self.interval(step, smoothing), 2 if self.disjoint_pairs else 1)

    def is_in_measured_pair(self, step: int, smoothing: float) -> bool:
        """Whether `step` is the first or the second of two consecutive steps that are compared."""
        return self.compares_steps and step % self.pair_interval(step, smoothing) <= 1

    def begins_pair(self, step: int, smoothing: float) -> bool:
        """Whether `step` is the first of two consecutive steps that are compared."""
        return self.compares_steps and step % self.pair_interval(step, smoothing) == 0

    def longer_smoothing(self, step: int, smoothing: float) -> float:
        """Return the smoothing for steps that the training loop chooses, which are few.

        Their window is that of `smoothing`, or a quarter of the steps so far if that is longer.
        """
        return max(smoothing, 1.0 - 4.0 / max(step, 4))


@dataclass(frozen=True, slots=True)
class GainOptions:
    """The options of the estimates."""

    settings: StepSettings
    smoothing: float | None  # weight of the past in the moving average; None follows the scale
    sampling: Sampling
    debias: bool
    observes_backward: bool = True  # whether hooks read the gradients; if not, the caller passes them
    shards: Shards | None = None  # set if each process of a replica has shards of the gradients
    max_gain: float | None = None  # the limit of all gains, as of `GradientEstimate.limited`
