"""The progress of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adascale_worker.errors import UnusableCheckpointError


@dataclass
class TrainingProgress:
    """The progress of training since the job began.

    Args:
        step: number of optimizer steps.
        progress: sum of the gains, or the samples over `batch_size`; both in steps at `batch_size`.
        epoch: current epoch, from 0.
        consumed: samples of the stream consumed by all replicas together.
        target: progress at which training ends; None if the program decides, or before the length of the
            data set is known.
        counts_samples: whether a step adds its scale to the progress, and not its gain, because the job has
            `train_samples`.
        finish_reason: the argument of `ElasticTrainer.finish`; None if it was not called.
    """

    step: int = 0
    progress: float = 0.0
    epoch: int = 0
    consumed: int = 0
    target: float | None = None
    finish_reason: str | None = None
    counts_samples: bool = False

    def advance(self, gain: float, samples: int, batch_size: int, consumed: int) -> None:
        """Count one optimizer step.

        Args:
            gain: scale-invariant steps that the step is worth.
            samples: of the step, on all replicas.
            batch_size: the initial batch size.
            consumed: samples of the stream consumed so far, this step included.
        """
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
        """Restore a saved progress.

        Raises:
            UnusableCheckpointError: it counts gains, and this one samples, or the reverse.
        """
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
