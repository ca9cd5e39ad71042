"""Files with the weights of a model alone, in the format of safetensors, as other programs use it.

`BestWeights` keeps the weights for which a metric had its best value. As a program, this module writes the
weights of a checkpoint to a file, for `adascale export`:

python -m adascale_worker.state.weights LOCATION FILE [--best]
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from adascale_core.checkpoint_manifest import best_weights_file_name, is_best_weights
from adascale_core.errors import AdaScaleError
from adascale_storage import Storage, StorageError, open_storage
from adascale_worker.errors import CheckpointError
from adascale_worker.state.file import TYPE_NAMES, data_bytes, encode_header, offsets_of
from adascale_worker.state.store import CheckpointStore
from adascale_worker.state.tree import layout_of, memory_of
from adascale_worker.torch_private.modules import COMPILED


def plain_weights(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of the tensors in a model's state, in the memory of the host, by the names of the model.

    Tensors that share memory, such as tied weights, become copies of their own, which the format requires.
    """
    return {
        name.replace(COMPILED, ""): torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(
            value.detach()
        )
        for name, value in state_dict.items()
        if isinstance(value, Tensor)
    }


def encode(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[int, Iterable[bytes | memoryview]]:
    """Return the length of the file, and its parts."""
    for name, tensor in weights.items():
        if tensor.dtype not in TYPE_NAMES:
            raise CheckpointError(
                f"{name} has type {tensor.dtype}, for which the format safetensors has no name: convert it, "
                "or leave it out of the model's state, by persistent=False for a buffer"
            )
    layouts = {name: layout_of(tensor) for name, tensor in weights.items()}
    # Programs expect the framework under this name.
    header = encode_header(layouts, {"format": "pt", **metadata})
    places = sorted(zip(offsets_of([*layouts.values()]), weights.values(), strict=True), key=itemgetter(0))
    parts = [memory_of(tensor) for _, tensor in places if tensor.numel()]
    return len(header) + data_bytes(layouts.values()), [header, *parts]


def read_metadata(read: Callable[[int, int], bytes]) -> dict[str, str]:
    """Return the metadata of a file."""
    header = json.loads(read(8, 8 + int.from_bytes(read(0, 8), "little")))
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise ValueError("the header has no metadata")
    return dict(header["__metadata__"])


MAX_WAIT_AT_EXIT = 20.0
"""Seconds that the end of a process waits for the weights that are being written."""


@dataclass(frozen=True)
class BestFile:
    """A file with the best weights."""

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
        self._best = math.inf
        """The best value that is known, negated if the highest is the best. What is saved may be better."""
        self._next: tuple[float, int, dict[str, Tensor]] | None = None
        self._thread: threading.Thread | None = None
        self._has_reported = False

    def offer(self, value: float, step: int, state_dict: Callable[[], Mapping[str, Any]]) -> None:
        """Keep the present weights if the metric has its best value."""
        if not math.isfinite(value) or not self._sign * value < self._best:
            return
        weights = plain_weights(state_dict())
        with self._lock:
            self._best, self._next = self._sign * value, (value, step, weights)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="adascale-best", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for the weights that are being written, at most `MAX_WAIT_AT_EXIT` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(MAX_WAIT_AT_EXIT)

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
                self._best = math.inf  # The next value is compared with what is saved.
                if not self._has_reported:
                    self._has_reported = True
                    print(
                        f"adascale: the weights of step {step}, with the best {self.metric}, cannot be saved "
                        f"in {self._storage}: {error}",
                        flush=True,
                    )

    def _write(self, value: float, step: int, weights: dict[str, Tensor]) -> None:
        files = [file for file in best_files(self._storage) if file.metric == self.metric]
        best = min((self._sign * file.value for file in files), default=math.inf)
        if not self._sign * value < best:
            self._best = best
            return
        size, parts = encode(weights, {"metric": self.metric, "value": repr(value), "step": str(step)})
        name = best_weights_file_name(step, secrets.token_hex(4))
        self._storage.write(name, parts, size=size)
        for other in filter(is_best_weights, self._storage.names()):
            if other != name:
                self._storage.delete(other)


def export(location: str, file: Path, *, best: bool) -> str:
    """Write the weights of the newest checkpoint, or of the best one, and return a description of them."""
    storage = open_storage(location)
    if best:
        return _export_best(storage, file)
    loaded = CheckpointStore(storage).load()
    if loaded is None:
        raise CheckpointError(f"there is no checkpoint in {storage}")
    state, manifest = loaded
    weights = plain_weights(state["program"]["model"])
    size, parts = encode(weights, {"step": str(manifest.step)})
    _write(file, parts)
    return f"{len(weights)} tensors of step {manifest.step:,}, {size:,} bytes"


def _export_best(storage: Storage, file: Path) -> str:
    try:
        found = best_files(storage)
        if not found:
            raise CheckpointError(
                f'there are no best weights in {storage}: call trainer.keep_best("loss") in the program, '
                "with the name of a metric that it logs, or export the newest checkpoint, without --best"
            )
        newest = max(found, key=lambda each: each.step)
        content = storage.read(newest.name)
    except StorageError as error:
        raise CheckpointError(f"{storage} cannot be read: {error}") from error
    _write(file, [content])
    described = f"with {newest.metric} {newest.value:.6g}, {len(content):,} bytes"
    return f"the weights of step {newest.step:,}, {described}"


def _write(file: Path, parts: Iterable[bytes | memoryview]) -> None:
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with draft.open("wb") as output:
            for part in parts:
                output.write(part)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def main() -> int:
    """Export, and return the exit code."""
    location, file, *options = sys.argv[1:]
    try:
        described = export(location, Path(file), best="--best" in options)
    except AdaScaleError as error:
        print(f"adascale: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"adascale: {file} cannot be written: {error.strerror}", file=sys.stderr)
        return os.EX_IOERR
    print(f"Exported {described}, to {file}, in the format safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
