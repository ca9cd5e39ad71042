"""What the replicas announce to each other through the store of their process group.

That is no collective call: a replica that is lost meanwhile does not end the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from adascale_worker.errors import ReplicationError
from adascale_worker.membership.process_group import INIT_TIMEOUT, ReplicaGroup

FIRST_POLL, POLL_INTERVAL = 0.001, 0.02
"""Seconds between the first two readings of the store, and the most between later ones: the time doubles."""
FAILED = "failed"
"""The event that a replica announces with the message of an error which all replicas raise."""

Values = dict[int, Any]
"""The values of the ranks that have announced an event."""


class Board:
    """The values that replicas announce. They consist of what JSON has."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group

    def announce(self, event: str, value: Any = "") -> None:
        """Let the other replicas read a value. Does nothing if the store is gone."""
        self._group.announce(event, json.dumps(value))

    def fail(self, message: str) -> None:
        """Let the other replicas raise an error."""
        self.announce(FAILED, message)

    def retract(self, event: str, ranks: Iterable[int]) -> None:
        """Delete the values of some ranks, because they have been read."""
        self._group.retract(event, ranks)

    def read(self, event: str) -> Values | None:
        """Return the values that have come; None if the store is gone, with the process that serves it."""
        values = self._group.announced(event)
        if values is None:
            return None
        return {rank: json.loads(value) for rank, value in enumerate(values) if value is not None}

    def poll(
        self,
        *events: str,
        timeout: float = INIT_TIMEOUT.total_seconds(),
        is_over: Callable[[], bool] | None = None,  # None: once members are lost
    ) -> Iterator[list[Values]]:
        """Yield the values of some events, again and again, until the timeout, or until the store is gone.

        All processes of a replica get the same ones, equally often.
        """
        group, deadline, interval = self._group, time.monotonic() + timeout, FIRST_POLL
        while True:
            is_over_now = group.has_failed if is_over is None else is_over()
            # Before the last reading, which finds what others have announced before they were lost.
            is_last = not group.own.all(not is_over_now and time.monotonic() < deadline)
            values = [self.read(event) for event in events]
            found = [each for each in values if each is not None]
            if len(found) < len(values):
                return
            yield found
            if is_last:
                return
            time.sleep(interval)
            interval = min(2.0 * interval, POLL_INTERVAL)


def raise_failure(failed: Values) -> None:
    """Raise the error that another replica has announced, if one has."""
    for message in failed.values():
        raise ReplicationError(message)
