"""Where checkpoints are stored: files that never change, in a folder or in an object store.

The worker writes and reads them; `adascale run` and the commands beside it read and delete them. This package
may import `adascale_core` and fsspec. It does not know what is in the files. `open_storage` chooses the
implementation by the location. Only `object_store` imports fsspec, because a folder must work without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from adascale_core.errors import AdaScaleError

Part = bytes | memoryview
"""A part of a file's content."""


class UnusableStorageError(AdaScaleError):
    """The storage can never be used: the URL is invalid, or the client or the store lacks something."""


class StorageError(Exception):
    """The storage cannot be read or written. The message is the reason, for the end of a sentence."""


class StorageFullError(StorageError):
    """The storage has no space left, or a quota is used up."""


class MissingFileError(StorageError):
    """There is no file of this name."""


class WriteCancelledError(Exception):
    """The source of a file's content has given up."""


class NameTakenError(StorageError):
    """A file of this name exists already."""


class Storage(Protocol):
    """Files by name. A file has its whole content or does not exist, and does not change.

    Every method raises StorageError if the storage does not work.
    """

    def __str__(self) -> str:
        """Return the location, for messages."""

    def path(self, name: str) -> str:
        """Return the location of a file, for messages."""

    def names(self) -> list[str]:
        """Return the names of all files; an empty list if nothing was ever written."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes from `start` to `end`, or fewer if the file is shorter.

        Raises MissingFileError if there is no such file.
        """

    def write(self, name: str, parts: Iterable[Part], *, size: int) -> None:
        """Write a file of `size` bytes, and return when it is durable. No other process uses its name.

        An error, also of `parts`, leaves no file.
        """

    def create(self, name: str, content: bytes) -> None:
        """Write a file, and return when it is durable. Raises NameTakenError if a file has its name.

        Of several processes that create the same name, only one succeeds.
        """

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""


_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(location: str | Path) -> bool:
    """Whether a location is the URL of an object store rather than a folder."""
    return isinstance(location, str) and _URL.match(location) is not None


def open_storage(location: str | Path, *, person_waits: bool = False) -> Storage:
    """Return the storage at a location, which is not read or written yet.

    If a person waits, an object store that does not answer is given up early. Raises UnusableStorageError if
    there is no client for this kind of URL, or the URL is invalid.
    """
    if is_url(location):
        from adascale_storage.object_store import ObjectStore

        return ObjectStore(str(location), person_waits=person_waits)
    from adascale_storage.folder import Folder

    return Folder(Path(location).expanduser().absolute())
