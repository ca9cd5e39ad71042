"""Writes checkpoints in a thread of its own, from a copy of the state in memory.

If a replica has several processes, each copies its part of the state, and their threads write together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from adascale_core.checkpoint_manifest import Manifest
from adascale_storage import WriteCancelledError
from adascale_worker.errors import CheckpointError
from adascale_worker.program.weight_checks import all_finite, nonfinite_message
from adascale_worker.state.checkpoints.processes import CheckpointProcesses
from adascale_worker.state.checkpoints.store import CheckpointInfo, CheckpointStore
from adascale_worker.state.file import Snapshot

State = dict[str, Any]
MIN_DELAY = 10.0
"""Seconds that a checkpoint takes at least before its duration is reported."""


class CheckpointWriter:
    """Copies the state, and writes the copy while training continues. One checkpoint at a time."""

    def __init__(
        self,
        store: CheckpointStore,
        interval: float,
        on_saved: Callable[[Manifest], None],  # called in the thread that writes, too
        processes: CheckpointProcesses | None = None,
    ) -> None:
        self._store = store
        self._interval = interval
        self._on_saved = on_saved
        self._processes = CheckpointProcesses() if processes is None else processes
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._step = 0
        self._began = 0.0
        self._has_reported_delay = False
        self._reported_failure: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written. Reports once if that takes longer than the interval."""
        if self._thread is None or not self._thread.is_alive():
            return False
        duration = time.monotonic() - self._began
        if duration > max(self._interval, MIN_DELAY) and not self._has_reported_delay:
            self._has_reported_delay = True
            self._print(
                f"the checkpoint of step {self._step} is still being written to {self._store.storage} after "
                f"{duration:.0f} s, longer than the interval of {self._interval:g} s: training continues, "
                "and checkpoints are saved less often. Use faster storage, or a longer interval"
            )
        return True

    @property
    def last_is_unsaved(self) -> bool:
        """Whether the last checkpoint that was begun is not saved, yet or at all."""
        return self._reported_failure is not None or self.is_busy

    def start(
        self,
        state: State,
        info: CheckpointInfo,
        result: dict[str, float | str],
        weights: Sequence[Tensor] = (),
        changed_by_step: Iterable[Tensor] = (),
    ) -> None:
        """Copy `state`, and begin to write the copy. If a checkpoint is still being written, do nothing.

        A failure is reported, once until a checkpoint is saved again. Nothing is written if `weights`, which
        are tensors of the state, are not all finite.
        """
        if self._processes.count == 1 and self.is_busy:
            return
        # Of several processes, the first starts only when it is not busy: the others are about to end.
        self.wait()
        failure = None
        try:
            self._copy(state, weights, changed_by_step)
        except CheckpointError as error:
            # The other processes learn of it in the thread.
            failure = error
        self._cancelled.clear()
        self._step, self._began = info.step, time.monotonic()
        # A daemon: a storage that does not answer cannot keep the process from ending.
        self._thread = threading.Thread(
            target=self._write,
            args=(self._snapshot, info, dict(result), failure),
            name="adascale-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def before_step(self) -> None:
        """Let the step of the optimizer, which comes next, wait for the copy of what it changes."""
        self._snapshot.before_step()

    def save(
        self,
        state: State,
        info: CheckpointInfo,
        result: dict[str, float | str],
        *,
        only_if_latest: bool = False,
    ) -> Manifest:
        """Save a checkpoint, and return when it is durable. An earlier one that is being written is given up.

        If `only_if_latest`, a checkpoint of a later step that another member has saved is as good.
        """
        self._cancelled.set()
        self.wait()

        def copy() -> None:
            self._copy(state)
            with _copy_errors():
                self._snapshot.wait()

        self._processes.each(copy)
        manifest = self._store.save(self._snapshot, info, result, only_if_latest=only_if_latest)
        self._on_saved(manifest)
        return manifest

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no checkpoint is being written, and return whether that is so."""
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def release_memory(self, timeout: float) -> bool:
        """Release the memory of the copy, and return whether a checkpoint was being written.

        That is given up. If the storage takes longer than `timeout`, the memory is released when it answers.
        """
        is_writing = not self.wait(0.0)
        self._cancelled.set()
        self.wait(timeout)
        self._snapshot = Snapshot()
        return is_writing

    def _copy(
        self, state: State, weights: Sequence[Tensor] = (), changed_by_step: Iterable[Tensor] = ()
    ) -> None:
        with _copy_errors():
            self._snapshot.copy(state, weights, changed_by_step)

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
            if not all(self._processes.each(is_finite)):
                self._print(nonfinite_message(info.step))
                return
            manifest = self._store.save(snapshot, info, result, self._cancelled.is_set)
        except WriteCancelledError:
            return
        except CheckpointError as error:
            self._report_failure(str(error))
            return
        except Exception as error:  # noqa: BLE001 (a traceback of this thread would not stop training)
            self._report_failure(f"the checkpoint cannot be saved: {type(error).__name__}: {error}")
            return
        if self._reported_failure is not None:
            self._print(f"checkpoints are saved again, the last one at step {manifest.step}")
        self._reported_failure = None
        if time.monotonic() - self._began <= self._interval:
            self._has_reported_delay = False
        self._on_saved(manifest)

    def _report_failure(self, failure: str) -> None:
        if failure != self._reported_failure:
            # The previous checkpoint is intact, so continuing loses nothing that exiting would keep.
            self._print(f"{failure}; training continues without this checkpoint")
        self._reported_failure = failure

    def _print(self, message: str) -> None:
        if self._processes.leads:
            print(f"adascale: {message}", flush=True)


@contextmanager
def _copy_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError(
            f"the state cannot be copied in memory for a checkpoint: {error}. The first replica needs the "
            "memory of the state (parameters, optimizer) twice: raise its memory limit"
        ) from error
