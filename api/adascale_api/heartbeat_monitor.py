"""Removes replicas whose heartbeat has expired."""

from collections.abc import Callable
from functools import partial

from adascale_api.change_notifier import ChangeNotifier
from adascale_api.database import Database
from adascale_api.store import replicas
from adascale_core.names import HEARTBEAT_TIMEOUT


class HeartbeatMonitor:
    """Removes the replicas whose heartbeat is older than `HEARTBEAT_TIMEOUT`.

    It removes none until the service itself has run for that time: while the service was stopped or the
    machine slept, agents could not send heartbeats.

    Args:
        database: stores the heartbeats.
        changes: notified of the jobs that change.
        clock: returns the time, in seconds since 1970.
    """

    def __init__(self, database: Database, changes: ChangeNotifier, clock: Callable[[], float]) -> None:
        self._database = database
        self._changes = changes
        self._clock = clock
        self._checked_at = clock()
        self._running_since = self._checked_at

    async def check(self) -> None:
        """Remove the replicas whose heartbeat has expired."""
        now = self._clock()
        if abs(now - self._checked_at) > HEARTBEAT_TIMEOUT / 2:
            self._running_since = now
        self._checked_at = now
        if now - self._running_since < HEARTBEAT_TIMEOUT:
            return
        if await self._database.read(partial(replicas.any_expired, now=now)):
            for job_id in await self._database.write(partial(replicas.remove_expired, now=now)):
                self._changes.notify(job_id)
