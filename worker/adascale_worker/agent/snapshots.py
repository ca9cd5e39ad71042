"""The copies of the state in the memory of an agent: of its own trainer, or of the only one that trains.

A trainer that is the only member writes them itself. While the trainer waits for a generation, the agent
gets the copies of the only member from its agent. So there is one writer at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from adascale_core.messages.allocation import ActiveAllocation, AllocationView
from adascale_core.names import SNAPSHOT_FILE
from adascale_core.rendezvous.instruction import others_keep_state, snapshot_source
from adascale_worker.agent.snapshot_exchange import SnapshotServer, SnapshotTransfers
from adascale_worker.process.resource_limits import unused_memory
from adascale_worker.process.snapshot_place import SnapshotPlace

_COUNT = 2
"""Number of files: a copy replaces the older one of two."""
_MFD_NOEXEC_SEAL: Final = 0x8
"""Of linux/memfd.h, since Linux 6.3: the file can never be executed."""


def make_snapshot_files() -> str:
    """Make files without a name, in memory, and return their paths, separated by colons; empty on failure.

    This process keeps them open. Unlike files in /dev/shm, only the memory of the container limits them.
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


class Snapshots:
    """Keeps the copies, and exchanges them with the agents of other replicas."""

    def __init__(
        self,
        replica: int,
        address: str,
        key: Callable[[], str],  # returns the secret of the job's members; empty if it is not known yet
        on_change: Callable[[], None],  # called in a thread when `is_ready` may return another value
        available: Callable[[], float] = unused_memory,
    ) -> None:
        self._replica = replica
        self._key = key
        self._on_change = on_change
        self._available = available
        self.files = make_snapshot_files()
        """The paths of the files with the copies, separated by colons; empty without files."""
        paths = self.files.split(":") if self.files else []
        self._places = [SnapshotPlace(path) for path in paths]
        self.port = SnapshotServer(paths, address, key).port if paths else 0
        """The port at which the agents of other replicas get copies; 0 without copies."""
        self._transfers: SnapshotTransfers | None = None

    def follow(self, view: AllocationView) -> None:
        """Copy the state of the only member from now on, while the own trainer waits for a generation."""
        if not self._places or (view.active is not None and self._replica in view.active.indices):
            return
        if others_keep_state(view, self._replica):
            self._stop()
            for place in self._places:
                with place.locked(exclusively=True) as is_free:
                    if is_free and place.used:
                        place.release()
            return
        source = snapshot_source(view, self._replica)
        if self._transfers is None or self._transfers.source != source:
            self._stop()
            if source is not None:
                self._transfers = SnapshotTransfers(
                    source, self._places, self._key, self._on_change, self._available
                )

    def is_ready(self, active: ActiveAllocation) -> bool:
        """Whether the own trainer can be assigned to this generation: nothing is written from then on.

        If it is to continue alone, the agent of the member before may remain, and have a later copy.
        """
        if self._transfers is None:
            return True
        if len(active.members) == 1 and not active.has_state and not self._transfers.finish():
            return False
        self._stop()
        return True

    def _stop(self) -> None:
        if self._transfers is not None:
            self._transfers.stop()
            self._transfers = None
