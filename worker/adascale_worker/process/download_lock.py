"""A lock on a folder into which several processes would download the same files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from adascale_worker.errors import WorkerError

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


@contextlib.contextmanager
def download_lock(folder: str | Path) -> Iterator[bool]:
    """Lock a folder, see `ElasticTrainer.download_lock`."""
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
    except OSError as error:
        raise WorkerError(
            f"download_lock() cannot lock the folder {path}: {error.strerror}. Use a folder that can be "
            "written"
        ) from None
    try:
        # The lock of a process that is killed is released by the kernel, and leaves its id.
        was_interrupted = bool(os.pread(descriptor, 32, 0))
        os.pwrite(descriptor, f"{os.getpid():<20}".encode(), 0)
        yield was_interrupted
        os.ftruncate(descriptor, 0)
    finally:
        # Processes that were forked meanwhile have the descriptor too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Return the descriptor of a locked file: in the folder, or if it has no file locks, of this machine."""
    try:
        return _lock(path / ".adascale-download-lock", path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    return _lock(Path(tempfile.gettempdir()) / f"adascale-download-{os.getuid()}-{name}", path)


def _lock(file: Path, folder: Path) -> int:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            print(
                f"adascale: waiting for process {holder}, which has locked {folder} by download_lock()",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise
