"""Keeps the weights of a model for which a metric had its best value."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from adascale_core.checkpoint_manifest import best_weights_file_name, is_best_weights
from adascale_core.errors import AdaScaleError
from adascale_storage import Storage, StorageError
from adascale_worker.state.weights_file import encode, plain_weights, read_metadata

MAX_WAIT_AT_EXIT = 20.0
"""Seconds that the end of a process waits for the weights that are being written."""


@dataclass(frozen=True)
class BestFile:
    """A file with weights."""

    name: str
    metric: str
    value: float
    step: int  # optimizer steps when they were copied


def best_files(storage: Storage) -> list[BestFile]:
    """Return the files with weights that were the best when they were saved."""
    files = []
    for name in sorted(filter(is_best_weights, storage.names())):
        if not name.endswith(".safetensors"):
            continue  # a draft; its header may be complete
        try:
            metadata = read_metadata(lambda start, end, name=name: storage.read(name, start, end))  # type: ignore[misc]
            files.append(BestFile(name, metadata["metric"], float(metadata["value"]), int(metadata["step"])))
        except (ValueError, KeyError):
            continue  # written by another program
    return files


class BestWeights:
    """Writes weights in a thread of its own, from a copy in memory. Used on rank 0.

    Only one file is kept. Its value is read from the storage, because a former rank 0 may have written it.
    """

    def __init__(self, storage: Storage, metric: str, mode: Literal["min", "max"]) -> None:
        self.metric = metric
        self._storage = storage
        self._sign = 1.0 if mode == "min" else -1.0
        self._lock = threading.Lock()
        self._best: float | None = None
        """The best value so far, written or about to be written. None before the first."""
        self._next: tuple[float, int, dict[str, Tensor]] | None = None
        self._thread: threading.Thread | None = None
        self._has_reported = False

    def offer(self, value: float, step: int, state_dict: Callable[[], Mapping[str, Any]]) -> None:
        """Keep the present weights if the metric has its best value."""
        if not math.isfinite(value) or (self._best is not None and not self._is_better(value, self._best)):
            return
        weights = plain_weights(state_dict())
        with self._lock:
            self._best, self._next = value, (value, step, weights)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="adascale-best", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for the weights that are being written, at most `MAX_WAIT_AT_EXIT` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(MAX_WAIT_AT_EXIT)

    def _is_better(self, value: float, other: float) -> bool:
        return self._sign * value < self._sign * other

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if self._next is None:
                    self._thread = None
                    return
                (value, step, weights), self._next = self._next, None
            try:
                self._write(value, step, weights)
            except (StorageError, AdaScaleError, OSError, MemoryError) as error:
                self._learn(None)  # The next value is compared with what is saved.
                if not self._has_reported:
                    self._has_reported = True
                    print(
                        f"adascale: the weights of step {step}, with the best {self.metric}, cannot be saved "
                        f"in {self._storage}: {error}",
                        flush=True,
                    )

    def _learn(self, saved: float | None) -> None:
        """Use the value that is saved, unless a better one is to be written."""
        with self._lock:
            if self._next is None:
                self._best = saved

    def _write(self, value: float, step: int, weights: dict[str, Tensor]) -> None:
        saved = [file for file in best_files(self._storage) if file.metric == self.metric]
        best = min((file.value for file in saved), key=lambda each: self._sign * each, default=None)
        if best is not None and not self._is_better(value, best):
            self._learn(best)
            return
        size, parts = encode(weights, {"metric": self.metric, "value": repr(value), "step": str(step)})
        name = best_weights_file_name(step, secrets.token_hex(4))
        self._storage.write(name, parts, size=size)
        for other in filter(is_best_weights, self._storage.names()):
            if other != name:
                self._storage.delete(other)
