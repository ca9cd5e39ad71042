"""When the state of training is saved, and how the replicas save and restore it together.

A thread of its own writes a checkpoint, from a copy of the state in memory, while training continues. If a
replica has several processes, each copies its part of the state, and their threads write together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor

from adascale_client import Backoff
from adascale_core.checkpoint_manifest import Manifest
from adascale_storage import UnusableStorageError, WriteCancelledError, open_storage
from adascale_worker.errors import CheckpointError, StorageUnavailableError, UnusableCheckpointError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.snapshot_place import CopyNumber
from adascale_worker.program.weight_checks import all_finite, nonfinite_message
from adascale_worker.state.file import Shards, Snapshot
from adascale_worker.state.store import CheckpointInfo, CheckpointProcesses, CheckpointStore, number_of
from adascale_worker.state.tree import Tree
from adascale_worker.state.weights import BestWeights

MakeState = Callable[[], Tree]
T = TypeVar("T")
MAX_WAIT_AT_EXIT = 20.0
"""Seconds that the end of a process waits for the checkpoint that is being written."""
MAX_WAIT_FOR_MEMORY = 5.0
"""Seconds that `release_memory` waits for a storage that does not answer."""
MAX_WAIT_FOR_STORAGE = 600.0
"""Seconds for which reading the last checkpoint of a job, and saving the end of training, are tried again."""
MIN_DELAY = 10.0
"""Seconds that a checkpoint takes at least before its duration is reported."""


class Checkpointing:
    """Saves and restores checkpoints of all replicas together. Rank 0 writes: each of its processes a part.

    A checkpoint is due `interval` seconds after the state of the last one was copied, also if the process was
    started again in between, and after the first step of a job without a checkpoint.
    """

    def __init__(
        self,
        location: str | Path | CheckpointStore | None,
        interval: float,
        group: ReplicaGroup,
        is_terminated: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = (
            _open(location, CheckpointProcesses(group.own.beside))
            if isinstance(location, str | Path)
            else location
        )
        self.interval = interval
        """Seconds between two checkpoints."""
        self.group = group
        self._is_terminated = is_terminated
        self._was_main: bool | None = None
        self._saved_at = float("-inf")
        self.manifest: Manifest | None = None
        """That of the last checkpoint that this replica has saved or restored."""
        self.result: dict[str, float | str] = {}
        """The result of training, as far as the program has reported it."""
        self.has_final = False
        """Whether the state at the end of training is saved."""
        self._is_final_written = False
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._step = 0
        self._began = 0.0
        self._has_reported_delay = False
        self._reported_failure: str | None = None

    def best_weights(self, metric: str, mode: Literal["min", "max"]) -> BestWeights | None:
        """Return what keeps the weights with the best value of a metric; None if nothing is saved."""
        return None if self._store is None else BestWeights(self._store.storage, metric, mode)

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are saved."""
        return self._store is not None

    # -- when ---------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the interval since the last checkpoint has passed, and none is being written."""
        is_over = time.monotonic() - self._saved_at >= self.interval
        return self.enabled and is_over and not self.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written. Reports once if that takes longer than the interval."""
        if self.wait(0.0):
            return False
        duration = time.monotonic() - self._began
        if duration > max(self.interval, MIN_DELAY) and not self._has_reported_delay:
            self._has_reported_delay = True
            self._print(
                f"the checkpoint of step {self._step} is still being written to {self._stored.storage} after "
                f"{duration:.0f} s, longer than the interval of {self.interval:g} s: training continues, "
                "and checkpoints are saved less often. Use faster storage, or a longer interval"
            )
        return True

    def begin_generation(self) -> None:
        """Agree on when the next checkpoint is due. A collective call.

        It is due at once if another replica has become rank 0, because the former one may have been saving.
        """
        if self._was_main is False and self.group.is_main:
            self._saved_at = float("-inf")
        self._was_main = self.group.is_main
        self._saved_at = time.monotonic() - self.group.broadcast(time.monotonic() - self._saved_at)

    def postpone(self) -> None:
        """Wait for another interval until the next checkpoint is due."""
        self._saved_at = time.monotonic()

    # -- restoring ----------------------------------------------------------------------------------------

    def load(
        self, own: Shards | None = None, *, wait: bool = False, since: CopyNumber | None = None
    ) -> Tree | None:
        """Return the newest intact checkpoint; None without any. Called on rank 0.

        `own` is the part of the state that this process needs. If `since` is given, earlier checkpoints are
        not returned, and it is no error that all are damaged.
        """
        store = self._store
        if store is None:
            return None

        def read() -> tuple[Tree | None, Manifest | None]:
            newest, loaded = None, None
            if since is not None:
                newest = store.newest()
                if newest is None or number_of(newest) < since:
                    return None, newest
            try:
                loaded = store.load(own=own)
            except UnusableCheckpointError as error:
                if since is None:
                    raise
                print(f"adascale: {error}", flush=True)
            if loaded is None or (since is not None and number_of(loaded[1]) < since):
                # The newest one is damaged.
                return None, newest
            return loaded

        state, manifest = self._repeat(read) if wait else read()
        if manifest is not None:
            self.manifest = manifest
            self._saved_at = time.monotonic() - max(time.time() - manifest.saved_at, 0.0)
        return state

    def keep_final(self, *, is_final: bool) -> None:
        """Use the checkpoint that rank 0 has restored; `is_final`: that of the end of training."""
        self.has_final = self._is_final_written = is_final
        if self.manifest is not None and (is_final or not self.manifest.finished):
            self.keep_result(self.manifest.result)

    def keep_result(self, result: dict[str, float | str]) -> None:
        """Use the result of a restored state. What the program has reported before is newer."""
        self.result = {**result, **self.result}

    # -- saving -------------------------------------------------------------------------------------------

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
        """Save a checkpoint, if `weights` are finite: while training continues, or before this returns if
        `final` (the end of training) or `durable`. A collective call.

        If `only_if_latest`, one of a later step that another member has saved is as good."""
        if self.enabled:
            self._saved_at = time.monotonic()
            if not final and not durable:
                if self.group.rank == 0:
                    self.start(make_state(), info, weights, changed_by_step)
            else:
                failure = None
                try:
                    # The end of training exists in memory only.
                    self.save_on_rank_0(info, make_state, wait=final, only_if_latest=only_if_latest)
                except CheckpointError as error:
                    failure = str(error)
                failure = self.group.broadcast(failure)
                if failure is not None:
                    raise CheckpointError(failure)
        self.has_final = self.has_final or final
        self._is_final_written = self.has_final

    def save_on_rank_0(
        self, info: CheckpointInfo, make_state: MakeState, *, wait: bool = True, only_if_latest: bool = False
    ) -> None:
        """Save a checkpoint, and return when it is durable. Not a collective call of the replicas.

        An earlier one that is being written is given up. If `wait`, waits for a storage that does not answer.
        """

        def copy(state: Tree) -> None:
            with _copy_errors():
                self._snapshot.copy(state)
                self._snapshot.wait()

        def save() -> Manifest:
            state = make_state()
            self._cancelled.set()
            self.wait()
            self._stored.processes.each(lambda: copy(state))
            return self._stored.save(self._snapshot, info, self.result, only_if_latest=only_if_latest)

        if self.enabled and self.group.rank == 0:
            self.manifest = self._repeat(save) if wait else save()
            self._is_final_written = self._is_final_written or info.finished

    def start(
        self,
        state: Tree,
        info: CheckpointInfo,
        weights: Sequence[Tensor] = (),
        changed_by_step: Iterable[Tensor] = (),
    ) -> None:
        """Copy `state`, and begin to write the copy. If a checkpoint is still being written, do nothing.

        A failure is reported, once until a checkpoint is saved again. Nothing is written if `weights`, which
        are tensors of the state, are not all finite.
        """
        if self._stored.processes.count == 1 and self.is_busy:
            return
        # Of several processes, the first starts only when it is not busy: the others are about to end.
        self.wait()
        failure = None
        try:
            with _copy_errors():
                self._snapshot.copy(state, weights, changed_by_step)
        except CheckpointError as error:
            # The other processes learn of it in the thread.
            failure = error
        self._cancelled.clear()
        self._step, self._began = info.step, time.monotonic()
        # A daemon: a storage that does not answer cannot keep the process from ending.
        self._thread = threading.Thread(
            target=self._write,
            args=(self._snapshot, info, dict(self.result), failure),
            name="adascale-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def _write(
        self,
        snapshot: Snapshot,
        info: CheckpointInfo,
        result: dict[str, float | str],
        failure: CheckpointError | None,
    ) -> None:
        def is_finite() -> bool:
            if failure is not None:
                raise failure
            with _copy_errors():
                snapshot.wait()
            # Reading all weights takes as long as copying them, so it is not done before.
            return all_finite(snapshot.weights)

        try:
            if not all(self._stored.processes.each(is_finite)):
                self._print(nonfinite_message(info.step))
                return
            manifest = self._stored.save(snapshot, info, result, self._cancelled.is_set)
        except WriteCancelledError:
            return
        except Exception as error:  # noqa: BLE001 (a traceback of this thread would not stop training)
            text = f"the checkpoint cannot be saved: {type(error).__name__}: {error}"
            problem = str(error) if isinstance(error, CheckpointError) else text
            if problem != self._reported_failure:
                # The previous checkpoint is intact, so continuing loses nothing that exiting would keep.
                self._print(f"{problem}; training continues without this checkpoint")
            self._reported_failure = problem
            return
        if self._reported_failure is not None:
            self._print(f"checkpoints are saved again, the last one at step {manifest.step}")
        self._reported_failure = None
        if time.monotonic() - self._began <= self.interval:
            self._has_reported_delay = False
        self.manifest = manifest

    def before_step(self) -> None:
        """Let the step of the optimizer, which comes next, wait for the copy of what it changes.

        On a GPU; the program does not wait.
        """
        self._snapshot.before_step()

    def release_memory(self) -> None:
        """Release the memory of the copied state, before this replica receives another state.

        A checkpoint that is being written is given up, and the next one is due at once. If the storage does
        not answer, the memory is released when it does.
        """
        if not self.wait(0.0):
            self._saved_at = float("-inf")
        self._cancelled.set()
        self.wait(MAX_WAIT_FOR_MEMORY)
        self._snapshot = Snapshot()

    def report_result(self, result: dict[str, float | str]) -> None:
        """Add to the result of training, and save it with the final checkpoint if that exists."""
        self.result.update(result)
        if not self._is_final_written or not self.group.is_main:
            return
        if self._store is not None and self.manifest is not None:
            self.manifest = self._store.annotate(self.manifest, self.result)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no checkpoint is being written, and return whether that is so."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, at most `MAX_WAIT_AT_EXIT` seconds."""
        if not self.wait(MAX_WAIT_AT_EXIT):
            print(
                f"adascale: the last checkpoint was not written within {MAX_WAIT_AT_EXIT:g} s; "
                "the one before it is kept",
                flush=True,
            )

    @property
    def _stored(self) -> CheckpointStore:
        assert self._store is not None, "checkpoints are saved"
        return self._store

    def _repeat(self, action: Callable[[], T]) -> T:
        """Repeat what the storage has refused, until it works, for at most `MAX_WAIT_FOR_STORAGE` seconds."""
        begun, backoff, has_reported = time.monotonic(), Backoff(), False
        while True:
            try:
                result = action()
            except StorageUnavailableError as error:
                waited = time.monotonic() - begun
                gives_up = waited > MAX_WAIT_FOR_STORAGE or self.group.has_failed or self._is_terminated()
                if self._stored.processes.lead(lambda gives_up=gives_up: gives_up):  # type: ignore[misc]
                    raise
                if not has_reported:
                    self._print(f"{error}; trying again for {MAX_WAIT_FOR_STORAGE:.0f} s")
                has_reported = True
                time.sleep(backoff.next())
            else:
                if has_reported:
                    self._print("the storage of checkpoints works again")
                return result

    def _print(self, message: str) -> None:
        if self._stored.processes.leads:
            print(f"adascale: {message}", flush=True)


def _open(location: str | Path, processes: CheckpointProcesses) -> CheckpointStore:
    """Return the checkpoints at a location."""
    try:
        return CheckpointStore(open_storage(location), processes=processes)
    except UnusableStorageError as error:
        raise CheckpointError(str(error)) from error


@contextmanager
def _copy_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError(
            f"the state cannot be copied in memory for a checkpoint: {error}. The first replica needs the "
            "memory of the state (parameters, optimizer) twice: raise its memory limit"
        ) from error
