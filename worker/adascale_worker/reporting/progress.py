"""The progress of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adascale_worker.errors import UnusableCheckpointError


@dataclass
class TrainingProgress:
    """The progress of training since the job began."""

    step: int = 0
    progress: float = 0.0  # sum of the gains, or the samples over `batch_size`; both in steps at `batch_size`
    epoch: int = 0  # current epoch, from 0
    consumed: int = 0  # samples of the stream consumed by all replicas together
    # progress at which training ends; None if the program decides, or before the length of the data set
    # is known
    target: float | None = None
    finish_reason: str | None = None  # the argument of `ElasticTrainer.finish`; None if it was not called
    # whether a step adds its scale to the progress, and not its gain, because the job has `train_samples`
    counts_samples: bool = False

    def advance(self, gain: float, samples: int, batch_size: int, consumed: int) -> None:
        """Count one optimizer step."""
        self.step += 1
        if self.counts_samples:
            # From whole numbers, so that no error adds up.
            self.progress = (round(self.progress * batch_size) + samples) / batch_size
        else:
            self.progress += gain
        self.consumed = consumed

    def state_dict(self) -> dict[str, int | float | str | None]:
        """Return the progress as plain values."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved progress."""
        # Earlier versions have counted gains alone.
        saved = bool(state.get("counts_samples", False))
        if saved != self.counts_samples:
            raise UnusableCheckpointError(
                f"the checkpoint counts progress in {_unit(saved)}, but the job now in "
                f"{_unit(self.counts_samples)}: {'set' if saved else 'leave out'} train_samples "
                "(trainSamples in the job file) as before, or start from scratch (adascale run --fresh, or "
                "another checkpoint folder)"
            )
        self.step = int(state["step"])
        self.progress = float(state["progress"])
        self.epoch = int(state["epoch"])
        self.consumed = int(state["consumed"])
        self.target = state["target"]
        self.finish_reason = state["finish_reason"]


def _unit(counts_samples: bool) -> str:
    return "samples" if counts_samples else "gains"
