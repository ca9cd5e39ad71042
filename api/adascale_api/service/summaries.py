"""Documents that the page reads again and again, such as the summaries of all jobs."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pydantic import TypeAdapter

from adascale_api.data.job import StoredJob
from adascale_api.data.sql import Transaction
from adascale_api.data.store import reports
from adascale_core.views.job_summary import JobSummary, summarize

MAX_JOBS = 5000
"""Jobs in the document, the first by id."""
MAX_AGE = 0.7
"""Seconds for which all clients get the same document."""
INTERVAL = 2.0
"""Seconds between two requests of a page."""
JOBS_PER_SECOND = 300.0
"""Of a document, for a page: large documents are read, and asked for, less frequently."""


@dataclass(frozen=True)
class SummaryList:
    """The summaries of all jobs."""

    jobs: list[JobSummary]
    truncated: bool  # whether there may be more jobs
    interval: float  # seconds after which a page asks again


_list = TypeAdapter(SummaryList)


class Document(NamedTuple):
    """What many clients read."""

    content: bytes
    etag: str
    seconds: float  # for which all clients get it


class Documents:
    """Makes each document once for all clients that ask for it at about the same time."""

    def __init__(self) -> None:
        self._made: dict[object, asyncio.Task[Document]] = {}

    async def get(self, key: object, make: Callable[[], Coroutine[None, None, Document]]) -> Document:
        """Return the document with a key; errors as for `make`."""
        task = self._made.get(key)
        if task is None:
            task = self._made[key] = asyncio.create_task(make())
            task.add_done_callback(partial(self._expire, key))
        # Other requests wait for the same document, so a request that is cancelled must not cancel it.
        return await asyncio.shield(task)

    def _expire(self, key: object, made: asyncio.Task[Document]) -> None:
        if made.cancelled() or made.exception() is not None:
            del self._made[key]
        else:
            asyncio.get_running_loop().call_later(made.result().seconds, self._made.pop, key)


async def make_summaries(read: Callable[[], Awaitable[list[JobSummary]]]) -> Document:
    """Return the document of all summaries."""
    found = await read()
    interval = max(INTERVAL, len(found) / JOBS_PER_SECOND)
    content = _list.dump_json(SummaryList(found, len(found) >= MAX_JOBS, interval))
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Document(content, etag, max(MAX_AGE, interval - INTERVAL))


def summary_reader(
    transaction: Transaction, ids: Sequence[str]
) -> Callable[[StoredJob], tuple[JobSummary, int]]:
    """Return what makes the summary of one of these jobs."""
    latest = reports.latest_reports(transaction, ids)
    return lambda job: (summarize(job.id, job.spec, job.rendezvous, latest(job.id), job.created_at), 0)
