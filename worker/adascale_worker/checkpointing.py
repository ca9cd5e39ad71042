"""When the state of training is saved, and how the replicas save and restore it together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adascale_core.checkpoint_manifest import Manifest
from adascale_worker.checkpoint import CheckpointFolder, CheckpointInfo
from adascale_worker.errors import CheckpointError
from adascale_worker.process_group import ReplicaGroup

State = dict[str, Any]
MakeState = Callable[[list[State]], State]


class Checkpointing:
    """Saves and restores checkpoints of all replicas together. Rank 0 writes.

    Args:
        directory: the checkpoint folder. None disables checkpoints.
        interval: seconds between two checkpoints.
        group: the replicas of this generation.
    """

    def __init__(self, directory: Path | None, interval: float, group: ReplicaGroup) -> None:
        self._folder = CheckpointFolder(directory) if directory is not None else None
        self._interval = interval
        self._group = group
        self._saved_at = time.monotonic()
        self._manifest: Manifest | None = None
        self._result: dict[str, float | str] = {}
        self._has_final = False
        self._is_final_written = False

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are saved."""
        return self._folder is not None

    @property
    def is_due(self) -> bool:
        """Whether the interval since the last checkpoint has passed."""
        return self.enabled and time.monotonic() - self._saved_at >= self._interval

    @property
    def has_final(self) -> bool:
        """Whether the state at the end of training is saved."""
        return self._has_final

    def load(self) -> State | None:
        """Return the newest intact checkpoint, the same on all ranks. None if there is none.

        A collective call: rank 0 finds the checkpoint, and the others read it.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged; or the folder cannot be read.
        """
        if self._folder is None:
            return None
        loaded, number = None, None
        failure: CheckpointError | None = None
        if self._group.is_main:
            try:
                loaded = self._folder.load()
            except CheckpointError as error:
                failure = error
            number = loaded[1].number if loaded is not None else None
        number, failure = self._group.broadcast((number, failure))
        if failure is not None:
            raise failure
        if number is not None and not self._group.is_main:
            loaded = self._folder.load(number)
        if loaded is None:
            return None
        state, self._manifest = loaded
        self._result = dict(self._manifest.result)
        return state

    def save(
        self,
        info: CheckpointInfo,
        rng_state: State,
        make_state: MakeState,
        *,
        final: bool = False,
    ) -> None:
        """Save a checkpoint. A collective call. Without a folder, nothing is written.

        Args:
            info: description of the checkpoint.
            rng_state: state of this replica's random number generators.
            make_state: called on rank 0 with the `rng_state` of all ranks; returns the state to write.
            final: whether training is over, so that results are added to this checkpoint.

        Raises:
            CheckpointError: on all ranks, if rank 0 could not write the checkpoint.
        """
        failure = None
        if self._folder is not None:
            rng_states = self._group.gather(rng_state)
            if self._group.is_main:
                try:
                    self._manifest = self._folder.save(make_state(rng_states), info, self._result)
                except CheckpointError as error:
                    failure = str(error)
            failure = self._group.broadcast(failure)
        self._saved_at = time.monotonic()
        if failure is not None:
            raise CheckpointError(failure)
        self._has_final = self._has_final or final
        self._is_final_written = self._has_final

    def save_on_rank_0(self, info: CheckpointInfo, rng_state: State, make_state: MakeState) -> None:
        """Save the end of training on rank 0, without the random state of the others. Not a collective call.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        if self._folder is not None and self._group.is_main:
            self._manifest = self._folder.save(make_state([rng_state]), info, self._result)
            self._is_final_written = True

    def keep_final(self) -> None:
        """Continue to add results to the restored checkpoint, which has the end of training."""
        self._has_final = self._is_final_written = self._manifest is not None and self._manifest.finished

    def postpone(self) -> None:
        """Wait for another interval until the next checkpoint is due."""
        self._saved_at = time.monotonic()

    def report_result(self, result: dict[str, float | str]) -> None:
        """Add to the result of training, and to the manifest of the final checkpoint if it is saved.

        Raises:
            CheckpointError: on rank 0, if the manifest cannot be written.
        """
        self._result.update(result)
        if not self._is_final_written or not self._group.is_main:
            return
        if self._folder is not None and self._manifest is not None:
            self._manifest = self._folder.annotate(self._manifest, self._result)
