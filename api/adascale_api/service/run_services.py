"""The running and ended runs on this machine, which `adascale ui` shows.

The state folder of each run has the database of a metrics service. It is only read here, also while the run's
own service writes it, so a run may begin and end at any time.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from adascale_api.auth.authorization import Authorizer
from adascale_api.data.backend import UnusableDatabaseError
from adascale_api.data.database import Database
from adascale_api.data.job import UnreadableJobError
from adascale_api.data.sql import Transaction
from adascale_api.data.sqlite import SqliteReader
from adascale_api.data.store import jobs
from adascale_api.errors import NotFoundError, UnavailableError
from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.service.service import Service, Settings
from adascale_api.service.summaries import Documents, summary_reader
from adascale_core.errors import UsageError
from adascale_core.names import DEFAULT_NAMESPACE
from adascale_core.rendezvous.rendezvous import Rendezvous
from adascale_core.views.job_summary import JobStateName, JobSummary, RunEntry, summarize
from adascale_core.views.usage import UsedReplicas

MAX_OPEN = 32
"""Databases that are open at the same time."""

logger = logging.getLogger(__name__)


def read_entries(path: Path) -> list[RunEntry]:
    """Return the entries of a list of runs."""
    try:
        return [RunEntry.from_json(members) for members in json.loads(path.read_text())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the list of runs {path} can't be read: {error}") from None


_Read = tuple[JobSummary | None, str]
"""What was read from the database of a run, and why it could not be read."""


class RunServices:
    """The runs of a list, each with a service that only reads."""

    def __init__(
        self,
        path: Path,
        authorizer: Authorizer | None,
        connections: ConnectionLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.authorizer = authorizer
        self.settings = Settings()
        self.connections = connections
        self.documents = Documents()
        self.clock = clock
        self._path = path
        self._entries = {entry.id: entry for entry in read_entries(path)}
        self._ended: dict[str, tuple[RunEntry, _Read]] = {}
        """The runs that have ended, and what was read of them, by id."""
        self._places = asyncio.Semaphore(MAX_OPEN)

    async def summaries(self) -> list[JobSummary]:
        """Return the summary of each run."""
        await self._read_list()
        entries = self._entries
        self._ended = {run: self._ended[run] for run in entries if run in self._ended}
        stored = await asyncio.gather(*map(self._read_stored, entries.values()))
        return [_of_run(entry, each) for entry, each in zip(entries.values(), stored, strict=True)]

    @asynccontextmanager
    async def open(self, run: str) -> AsyncIterator[tuple[str, Service]]:
        """Return the job of a run, and a service that reads it, which is open meanwhile."""
        await self._read_list()
        entry = self._find(run)
        async with self._database(entry) as database:
            settings = Settings(logs=Path(entry.logs))
            yield (
                entry.job,
                Service(database, self.authorizer, settings, connections=self.connections, clock=self.clock),
            )

    @asynccontextmanager
    async def _database(self, entry: RunEntry) -> AsyncIterator[Database]:
        async with self._places:
            try:
                database = Database(await asyncio.to_thread(SqliteReader, Path(entry.database)))
            except UnusableDatabaseError as error:
                raise UnavailableError(str(error)) from None
            try:
                yield database
            finally:
                await database.close()

    async def used_replicas(self, since: float, now: float) -> list[UsedReplicas]:
        """Return the replicas that the runs have used since a time, by the ids of the runs."""

        async def used(entry: RunEntry) -> list[UsedReplicas]:
            if entry.run.ended_at is not None and entry.run.ended_at < since:
                return []
            try:
                async with self._database(entry) as database:
                    found = await database.read_long(jobs.used_replicas, since, now)
            except UnavailableError:
                return []
            end = now if entry.state is None else entry.run.ended_at or now
            return [
                replace(each, job=entry.id, end=min(each.end, end)) for each in found if each.job == entry.job
            ]

        parts = await asyncio.gather(*map(used, self._entries.values()))
        return [each for part in parts for each in part]

    async def _read_list(self) -> None:
        try:
            entries = await asyncio.to_thread(read_entries, self._path)
        except UsageError as error:
            raise UnavailableError(str(error)) from None
        self._entries = {entry.id: entry for entry in entries}

    def _find(self, run: str) -> RunEntry:
        if run in self._entries:
            return self._entries[run]
        job = run if "." in run else f"{DEFAULT_NAMESPACE}.{run}"
        of_job = [entry for entry in self._entries.values() if entry.job == job]
        if not of_job:
            raise NotFoundError(f"there is no run {run} here: `adascale list` lists the runs on this machine")
        # When a run ended that was killed is not known.
        return max(of_job, key=lambda entry: (entry.state is None, entry.began_at))

    async def _read_stored(self, entry: RunEntry) -> _Read:
        """Read the summary of a run, once if it has ended."""
        known, read = self._ended.get(entry.id, (None, (None, "")))
        if known == entry:
            return read
        try:
            async with self._database(entry) as database:
                found: _Read = await database.read_long(_summary, entry.job), ""
        except NotFoundError:
            found = None, ""
        except (UnavailableError, UnreadableJobError) as error:
            return None, str(error)
        except Exception as error:
            # Values that no service has written must not hide the other runs.
            logger.warning("%s can't be read", entry.database, exc_info=True)
            return None, f"{entry.database} can't be read ({type(error).__name__}: {error})"
        if entry.state is not None:
            self._ended[entry.id] = entry, found
        return found


def _summary(transaction: Transaction, job_id: str) -> JobSummary:
    """Return the summary of a job."""
    return summary_reader(transaction, [job_id])(jobs.find_job(transaction, job_id))[0]


def _of_run(entry: RunEntry, read: _Read) -> JobSummary:
    """Return the summary of a run: what its service has stored, and what is known besides that."""
    summary, problem = read
    run = replace(entry.run, reason=entry.run.reason or problem)
    found = replace(
        summary
        or replace(summarize(entry.job, None, Rendezvous(), None, run.began_at), state=JobStateName.STARTING),
        id=entry.id,
        run=run,
    )
    if entry.state is None:
        return found
    # A run that was killed has stored no end.
    ended = replace(found, replicas=0, spares=0, desired=None, seconds_left=None, slowness="")
    return replace(ended, state=entry.state)
