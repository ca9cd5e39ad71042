"""The check before a replica joins others: does it reach a member that trains?

Members wait for one that cannot connect to them until it is taken for lost, and it would be tried again and
again. So it is registered only when it can connect.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final

from adascale_core.messages.allocation import AllocationView, Member
from adascale_core.names import HEARTBEAT_TIMEOUT
from adascale_worker.errors import ReplicaCheckError

CONNECT_TIMEOUT: Final = 1.0
"""Seconds for one connection."""
PATIENCE: Final = HEARTBEAT_TIMEOUT + 10.0
"""Seconds after which a member that trains counts as out of reach. Its loss is noticed before."""


class LinkCheck:
    """Whether a new trainer's replica reaches the member of rank 0, to which all members connect."""

    def __init__(self, replica: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._replica = replica
        self._clock = clock
        self._passed = False
        self._failing: tuple[int, float] | None = None
        """The generation whose member was not reached, and since when."""

    def passes(self, view: AllocationView, *, is_current: bool) -> bool:
        """Connect to the member of rank 0, and return whether the replica may be registered.

        Without a generation that runs there is nobody to connect to, and nobody who would wait. If the
        replica is a member of it, its earlier trainer is lost, which the service learns by the registration.
        """
        member = None if self._passed else self._member(view)
        if member is None or view.active is None:
            return True
        try:
            socket.create_connection((member.address, member.port), CONNECT_TIMEOUT).close()
        except OSError as error:
            self._fail(member, view.active.generation, error, is_current=is_current)
            return False
        self._passed = True
        return True

    def _member(self, view: AllocationView) -> Member | None:
        """Return the member of rank 0 in the generation that runs without this replica; None if none does."""
        active = view.active
        if active is None or view.broken or view.complete or self._replica in active.indices:
            return None
        return next(iter(active.members), None)

    def _fail(self, member: Member, generation: int, error: OSError, *, is_current: bool) -> None:
        now = self._clock()
        if self._failing is None or self._failing[0] != generation or not is_current:
            self._failing = generation, now
        if now - self._failing[1] < PATIENCE:
            return
        node = f" on node {member.node}" if member.node else ""
        reason = error.strerror or str(error)
        raise ReplicaCheckError(
            f"it could not connect to replica {member.replica}{node}, which trains, at {member.address} "
            f"port {member.port} for {PATIENCE:.0f} s: {reason}. Check network policies, firewalls and the "
            "network of its node"
        )
