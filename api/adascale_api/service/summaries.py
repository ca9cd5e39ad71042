"""The summaries of all jobs as one JSON document, which the page reads again and again."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from adascale_api.data.database import Database
from adascale_api.data.job import StoredJob
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs, reports
from adascale_core.views.job_summary import JobSummary, summarize

MAX_JOBS = 5000
"""Jobs in the document, the first by id."""
MAX_AGE = 0.7
"""Seconds for which all clients get the same document."""
INTERVAL = 2.0
"""Seconds between two requests of a page."""
JOBS_PER_SECOND = 300.0
"""Of a document, for a page: large documents are read, and asked for, less frequently."""
PAGE_SIZE = 500
"""Jobs that are read in one transaction."""


@dataclass(frozen=True)
class SummaryList:
    """The summaries of all jobs."""

    jobs: list[JobSummary]
    truncated: bool  # whether there may be more jobs
    interval: float  # seconds after which a page asks again


_list = TypeAdapter(SummaryList)


Document = tuple[bytes, str]
"""What a page reads, and its `ETag`: it reads it only if it does not have it already."""


class Summaries:
    """Reads the summaries once for all clients that ask at about the same time."""

    def __init__(self, read: Callable[[], Awaitable[list[JobSummary]]]) -> None:
        self._read = read
        self._task: asyncio.Task[Document] | None = None
        self._expires_at = 0.0

    async def get(self) -> Document:
        """Return the document of at most `MAX_AGE` seconds ago; errors as for the read."""
        now = asyncio.get_running_loop().time()
        if self._task is None or (self._task.done() and (now >= self._expires_at or self._task.exception())):
            self._task = asyncio.create_task(self._make())
        # Other requests wait for the same read, so a request that is cancelled must not cancel it.
        return await asyncio.shield(self._task)

    async def _make(self) -> Document:
        found = await self._read()
        interval = max(INTERVAL, len(found) / JOBS_PER_SECOND)
        self._expires_at = asyncio.get_running_loop().time() + max(MAX_AGE, interval - INTERVAL)
        content = _list.dump_json(SummaryList(found, len(found) >= MAX_JOBS, interval))
        return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


async def read_summaries(database: Database) -> list[JobSummary]:
    """Return the summaries of the first `MAX_JOBS` jobs of a database, by id."""
    found: list[JobSummary] = []
    after: str | None = ""
    while after is not None and len(found) < MAX_JOBS:
        page, after = await database.read_long(jobs.list_jobs, after, PAGE_SIZE, summary_reader)
        found += page
    return found


def summary_reader(
    transaction: Transaction, ids: Sequence[str]
) -> Callable[[StoredJob], tuple[JobSummary, int]]:
    """Return what makes the summary of one of these jobs."""
    latest = reports.latest_reports(transaction, ids)
    return lambda job: (summarize(job.id, job.spec, job.rendezvous, latest(job.id), job.created_at), 0)
