"""A lock on a folder into which several processes would download the same files."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from adascale_worker.errors import WorkerError

INTERVAL = 0.1
"""Seconds between two attempts to lock."""
PATIENCE = 10
"""Attempts after which a process that waits says so: the holder has written its id by then."""


@contextlib.contextmanager
def download_lock(folder: str | Path) -> Iterator[bool]:
    """Lock a folder, see `ElasticTrainer.download_lock`."""
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path / ".adascale-download-lock")
    except OSError as error:
        raise WorkerError(
            f"download_lock() cannot lock the folder {path}: {error.strerror}. Use a folder that can be "
            "written, on a file system with file locks"
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


def _lock(file: Path) -> int:
    """Return the descriptor of a file, once no other process has locked it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        for attempt in itertools.count():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if attempt == PATIENCE:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                print(
                    f"adascale: waiting for process {holder}, which has locked {file.parent} by "
                    "download_lock()",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(INTERVAL)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise
