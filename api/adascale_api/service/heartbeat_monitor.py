"""Removes replicas whose agents no longer send heartbeats.

Heartbeats are kept in memory, with the time of a clock that is never set. Nothing is written first, so
they are recorded while the database is unavailable, and no replica is removed because the service could not
record its heartbeat. After a start, each replica has the whole timeout to send the next one.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import nsmallest

from adascale_api.data.database import Database
from adascale_api.data.job import StoredJob, skip_unreadable
from adascale_api.data.sql import Transaction
from adascale_api.data.store import heartbeats, jobs
from adascale_api.data.store.heartbeats import Counts
from adascale_api.errors import UnavailableError
from adascale_core.messages.registration import (
    Registration,
    heartbeat_interval,
    heartbeat_timeout,
    post_interval,
)
from adascale_core.names import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from adascale_core.rendezvous.rendezvous import EXITED_STATES


@dataclass
class _Heartbeat:
    """The last heartbeat of an agent."""

    place: tuple[int, int]  # the key of the job, and the replica
    instance: str
    received_at: float  # by the monitor's clock


class HeartbeatMonitor:
    """The heartbeats of the replicas of all jobs."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.interval = HEARTBEAT_INTERVAL
        """Seconds between two heartbeats of an agent, as the service asks for."""
        self.post_interval = post_interval(0)
        """Seconds between two requests with reports of a job, as the service asks for."""
        self._longest = HEARTBEAT_INTERVAL
        self._longest_at = clock()
        self._database = database
        self._clock = clock
        self._wall_clock = wall_clock
        self._jobs: dict[str, dict[int, _Heartbeat]] = {}
        self._checked_at = clock()
        self._is_loaded = False
        self._unread: set[str] = set()
        """The jobs that were deleted or changed by another service, and after a start all."""
        self._reading: set[str] = set()
        """Those that are being read."""
        # Where several services share the database:
        self._received: dict[tuple[int, int], str] = {}
        self._counts: Counts = {}

    def receive(self, job_id: str, registration: Registration) -> None:
        """Record the heartbeat of an agent that is registered already."""
        heartbeat = self._jobs.get(job_id, {}).get(registration.replica)
        # A replaced agent may still send heartbeats; they do not keep its successor alive.
        if heartbeat is not None and heartbeat.instance == registration.instance:
            heartbeat.received_at = self._clock()
            if self._database.connector.is_shared:
                self._received[heartbeat.place] = registration.instance

    @property
    def timeout(self) -> float:
        """Seconds without a heartbeat after which a replica is removed."""
        return heartbeat_timeout(self._longest)

    def ages(self, job_id: str) -> Mapping[int, float]:
        """Return the seconds since the last heartbeat of each replica of a job."""
        now = self._clock()
        return {rank: now - heartbeat.received_at for rank, heartbeat in self._jobs.get(job_id, {}).items()}

    def update(self, job_id: str, job: StoredJob | None) -> None:
        """Expect heartbeats of the replicas that a changed job has now; None to read it before the check."""
        if job is None:
            self._unread.add(job_id)
        else:
            for ids in (self._unread, self._reading):
                ids.discard(job_id)
            self._update_job(job)

    def reload(self) -> None:
        """Read all jobs before the next check, because changes by other services may have been missed."""
        self._is_loaded = False
        self._unread.update(self._jobs)

    async def check(self) -> None:
        """Remove the replicas whose heartbeats have expired."""
        await self._read_unread()
        if self._database.connector.is_shared:
            await self._exchange()
        # After what may fail: while this service can't learn of others' heartbeats, it removes no replica.
        now = self._clock()
        slept, self._checked_at = now - self._checked_at > HEARTBEAT_TIMEOUT / 2, now
        if slept:
            # The machine slept, or this process could not run, so it may have missed heartbeats.
            for heartbeats_of_job in self._jobs.values():
                for heartbeat in heartbeats_of_job.values():
                    heartbeat.received_at = now
        self._set_intervals(now)
        for job_id in [job_id for job_id in self._jobs if self._overdue(job_id)]:
            await self._expire(job_id)

    def _set_intervals(self, now: float) -> None:
        """Set the intervals by the number of replicas."""
        self.interval = heartbeat_interval(sum(map(len, self._jobs.values())))
        self.post_interval = post_interval(len(self._jobs))
        # An agent learns of a shorter interval with its next heartbeat only, after the longer one.
        if self.interval >= self._longest or now - self._longest_at > self.timeout:
            self._longest, self._longest_at = self.interval, now

    async def _read_unread(self) -> None:
        if not self._is_loaded:
            self._unread.update(await self._database.read(jobs.incomplete_ids))
            self._is_loaded = True
        while self._unread:
            together = [(job_id, job_id) for job_id in nsmallest(jobs.JOBS_TOGETHER, self._unread)]
            self._reading = {job_id for job_id, _ in together}
            self._unread -= self._reading
            read = set[str]()
            try:
                found, _, last = await self._database.read(
                    jobs.read_jobs, together, "", lambda *_of_jobs: lambda state: (state, 0)
                )
                read = {job_id for job_id in self._reading if job_id <= last}
            finally:
                self._unread |= self._reading - read
            states = {job.id: job for job in found}
            for job_id in read:
                if job_id in states:
                    self._update_job(states[job_id])
                else:
                    # Deleted, or not readable.
                    self._jobs.pop(job_id, None)

    async def _exchange(self) -> None:
        """Send the heartbeats that arrived here to the other services, and take theirs."""
        received, self._received = self._received, {}
        try:
            if received:
                await self._database.write(heartbeats.add, received=received)
            counts = await self._database.read(heartbeats.count)
        except UnavailableError:
            self._received = {**received, **self._received}
            raise
        now = self._clock()
        for of_job in self._jobs.values():
            for heartbeat in of_job.values():
                count, before = counts.get(heartbeat.place), self._counts.get(heartbeat.place)
                if count is not None and count[0] == heartbeat.instance and count != before:
                    heartbeat.received_at = now
        self._counts = counts

    async def _expire(self, job_id: str) -> None:
        def expire(transaction: Transaction, job_id: str) -> None:
            # Read again: a heartbeat may have arrived while this waited for the last commit.
            jobs.expire(transaction, job_id, self._overdue(job_id), self._wall_clock())

        with skip_unreadable():
            await self._database.write(expire, job_id=job_id)
            return
        self._jobs.pop(job_id, None)

    def _overdue(self, job_id: str) -> dict[int, str]:
        oldest = self._clock() - self.timeout
        return {
            rank: heartbeat.instance
            for rank, heartbeat in self._jobs.get(job_id, {}).items()
            if heartbeat.received_at < oldest
        }

    def _update_job(self, job: StoredJob) -> None:
        before, now = self._jobs.get(job.id, {}), self._clock()
        found = {}
        for rank, registration in ({} if job.rendezvous.complete else job.rendezvous.replicas).items():
            # An agent that has exited sends no heartbeats.
            if registration.state in EXITED_STATES:
                continue
            known = before.get(rank)
            if known is None or (known.place[0], known.instance) != (job.key, registration.instance):
                known = _Heartbeat((job.key, rank), registration.instance, now)
            found[rank] = known
        if found:
            self._jobs[job.id] = found
        else:
            self._jobs.pop(job.id, None)
