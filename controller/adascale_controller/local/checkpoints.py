"""The checkpoints of a job on this machine: in a folder, or at the URL of an object store."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from adascale_core.checkpoint_manifest import (
    S3_CHECKSUMS,
    Manifest,
    checkpoint_number,
    is_best_weights,
    manifest_number,
)
from adascale_core.errors import AdaScaleError

_OPTIONS: dict[str, dict[str, Any]] = {
    # A person waits: without limits, a server that does not answer delays each command for 7 minutes.
    "s3": {
        "config_kwargs": {
            "connect_timeout": 5,
            "read_timeout": 15,
            "retries": {"max_attempts": 0},
            **S3_CHECKSUMS,
        }
    },
}
"""Arguments for the clients of URL schemes."""


class ObjectStoreError(AdaScaleError):
    """The object store of the checkpoints cannot be read."""


def location(recorded: str | None, default: Path) -> Path | str:
    """Return the folder or the URL of checkpoints.

    Args:
        recorded: a path or a URL; None for `default`.
        default: the folder in the state folder.
    """
    if recorded is None:
        return default
    return recorded if "://" in recorded else Path(recorded)


def newest_manifest(checkpoints: Path | str) -> Manifest | None:
    """Return the manifest of the newest checkpoint in a folder or at a URL; None if there is no checkpoint.

    A manifest that cannot be read is skipped: the trainer reports damaged checkpoints.

    Raises:
        ObjectStoreError: the object store cannot be read.
    """
    files = _open(checkpoints)
    numbered = {manifest_number(name): name for name in files.names()}
    for number in sorted((number for number in numbered if number is not None), reverse=True):
        try:
            return Manifest.from_json(json.loads(files.read(numbered[number])))
        except (OSError, ValueError):
            continue
    return None


def delete_checkpoints(checkpoints: Path | str) -> None:
    """Delete the files of checkpoints, and no files of others.

    Raises:
        ObjectStoreError: the object store cannot be changed.
    """
    files = _open(checkpoints)
    for name in files.names():
        if checkpoint_number(name) is not None or is_best_weights(name):
            files.delete(name)


class _Files(Protocol):
    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def delete(self, name: str) -> None: ...


class _Folder:
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        return [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


class _Objects:
    """The objects below a URL, by the client that fsspec has for it."""

    def __init__(self, url: str) -> None:
        self._url = url
        scheme = url.partition("://")[0]
        try:
            import fsspec

            self._fs, self._prefix = fsspec.core.url_to_fs(url, **_OPTIONS.get(scheme, {}))
        except (ImportError, ValueError) as error:
            raise ObjectStoreError(f"{url} cannot be read: {error}. For s3://, install s3fs") from error
        if scheme == "s3":
            self._fs.retries = 1

    def names(self) -> list[str]:
        try:
            entries = self._fs.ls(self._prefix, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        except Exception as error:  # each client has its own types of errors
            raise self._error(error) from error
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]

    def read(self, name: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(f"{self._prefix}/{name}"))
        except FileNotFoundError:
            raise  # A trainer has saved, and deleted it.
        except Exception as error:
            raise self._error(error) from error

    def delete(self, name: str) -> None:
        try:
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._prefix}/{name}")
        except Exception as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> ObjectStoreError:
        return ObjectStoreError(
            f"{self._url} cannot be read: {type(error).__name__}: {error}. Check the URL, and the "
            "credentials in the environment, such as AWS_ACCESS_KEY_ID"
        )


def _open(checkpoints: Path | str) -> _Files:
    return _Objects(checkpoints) if isinstance(checkpoints, str) else _Folder(checkpoints)
