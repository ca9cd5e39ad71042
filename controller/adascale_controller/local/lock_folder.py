"""The folder for files that need file locks: the state folder itself, or one of this machine.

Some network file systems have no file locks, such as Lustre that is mounted without `-o flock`, or NFS
without its lock daemon. There the lock of a run and the database of the metrics service, for which SQLite
needs locks, are in a folder of this user for temporary files. The lock then excludes other runs on this
machine only.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


def lock_folder(path: Path) -> Path:
    """Return the folder for files of a state folder that need file locks."""
    if not path.is_dir():
        return path
    return _lock_folder(path.resolve()) or path


@lru_cache(maxsize=256)
def _lock_folder(path: Path) -> Path | None:
    """Return a folder of this machine if a state folder has no file locks, else None."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
            return Path(tempfile.gettempdir()) / f"adascale-{os.getuid()}" / name
    return None
