"""Which steps are measured.

The moving average covers about 1 / (1 - smoothing) steps. As long as many measured steps fall into that
window, leaving out the others changes the estimates by less than their own noise (`bench/accuracy` shows it).
"""

from dataclasses import dataclass

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
    compares_steps: bool = True  # whether steps with one gradient are compared at all

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
