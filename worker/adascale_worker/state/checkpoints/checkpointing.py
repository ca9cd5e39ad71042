"""When the state of training is saved, and how the replicas save and restore it together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor

from adascale_client import Backoff
from adascale_core.checkpoint_manifest import Manifest
from adascale_storage import Storage, UnusableStorageError, open_storage
from adascale_worker.errors import CheckpointError, StorageUnavailableError, UnusableCheckpointError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.state.checkpoints.processes import CheckpointProcesses
from adascale_worker.state.checkpoints.snapshot_memory import KeptSnapshot, number_of
from adascale_worker.state.checkpoints.store import CheckpointInfo, CheckpointStore
from adascale_worker.state.checkpoints.weights import BestWeights
from adascale_worker.state.checkpoints.writer import CheckpointWriter
from adascale_worker.state.shards import Shards

State = dict[str, Any]
MakeState = Callable[[], State]
T = TypeVar("T")
MAX_WAIT_AT_EXIT = 20.0
"""Seconds that the end of a process waits for the checkpoint that is being written."""
MAX_WAIT_FOR_MEMORY = 5.0
"""Seconds that `release_memory` waits for a storage that does not answer."""
MAX_WAIT_FOR_STORAGE = 600.0
"""Seconds for which reading the last checkpoint of a job, and saving the end of training, are tried again."""


class Checkpointing:
    """Saves and restores checkpoints of all replicas together. Rank 0 writes: each of its processes a part.

    A checkpoint is due `interval` seconds after the state of the last one was copied, also if the process was
    started again in between, and after the first step of a job without a checkpoint.
    """

    def __init__(
        self,
        location: str | Path | None,
        interval: float,
        group: ReplicaGroup,
        is_terminated: Callable[[], bool] = lambda: False,
    ) -> None:
        self._processes = processes = CheckpointProcesses(group.messages_within)
        self._store = None if location is None else CheckpointStore(_open(location), processes=processes)
        self._writer = (
            CheckpointWriter(self._store, interval, self._keep_manifest, processes)
            if self._store is not None
            else None
        )
        self.interval = interval
        """Seconds between two checkpoints."""
        self._is_terminated = is_terminated
        self.is_unsaved = False
        """Whether rank 0 may not have saved the last checkpoint that it began, as far as is known."""
        self._group = group
        self._was_main: bool | None = None
        self._saved_at = float("-inf")
        self._manifest: Manifest | None = None
        self.result: dict[str, float | str] = {}
        """The result of training, as far as the program has reported it."""
        self._kept: KeptSnapshot | None = None
        """The copy that is restored, because it is later than the last checkpoint."""
        self.has_final = False
        """Whether the state at the end of training is saved."""
        self._is_final_written = False

    def best_weights(self, metric: str, mode: Literal["min", "max"]) -> BestWeights | None:
        """Return what keeps the weights with the best value of a metric; None if nothing is saved."""
        return None if self._store is None else BestWeights(self._store.storage, metric, mode)

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are saved."""
        return self._store is not None

    @property
    def is_due(self) -> bool:
        """Whether the interval since the last checkpoint has passed, and none is being written."""
        if self._writer is None or time.monotonic() - self._saved_at < self.interval:
            return False
        return not self._writer.is_busy

    @property
    def last_is_unsaved(self) -> bool:
        """Whether the last checkpoint that this replica has begun is not saved, yet or at all."""
        return self._writer is not None and self._writer.last_is_unsaved

    def begin_generation(self) -> None:
        """Agree on when the next checkpoint is due. A collective call.

        It is due at once if another replica has become rank 0 while the former one was saving, which may be
        lost.
        """
        if self._was_main is False and self._group.is_main and self.is_unsaved:
            self._saved_at = float("-inf")
        self._was_main = self._group.is_main
        age, self.is_unsaved = self._group.broadcast((time.monotonic() - self._saved_at, self.is_unsaved))
        self._saved_at = time.monotonic() - age

    def load(
        self, own: Shards | None = None, *, wait: bool = False, kept: KeptSnapshot | None = None
    ) -> State | None:
        """Return the newest intact checkpoint, or a later copy `kept`; None without any. Called on rank 0.

        `own` is the part of the state that this process needs.
        """
        self._kept = None
        store = self._store

        def read() -> tuple[State | None, Manifest | None]:
            newest = store.newest() if store is not None and kept is not None else None
            if kept is not None and (newest is None or kept.number > number_of(newest)):
                return None, newest
            try:
                state, found = (store.load(own=own) if store is not None else None) or (None, None)
            except UnusableCheckpointError as error:
                if kept is None:
                    raise
                print(f"adascale: {error}", flush=True)
                return None, newest
            if kept is not None and found is not None and kept.number > number_of(found):
                # The newest one is damaged.
                return None, newest
            return state, found

        state, manifest = self._repeat(read) if wait else read()
        if manifest is not None:
            self._manifest = manifest
            self._saved_at = time.monotonic() - max(time.time() - manifest.saved_at, 0.0)
        if state is None and kept is not None:
            try:
                state, self._kept = kept.read(), kept
            except CheckpointError as error:
                print(
                    f"adascale: the state that the agent has kept in memory cannot be used: {error}",
                    flush=True,
                )
                return self.load(own, wait=wait)
        return state

    @property
    def is_from_memory(self) -> bool:
        """Whether `load` has returned the copy, and not a checkpoint."""
        return self._kept is not None

    def save(
        self,
        info: CheckpointInfo,
        make_state: MakeState,
        *,
        final: bool = False,
        durable: bool = False,
        only_if_latest: bool = False,
        weights: Sequence[Tensor] = (),
        changed_by_step: Iterable[Tensor] = (),
    ) -> None:
        """Save a checkpoint. A collective call. Without a location, nothing is written.

        Returns when the state is copied, and the copy is written while training continues, if `weights` are
        finite. If `final` (the end of training) or `durable`, returns when the checkpoint is written.
        """
        if self._writer is not None:
            if final or durable:
                self._save_durably(self._writer, info, make_state, wait=final, only_if_latest=only_if_latest)
            else:
                self._start_to_save(self._writer, info, make_state, weights, changed_by_step)
        self.has_final = self.has_final or final
        self._is_final_written = self.has_final

    def _start_to_save(
        self,
        writer: CheckpointWriter,
        info: CheckpointInfo,
        make_state: MakeState,
        weights: Sequence[Tensor],
        changed_by_step: Iterable[Tensor],
    ) -> None:
        self._saved_at, self.is_unsaved = time.monotonic(), True
        if self._group.rank == 0:
            writer.start(make_state(), info, self.result, weights, changed_by_step)

    def _save_durably(
        self,
        writer: CheckpointWriter,
        info: CheckpointInfo,
        make_state: MakeState,
        *,
        wait: bool,
        only_if_latest: bool,
    ) -> None:
        def save() -> Manifest:
            return writer.save(make_state(), info, self.result, only_if_latest=only_if_latest)

        failure = None
        self._saved_at = time.monotonic()
        if self._group.rank == 0:
            try:
                # The end of training exists in memory only.
                self._repeat(save) if wait else save()
            except CheckpointError as error:
                failure = str(error)
        failure = self._group.broadcast(failure)
        if failure is not None:
            raise CheckpointError(failure)
        self.is_unsaved = False

    def _repeat(self, action: Callable[[], T]) -> T:
        """Repeat what the storage has refused, until it works, for at most `MAX_WAIT_FOR_STORAGE` seconds."""
        begun, backoff, has_reported = time.monotonic(), Backoff(), False
        while True:
            try:
                result = action()
            except StorageUnavailableError as error:
                waited = time.monotonic() - begun
                gives_up = waited > MAX_WAIT_FOR_STORAGE or self._group.has_failed or self._is_terminated()
                if self._processes.lead(lambda gives_up=gives_up: gives_up):  # type: ignore[misc]
                    raise
                if not has_reported and self._processes.leads:
                    print(f"adascale: {error}; trying again for {MAX_WAIT_FOR_STORAGE:.0f} s", flush=True)
                has_reported = True
                time.sleep(backoff.next())
            else:
                if has_reported and self._processes.leads:
                    print("adascale: the storage of checkpoints works again", flush=True)
                return result

    def before_step(self) -> None:
        """Let the step of the optimizer, which comes next, wait for the copy of what it changes.

        On a GPU; the program does not wait.
        """
        if self._writer is not None:
            self._writer.before_step()

    def save_on_rank_0(self, info: CheckpointInfo, make_state: MakeState) -> None:
        """Save the end of training on rank 0. Not a collective call of the replicas."""
        writer = self._writer
        if writer is not None and self._group.rank == 0:
            self._repeat(lambda: writer.save(make_state(), info, self.result))
            self._is_final_written = True

    def later_generation(self, info: CheckpointInfo) -> int | None:
        """Return the generation of the restored checkpoint of this job if `info` is of an earlier one."""
        last = self._manifest
        if last is None or last.incarnation != info.incarnation or last.generation <= info.generation:
            return None
        return last.generation

    @property
    def has_restored_final(self) -> bool:
        """Whether this replica has restored the checkpoint of the end of training."""
        return self._manifest is not None and self._manifest.finished and self._kept is None

    def keep_final(self, *, is_final: bool) -> None:
        """Use the checkpoint that rank 0 has restored; `is_final`: that of the end of training."""
        self.has_final = self._is_final_written = is_final
        # What the program has reported before it restores the state is newer.
        if self._kept is not None:
            self.result = {**self._kept.result, **self.result}
        if self._manifest is not None and (is_final or not self._manifest.finished):
            self.result = {**self._manifest.result, **self.result}

    def postpone(self) -> None:
        """Wait for another interval until the next checkpoint is due."""
        self._saved_at = time.monotonic()

    def release_memory(self) -> None:
        """Release the memory of the copied state, before this replica receives another state.

        A checkpoint that is being written is given up, and the next one is due at once. If the storage does
        not answer, the memory is released when it does.
        """
        if self._writer is not None and self._writer.release_memory(MAX_WAIT_FOR_MEMORY):
            self._saved_at = float("-inf")

    def report_result(self, result: dict[str, float | str]) -> None:
        """Add to the result of training, and save it with the final checkpoint if that exists."""
        self.result.update(result)
        if not self._is_final_written or not self._group.is_main:
            return
        if self._store is not None and self._manifest is not None:
            self._manifest = self._store.annotate(self._manifest, self.result)

    def close(self) -> None:
        """Wait for the checkpoint that is being written, at most `MAX_WAIT_AT_EXIT` seconds."""
        if self._writer is not None and not self._writer.wait(MAX_WAIT_AT_EXIT):
            print(
                f"adascale: the last checkpoint was not written within {MAX_WAIT_AT_EXIT:g} s; "
                "the one before it is kept",
                flush=True,
            )

    def _keep_manifest(self, manifest: Manifest) -> None:
        self._manifest = manifest


def _open(location: str | Path) -> Storage:
    """Return the storage at a location."""
    try:
        return open_storage(location)
    except UnusableStorageError as error:
        raise CheckpointError(str(error)) from error
