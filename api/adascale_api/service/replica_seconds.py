"""The seconds of replicas that agents send with their heartbeats, until they are stored together."""

from collections.abc import Callable

from adascale_api.data.database import Database
from adascale_api.data.sql import Transaction
from adascale_api.data.store import replica_seconds
from adascale_core.messages.registration import Heartbeat
from adascale_core.messages.replica_seconds import ReplicaSeconds

STORE_INTERVAL = 5.0
"""Seconds between two commits."""


class ReceivedSeconds:
    """What was received since the last commit. The database is not written for a heartbeat alone."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._received: dict[tuple[str, str], ReplicaSeconds] = {}

    def receive(self, job_id: str, heartbeat: Heartbeat) -> None:
        """Keep the seconds of an agent."""
        if heartbeat.seconds:
            self._received[job_id, heartbeat.agent] = heartbeat.seconds

    def forget(self, job_id: str) -> None:
        """Forget what was received of a job that is deleted."""
        for place in [place for place in self._received if place[0] == job_id]:
            del self._received[place]

    async def store(self) -> None:
        """Store what was received."""
        received, self._received = self._received, {}
        if not received:
            return

        def store(transaction: Transaction) -> None:
            replica_seconds.store(transaction, received, self._clock())
            replica_seconds.add_points(transaction, {job_id for job_id, _ in received}, self._clock())

        try:
            await self._database.write(store)
        except BaseException:
            self._received = {**received, **self._received}
            raise
