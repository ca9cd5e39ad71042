"""The check before a replica joins others: does it reach a member that trains?

The members of a generation wait for one that cannot connect until it is taken for lost, and would do so again
in the next generation. So a replica is registered only when it can connect.
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
"""Seconds after which a member counts as unreachable. If it were lost, that would be noticed earlier."""


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

        Without a running generation there is no member to connect to. If the replica is itself a member, its
        earlier trainer is lost, and the registration reports that to the service.
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
