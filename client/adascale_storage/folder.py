"""Storage in a folder of a file system that the replicas share."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from adascale_core.checkpoint_manifest import draft_file_name
from adascale_storage import MissingFileError, NameTakenError, Part, StorageError, StorageFullError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EINVAL}
"""Errors of a file system without hard links, such as an object store that is mounted as a folder."""
_CANNOT_FLUSH_FOLDERS = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""Errors of a file system that flushes only files, such as some SMB shares."""


class Folder:
    """A folder. Each file is written as a draft, flushed to disk, and then gets its name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __str__(self) -> str:
        return str(self.directory)

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.directory / name)

    def names(self) -> list[str]:
        """Return the names of all files, drafts included."""
        try:
            return [path.name for path in self.directory.iterdir()]
        except FileNotFoundError as error:
            _require_no_broken_link(self.directory, error)
            return []
        except OSError as error:
            raise StorageError(reason(error)) from error

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return a part of a file."""
        try:
            with (self.directory / name).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size if end is None else end
                file.seek(start)
                parts = []
                while start < size and (part := file.read(size - start)):
                    parts.append(part)
                    start += len(part)
                return parts[0] if len(parts) == 1 else b"".join(parts)
        except FileNotFoundError as error:
            raise MissingFileError(reason(error)) from error
        except OSError as error:
            raise StorageError(f"{name}: {reason(error)}") from error

    def create(self, name: str, content: bytes) -> None:
        """Write a file if no file has its name."""
        self.write(name, [content], size=len(content))

    def write(self, name: str, parts: Iterable[Part], *, size: int) -> None:  # noqa: ARG002
        """Write a file under a draft name, flush it, and give it its name if the name is free."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self.directory / name
            draft = path.with_name(draft_file_name(name, secrets.token_hex(4)))
            file = draft.open("xb", buffering=0)
            try:
                for part in parts:
                    view = memoryview(part)
                    while view:
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
                file.close()
                _rename_to_free_name(draft, path)
                _flush_folder(self.directory)
            except BaseException:
                # Closing can fail too, if the disk has no space for the data.
                with contextlib.suppress(OSError):
                    file.close()
                with contextlib.suppress(OSError):
                    draft.unlink(missing_ok=True)
                raise
        except OSError as error:
            kind = StorageFullError if error.errno in _FULL else StorageError
            raise kind(reason(error)) from error

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        try:
            (self.directory / name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(reason(error)) from error


def _rename_to_free_name(draft: Path, path: Path) -> None:
    """Rename a file if no file has the new name, in one operation where the file system can do that.

    Raises NameTakenError if others have deleted the draft, to make room or after many later files.
    """
    try:
        try:
            path.hardlink_to(draft)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            draft.replace(path)
        else:
            draft.unlink(missing_ok=True)
    except FileNotFoundError as error:
        raise NameTakenError("another process has deleted its draft") from error
    except FileExistsError as error:
        raise NameTakenError(reason(error)) from error


def _flush_folder(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def _require_no_broken_link(directory: Path, missing: FileNotFoundError) -> None:
    """Check that a folder is not missing because what a link leads to is not mounted."""
    for path in (directory, *directory.parents):
        if path.is_symlink() and not path.exists():
            raise StorageError(f"{path} is a link to {path.readlink()}, which does not exist") from missing


def reason(error: OSError) -> str:
    """Return the operating system's message of an error."""
    return error.strerror or f"{type(error).__name__}: {error}"
