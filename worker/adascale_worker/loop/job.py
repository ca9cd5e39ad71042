"""The job that is trained: its settings, which a generation may change, and how far it is from its end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace

from adascale_worker.batches.feed import DataFeed
from adascale_worker.errors import WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process import environment
from adascale_worker.process.environment import TrainerSettings, resolve_settings
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.state.store import CheckpointInfo


class Job:
    """The settings of a job, and its end."""

    def __init__(
        self,
        arguments: environment.JobSettings,
        settings: TrainerSettings,
        progress: TrainingProgress,
        group: ReplicaGroup,
        incarnation: int,
    ) -> None:
        self.arguments = arguments
        """Those of the program."""
        self.settings = settings
        """Those that are used now."""
        self._progress = progress
        self._group = group
        self._incarnation = incarnation

    def set_epochs(self, epochs: int) -> None:
        """Finish training after this number of epochs, which the program sets later than other arguments."""
        self.arguments = replace(self.arguments, epochs=epochs)
        self.settings = replace(self.settings, epochs=epochs)

    def adopt(self, environ: Mapping[str, str | None]) -> None:
        """Use the settings of a generation: the bounds of the job may have changed."""
        environment.apply_settings(os.environ, environ)
        batch_size = self.settings.bounds.batch_size
        settings = resolve_settings(self.arguments, environment.read_job_settings(os.environ))
        if settings.bounds.batch_size != batch_size and self._progress.step > 0:
            raise WorkerError(
                f"batch_size has changed from {batch_size} to {settings.bounds.batch_size}, but progress "
                f"counts steps at batch_size: set it back to {batch_size}, or start from scratch"
            )
        counts_samples = settings.train_samples is not None
        if self._progress.step == 0:
            self._progress.counts_samples = counts_samples
        elif self._progress.counts_samples != counts_samples:
            raise WorkerError(
                f"train_samples was {self.settings.train_samples} and is now {settings.train_samples}, but "
                "progress counts samples with it, and gains without: set it as before, to any number, or "
                "start from scratch"
            )
        self.settings = settings

    def limit_local_bsz(self, limit: int | None) -> None:
        """Let no local batch have more than `limit` samples, because a larger one does not fit."""
        self.settings = replace(self.settings, bounds=self.settings.bounds.with_limit(limit))

    @property
    def finished(self) -> bool:
        """Whether the program has finished training, or all requested steps or epochs are done."""
        settings, progress = self.settings, self._progress
        if progress.finish_reason is not None:
            return True
        if settings.train_samples is not None:
            # The steps are rounded up, and a larger batch may end between two of them.
            return self._samples >= settings.train_samples
        if settings.scale_invariant_steps is not None:
            return progress.progress >= settings.scale_invariant_steps
        return settings.epochs is not None and progress.epoch >= settings.epochs

    @property
    def _samples(self) -> int:
        """The samples so far, if progress counts samples."""
        return round(self._progress.progress * self.settings.bounds.batch_size)

    @property
    def unfinished(self) -> str | None:
        """How far training is from its end, for a message; None if it is finished or has no required end."""
        settings, progress = self.settings, self._progress
        if self.finished:
            return None
        if settings.scale_invariant_steps is not None:
            steps = settings.scale_invariant_steps
            if settings.train_samples is not None:
                return f"{self._samples:,} of {settings.train_samples:,} samples"
            return f"progress {progress.progress:,.0f} of {steps:,} scale-invariant steps"
        if settings.epochs is not None:
            return f"epoch {progress.epoch} of {settings.epochs}"
        return None

    def target(self, feed: DataFeed) -> float | None:
        """Return the progress at which training ends with a data set; None if it is unknown.

        It is unknown if the program decides, or after epochs of a stream whose first pass has not ended.
        """
        settings = self.settings
        if settings.scale_invariant_steps is not None or settings.epochs is None:
            return settings.scale_invariant_steps
        target = feed.progress_at(settings.epochs)
        return target if math.isfinite(target) else None

    def checkpoint_info(self) -> CheckpointInfo:
        """Return the description of a checkpoint of the present state."""
        progress = self._progress
        return CheckpointInfo(
            step=progress.step,
            progress=progress.progress,
            epoch=progress.epoch,
            replicas=self._group.replicas,
            generation=self._group.generation,
            finished=self.finished,
            saved_at=time.time(),
            incarnation=self._incarnation,
            finish_reason=progress.finish_reason or "",
        )
