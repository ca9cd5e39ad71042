"""The summaries of all jobs as a stream of server-sent events.

One task reads them for all clients, while there are any. A client gets all summaries first, then those that
have changed since the last event that it has read, so what is kept for a slow client is bounded.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial

from adascale_api.data.database import Database
from adascale_api.data.job import UnreadableJobError
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs, reports
from adascale_api.errors import UnavailableError
from adascale_core.views.job_summary import JobSummary, summarize

MAX_CLIENTS = 64
"""Clients with a token at the same time, and as many without one."""
MAX_JOBS = 5000
"""Jobs in the stream, the first by id."""
MIN_INTERVAL = 1.0
"""Seconds between two reads of the jobs."""
BYTES_PER_SECOND = 128 * 1024
"""Of all summaries: many jobs are read less frequently."""
KEEP_ALIVE = 15.0
"""Seconds without an event after which a comment is sent."""
MAX_SECONDS = 3600.0
"""Seconds after which a stream ends, so that a client whose token has expired has to connect again."""
PAGE_SIZE = 500
"""Jobs that are read in one transaction."""
PIECE = 64 * 1024
"""Bytes of an event that are sent together: the next piece follows once a client has read most of it."""

logger = logging.getLogger(__name__)


class Follower:
    """A client that follows a stream."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_ended = False
        """Whether another client has its place."""


class Followers:
    """A bounded number of clients that follow a stream, shared fairly by their addresses.

    When all places are taken, a client of another address gets the oldest place of the address that has most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._followers: list[Follower] = []

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, address: str) -> Follower:
        """Give a client a place."""
        if len(self._followers) >= self._limit:
            self._end_one(address)
        follower = Follower(address)
        self._followers.append(follower)
        return follower

    def remove(self, follower: Follower) -> None:
        """Give the place of a client back, unless another one has it."""
        if not follower.is_ended:
            self._followers.remove(follower)

    def _end_one(self, address: str) -> None:
        counts = Counter(each.address for each in self._followers)
        most, count = counts.most_common(1)[0]
        if count < counts[address] + 2:
            raise UnavailableError(
                f"{self._limit} clients follow the jobs already; try again later, or with a token that may "
                "read all jobs: clients with one have places of their own"
            )
        oldest = next(each for each in self._followers if each.address == most)
        self.remove(oldest)
        oldest.is_ended = True


class JobFeed:
    """The summaries of all jobs, for any number of clients."""

    def __init__(self, read: Callable[[], Awaitable[Mapping[str, JobSummary]]]) -> None:
        self._read = read
        self._readers = Followers(MAX_CLIENTS)
        self._anonymous = Followers(MAX_CLIENTS)
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._summaries: dict[str, bytes] = {}
        self._revisions: dict[str, int] = {}
        self._deleted: dict[str, int] = {}
        self._revision = 0
        self._error = ""
        self._events: dict[int, bytes] = {}
        self._next = asyncio.Event()

    def connect(self, address: str, *, is_reader: bool) -> "Subscription":
        """Return the subscription of a client, which it must end; a reader's token may read all jobs."""
        if self._closed:
            raise UnavailableError("the service is stopping; try again")
        followers = self._readers if is_reader else self._anonymous
        subscription = Subscription(self, followers, followers.add(address))
        self._wake()  # another client may have lost its place
        return subscription

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._next.set()

    async def events(self, follower: Follower) -> AsyncIterator[bytes]:
        """Return the events for a client, until another one has its place."""
        if self._task is None:
            self._task = asyncio.create_task(self._read_repeatedly())
        revision = 0
        error = ""
        ends_at = asyncio.get_running_loop().time() + MAX_SECONDS
        # Answers at once, also before the first read of the jobs.
        yield b"retry: 2000\n\n"
        while not (self._closed or follower.is_ended) and asyncio.get_running_loop().time() < ends_at:
            following = self._next
            if self._error != error:
                error = self._error
                yield b"event: problem\ndata: %b\n\n" % json.dumps(error).encode()
            if self._revision > revision:
                event, revision = self._event_since(revision), self._revision
                # All clients share the event, and no more than a piece is kept for each.
                for start in range(0, len(event), PIECE):
                    yield event[start : start + PIECE]
                # Returns once the client has read nearly all of it: the next event then has the latest state.
                yield b""
                continue
            try:
                await asyncio.wait_for(following.wait(), KEEP_ALIVE)
            except TimeoutError:
                yield b": no change\n\n"

    def disconnected(self) -> None:
        """Stop reading if no client is left."""
        if not self._readers and not self._anonymous and self._task is not None:
            self._task.cancel()
            self._task = None
            self._summaries, self._revisions, self._deleted, self._events = {}, {}, {}, {}
            self._revision = 0

    def _event_since(self, revision: int) -> bytes:
        """Return the event with what has changed since a revision; all summaries since revision 0."""
        event = self._events.get(revision)
        if event is None:
            kind = b"changes" if revision else b"all"
            changed = [self._summaries[job] for job, at in self._revisions.items() if at > revision]
            deleted = [job for job, at in self._deleted.items() if at > revision]
            event = b'event: %b\ndata: {"jobs":[%b],"deleted":%b,"truncated":%b}\n\n' % (
                kind,
                b",".join(changed),
                json.dumps(deleted).encode(),
                b"true" if len(self._summaries) >= MAX_JOBS else b"false",
            )
            self._events[revision] = event
        return event

    async def _read_repeatedly(self) -> None:
        while True:
            try:
                found = await self._read()
                self._publish({job: _encode(summary) for job, summary in found.items()})
            except UnavailableError as error:
                self._notify(str(error))
            except Exception:
                logger.exception("the jobs can't be read for the page, this is tried again")
                self._notify("the jobs can't be read; the service's log says why")
            size = sum(map(len, self._summaries.values()))
            await asyncio.sleep(max(MIN_INTERVAL, size / BYTES_PER_SECOND))

    def _publish(self, found: dict[str, bytes]) -> None:
        following = self._revision + 1
        changed = [job for job, summary in found.items() if self._summaries.get(job) != summary]
        deleted = [job for job in self._summaries if job not in found]
        is_first = self._revision == 0
        self._summaries = found
        for job in deleted:
            del self._revisions[job]
            self._deleted[job] = following
        for job in changed:
            self._revisions[job] = following
            self._deleted.pop(job, None)
        if len(self._deleted) > MAX_JOBS:
            self._deleted = dict(sorted(self._deleted.items(), key=lambda item: item[1])[-MAX_JOBS:])
        if changed or deleted or is_first:
            self._revision = following
            self._notify("")
        elif self._error:
            self._notify("")

    def _notify(self, error: str) -> None:
        if self._error == error and error:
            return
        self._error = error
        self._events = {}
        self._wake()

    def _wake(self) -> None:
        following, self._next = self._next, asyncio.Event()
        following.set()


class Subscription:
    """A client of the feed, which has its place until `end`."""

    def __init__(self, feed: JobFeed, followers: Followers, follower: Follower) -> None:
        self._feed = feed
        self._followers = followers
        self._follower = follower

    def events(self) -> AsyncIterator[bytes]:
        """Return the events."""
        return self._feed.events(self._follower)

    def end(self) -> None:
        """Give the place back."""
        self._followers.remove(self._follower)
        self._feed.disconnected()


async def read_summaries(database: Database) -> dict[str, JobSummary]:
    """Return the summaries of the first `MAX_JOBS` jobs of a database, by id."""
    found: dict[str, JobSummary] = {}
    after: str | None = ""
    while after is not None and len(found) < MAX_JOBS:
        page, after = await database.read(partial(_read_page, after=after), is_long=True)
        found |= page
    return found


def _read_page(transaction: Transaction, after: str) -> tuple[dict[str, JobSummary], str | None]:
    """Return a page of summaries, and the `after` of the next page; None after the last."""
    page = jobs.list_jobs(transaction, after, PAGE_SIZE)
    if not page.jobs:
        return {}, page.next
    latest = reports.latest_rows(transaction, after, page.jobs[-1].id)
    summaries = {}
    for job in page.jobs:
        try:
            report = reports.parse_report(job.id, latest.get(job.id))
        except UnreadableJobError as error:
            logger.error("%s", error)
        else:
            summaries[job.id] = summarize(job.id, job.spec, job.rendezvous, report, job.created_at)
    return summaries, page.next


def _encode(summary: JobSummary) -> bytes:
    return json.dumps(_rounded(asdict(summary)), separators=(",", ":")).encode()


def _rounded(members: dict[str, object]) -> dict[str, object]:
    """Return members without needless digits, which would be most of the bytes."""
    return {
        name: _rounded(value)
        if isinstance(value, dict)
        else float(f"{value:.6g}")
        if isinstance(value, float) and abs(value) < 1e9
        else round(value, 2)
        if isinstance(value, float)
        else value
        for name, value in members.items()
    }
