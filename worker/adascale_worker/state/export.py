"""Writes the weights of a checkpoint to a file of their own: the process that `adascale export` starts.

python -m adascale_worker.state.export LOCATION FILE [--best]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from adascale_core.errors import AdaScaleError
from adascale_storage import Storage, StorageError, open_storage
from adascale_worker.errors import CheckpointError
from adascale_worker.state.checkpoints.best_weights import best_files
from adascale_worker.state.checkpoints.store import CheckpointStore
from adascale_worker.state.weights_file import encode, plain_weights


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
    print(f"Exported {described}, to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
