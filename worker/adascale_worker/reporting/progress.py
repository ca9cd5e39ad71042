"""The progress of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class TrainingProgress:
    """The progress of training since the job began.

    Args:
        step: number of optimizer steps.
        progress: sum of the gains, in scale-invariant steps (steps at `batch_size`).
        epoch: current epoch, from 0.
        consumed: samples of the stream consumed by all replicas together.
        target: progress at which training ends; None if the program decides, or before the length of the
            data set is known.
        finish_reason: the argument of `ElasticTrainer.finish`; None if it was not called.
    """

    step: int = 0
    progress: float = 0.0
    epoch: int = 0
    consumed: int = 0
    target: float | None = None
    finish_reason: str | None = None

    def advance(self, gain: float, consumed: int) -> None:
        """Count one optimizer step.

        Args:
            gain: scale-invariant steps that the step is worth.
            consumed: samples of the stream consumed so far, this step included.
        """
        self.step += 1
        self.progress += gain
        self.consumed = consumed

    def state_dict(self) -> dict[str, int | float | str | None]:
        """Return the progress as plain values."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved progress."""
        self.step = int(state["step"])
        self.progress = float(state["progress"])
        self.epoch = int(state["epoch"])
        self.consumed = int(state["consumed"])
        self.target = state["target"]
        self.finish_reason = state["finish_reason"]
