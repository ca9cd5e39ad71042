"""Memory in which a trainer keeps copies of its state, and which its death does not release."""

from __future__ import annotations

import os
from typing import Final

from adascale_core.names import SNAPSHOT_FILE

_COUNT = 2
"""A copy is written over the older one of two."""
_MFD_NOEXEC_SEAL: Final = 0x8
"""Of linux/memfd.h, since Linux 6.3: the file can never be executed."""


def make_snapshot_files() -> str:
    """Make files without a name, in memory, and return their paths, separated by colons.

    They are empty until a trainer writes, and exist as long as this process, which keeps them open. Unlike
    files in /dev/shm, they are limited by the memory of the container only. The path is empty if the system
    has no such files, which is reported.
    """
    try:
        descriptors = [_make_file() for _ in range(_COUNT)]
    except (OSError, AttributeError) as error:
        print(
            f"adascale-agent: this system has no files in memory ({error}), so no copy of the state is "
            "kept: if the only replica is lost, training continues from the last checkpoint",
            flush=True,
        )
        return ""
    return ":".join(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors)


def _make_file() -> int:
    try:
        return os.memfd_create(SNAPSHOT_FILE, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        # An older kernel does not know the flag.
        return os.memfd_create(SNAPSHOT_FILE)
