"""The parts of a trainer, made once and shared by the modules that use them together."""

from __future__ import annotations

from dataclasses import dataclass

from adascale_worker.batches.feed import DataFeed
from adascale_worker.batches.planning import BatchPlanner
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.settings import TrainerSettings
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.reporting.telemetry import Telemetry
from adascale_worker.state.checkpoints.checkpointing import Checkpointing


@dataclass
class TrainerComponents:
    """The parts of a trainer.

    Args:
        incarnation: creation time of the job, in seconds since 1970; 0 if unknown.
        settings: the resolved settings; a new generation may change them.
        group: the replicas of this generation.
        planner: holds the batch plan.
        progress: the progress of training.
        feed: the training data.
        telemetry: measures, and reports to the metrics service.
        checkpointing: saves and restores checkpoints.
    """

    incarnation: int
    settings: TrainerSettings
    group: ReplicaGroup
    planner: BatchPlanner
    progress: TrainingProgress
    feed: DataFeed
    telemetry: Telemetry
    checkpointing: Checkpointing

    @property
    def generation(self) -> int:
        """The generation that the trainer runs in; 0 without an agent."""
        return self.group.generation

    @property
    def finished(self) -> bool:
        """Whether the program has finished training, or all requested steps or epochs are done."""
        settings, progress = self.settings, self.progress
        if progress.finish_reason is not None:
            return True
        if settings.scale_invariant_steps is not None:
            return progress.progress >= settings.scale_invariant_steps
        return settings.epochs is not None and progress.epoch >= settings.epochs

    @property
    def target(self) -> float | None:
        """The progress at which training ends with the present data set; None if the program decides."""
        settings = self.settings
        if settings.scale_invariant_steps is not None or settings.epochs is None:
            return settings.scale_invariant_steps
        return self.feed.progress_at(settings.epochs)

    @property
    def unfinished(self) -> str | None:
        """How far training is from its end, for a message; None if it is finished or has no required end."""
        settings, progress = self.settings, self.progress
        if self.finished:
            return None
        if settings.scale_invariant_steps is not None:
            steps = settings.scale_invariant_steps
            return f"progress {progress.progress:,.0f} of {steps:,} scale-invariant steps"
        if settings.epochs is not None:
            return f"epoch {progress.epoch} of {settings.epochs}"
        return None
