"""The request of a program on several replicas to end training, by `ElasticTrainer.finish`."""

from __future__ import annotations

from adascale_worker.errors import WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.user_code import calling_line
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.state.saving import StateSaving

FINISH = "finish"
"""The event that a replica announces when it has called `finish`."""
FINISH_TIMEOUT = 30.0
"""Seconds that a replica which has called `finish` and ends waits for the others to call it."""


class FinishRequest:
    """What this replica has requested. Training ends after the next step for which the replicas agree."""

    def __init__(self, progress: TrainingProgress, group: ReplicaGroup, saving: StateSaving) -> None:
        self._progress = progress
        self._group = group
        self._saving = saving
        self._line = ""
        self.reason: str | None = None

    def make(self, reason: str) -> None:
        """Request the end of training."""
        self._saving.require_finite_weights()
        self.reason, self._line = reason, calling_line()
        self._group.announce(FINISH)
        self.save()

    def save(self) -> None:
        """Save the end of training on rank 0, because the program may end before the next step."""
        progress = self._progress
        progress.finish_reason = self.reason
        self._saving.save_on_rank_0()
        progress.finish_reason = None

    def agree(self) -> None:
        """Finish training on all replicas, for the reason of one of them. A collective call."""
        reasons = self._group.gather(self.reason)
        self._progress.finish_reason = next(reason for reason in reasons if reason is not None)

    def end_alone(self) -> WorkerError | None:
        """Return an error if another replica has not called `finish`, and still trains."""
        group = self._group
        missing = group.missing(FINISH, FINISH_TIMEOUT)
        if not missing:
            return None
        # In place of the checkpoint of `finish`, which says that training is finished.
        self._saving.save_on_rank_0()
        return WorkerError(
            f"rank {group.rank} called trainer.finish ({self._line}) and left its loop, but rank "
            f"{', '.join(map(str, missing))} did not call it. After trainer.finish(reason) on some of the "
            "replicas, continue the loop: trainer.finished becomes true and trainer.dataloader ends on all "
            "of them after the same step. To leave the loop at once, call trainer.finish on all replicas"
        )
