"""The progress of training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrainingProgress:
    """The progress of training since the job began.

    Args:
        step: number of optimizer steps.
        progress: sum of the gains, in scale-invariant steps (steps at `batch_size`).
        epoch: current epoch, from 0.
        consumed: samples of the stream consumed by all replicas together.
    """

    step: int = 0
    progress: float = 0.0
    epoch: int = 0
    consumed: int = 0

    def advance(self, gain: float, consumed: int) -> None:
        """Count one optimizer step.

        Args:
            gain: scale-invariant steps that the step is worth.
            consumed: samples of the stream consumed so far, this step included.
        """
        self.step += 1
        self.progress += gain
        self.consumed = consumed

    def state_dict(self) -> dict[str, int | float]:
        """Return the progress as plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Restore a saved progress."""
        self.step = int(state["step"])
        self.progress = float(state["progress"])
        self.epoch = int(state["epoch"])
        self.consumed = int(state["consumed"])
