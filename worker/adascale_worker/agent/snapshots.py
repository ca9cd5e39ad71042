"""The copies of the state in the memory of an agent: of its own trainer, or of the only one that trains.

A trainer that is the only member writes them itself. While the trainer waits for a generation, the agent
gets those of the agent of the only member. So there is one writer at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from adascale_core.messages.allocation import ActiveAllocation, AllocationView
from adascale_core.rendezvous.instruction import others_keep_state, snapshot_source
from adascale_worker.agent.snapshot_files import make_snapshot_files
from adascale_worker.agent.snapshot_receiver import SnapshotReceiver
from adascale_worker.agent.snapshot_server import SnapshotServer


class Snapshots:
    """Keeps the copies, and exchanges them with the agents of other replicas."""

    def __init__(
        self, replica: int, address: str, key: Callable[[], str], on_change: Callable[[], None]
    ) -> None:
        self._replica = replica
        self.files = make_snapshot_files()
        """The paths of the files with the copies, separated by colons; empty without files."""
        paths = self.files.split(":") if self.files else []
        self._server = SnapshotServer(paths, address, key) if paths else None
        self._receiver = SnapshotReceiver(paths, key, on_change) if paths else None

    @property
    def port(self) -> int:
        """Where the agents of other replicas get copies; 0 if nowhere."""
        return self._server.port if self._server is not None else 0

    def follow(self, view: AllocationView) -> None:
        """Copy the state of the only member from now on, while the own trainer waits for a generation."""
        if self._receiver is None or (view.active is not None and self._replica in view.active.indices):
            return
        if others_keep_state(view, self._replica):
            self._receiver.release()
        else:
            self._receiver.follow(snapshot_source(view, self._replica))

    def is_ready(self, active: ActiveAllocation) -> bool:
        """Whether the own trainer can be assigned to this generation: nothing is written from then on.

        If it is to continue alone, the agent of the member before may remain, and have a later copy.
        """
        if self._receiver is None:
            return True
        if len(active.members) == 1 and not active.has_state and not self._receiver.finish():
            return False
        self._receiver.stop()
        return True
