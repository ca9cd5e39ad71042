"""How far training has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass
class TrainingProgress:
    """How far training has come.

    Args:
        step: optimizer steps made.
        progress: sum of gains, in steps at `batch_size`.
        epoch: the epoch being trained, from 0.
        consumed: samples of the stream that were taken, all replicas together.
    """

    step: int = 0
    progress: float = 0.0
    epoch: int = 0
    consumed: int = 0

    def advance(self, gain: float, consumed: int) -> None:
        """A step worth `gain` was made; `consumed` samples of the stream were taken by then."""
        self.step += 1
        self.progress += gain
        self.consumed = consumed

    def state_dict(self) -> dict[str, int | float]:
        """The position in plain numbers."""
        return dict(vars(self))

    @classmethod
    def from_state_dict(cls, state: dict[str, int | float]) -> Self:
        """The position that was saved."""
        return cls(int(state["step"]), float(state["progress"]), int(state["epoch"]), int(state["consumed"]))
