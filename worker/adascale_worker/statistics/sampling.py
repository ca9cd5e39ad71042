"""Which steps are measured.

The moving average looks back over 1 / (1 - theta) steps. As long as many samples fall into that window,
leaving steps out changes the estimates by less than their own noise (`bench/accuracy` shows it).
"""

from dataclasses import dataclass

FIRST_STEPS = 100
"""Steps that are all measured: from a new start the gain must be known soon."""

MAX_APART = 16
"""Most steps from one sample to the next: bounds how late a flag is heard."""

SAMPLES_PER_WINDOW = 16
"""Fewest samples within the window of the moving average."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rule by which all ranks choose the same steps.

    Attributes:
        every: None for the default (all of the first steps, then as seldom as the window allows), or a
            number k of steps from one sample to the next; 1 measures every step.
    """

    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"got sample_every={self.every}; it must be at least 1, or None for the default")

    def distance(self, step: int, smoothing: float) -> int:
        """Return how many steps lie from one sample to the next at `step`, counted from 0."""
        if self.every is not None:
            return self.every
        if step < FIRST_STEPS:
            return 1
        # Rounded before it is cut: 1 / (1 - 0.984) must be 62.5 whatever its last bits.
        window = round(1.0 / (1.0 - smoothing), 6)
        return int(min(max(window / SAMPLES_PER_WINDOW, 1), MAX_APART))

    def measures(self, step: int, smoothing: float) -> bool:
        """Whether `step`, counted from 0, is measured."""
        return step % self.distance(step, smoothing) == 0

    def measures_pair(self, step: int, smoothing: float) -> bool:
        """Whether `step` is one of two consecutive ones whose difference is measured."""
        return step % self.distance(step, smoothing) <= 1
