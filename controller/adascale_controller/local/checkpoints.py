"""The checkpoints of a job on this machine: in a folder, or at the URL of an object store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adascale_core.checkpoint_manifest import Manifest, checkpoint_number, is_best_weights, manifest_number
from adascale_core.errors import AdaScaleError
from adascale_storage import (
    MissingFileError,
    Storage,
    StorageError,
    UnusableStorageError,
    is_url,
    open_storage,
)


class CheckpointStorageError(AdaScaleError):
    """The storage of the checkpoints cannot be used."""


def location(recorded: str | None, default: Path) -> Path | str:
    """Return the folder or the URL of checkpoints."""
    if recorded is None:
        return default
    return recorded if "://" in recorded else Path(recorded)


def newest_manifest(checkpoints: Path | str) -> Manifest | None:
    """Return the manifest of the newest checkpoint in a folder or at a URL; None if there is no checkpoint.

    A manifest that cannot be read is skipped: the trainer reports damaged checkpoints.
    """
    files = _open(checkpoints)
    with _errors(files):
        numbered = {manifest_number(name): name for name in files.names()}
        for number in sorted((number for number in numbered if number is not None), reverse=True):
            # A trainer may have deleted it meanwhile.
            with suppress(MissingFileError, ValueError):
                return Manifest.from_json(json.loads(files.read(numbered[number])))
    return None


def delete_checkpoints(checkpoints: Path | str) -> None:
    """Delete the files of checkpoints, and no files of others."""
    files = _open(checkpoints)
    with _errors(files):
        for name in files.names():
            if checkpoint_number(name) is not None or is_best_weights(name):
                files.delete(name)


def _open(checkpoints: Path | str) -> Storage:
    try:
        return open_storage(checkpoints, person_waits=True)
    except UnusableStorageError as error:
        raise CheckpointStorageError(str(error)) from error


@contextmanager
def _errors(files: Storage) -> Iterator[None]:
    """Raise the errors of a storage as errors of a command."""
    try:
        yield
    except StorageError as error:
        hint = (
            "Check the URL, and the credentials in the environment, such as AWS_ACCESS_KEY_ID"
            if is_url(str(files))
            else "Check that the folder can be read"
        )
        raise CheckpointStorageError(f"{files} cannot be read: {error}. {hint}") from error
