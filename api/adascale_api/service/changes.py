"""Changes of jobs: the log of the jobs that have changed, and the requests that wait for a change."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from itertools import islice, takewhile
from uuid import uuid4
from weakref import WeakValueDictionary

from adascale_api.errors import RequestError, UnavailableError

MAX_ANONYMOUS_WAITS = 256
"""Requests without a token that may wait at the same time. Connections whose requests wait are not closed in
favour of new ones, so anonymous requests must not take all of them."""
MAX_ANONYMOUS_FOLLOWERS = 16
"""Requests without a token that may wait for a change of any job: each reads the jobs after a change."""
_ANY = ""
"""In place of a job id: any job."""
MAX_ENTRIES = 20_000
"""The number of jobs in the log: the jobs that have changed last."""

Closed = asyncio.Future[None] | None
"""Is done once a client has left; None if that is not known."""


@asynccontextmanager
async def one_of(places: asyncio.Semaphore, *, counts: bool) -> AsyncIterator[None]:
    """Take a place while a request waits, if it `counts`; refuse it if all places are taken."""
    if counts and places.locked():
        raise UnavailableError(
            "as many requests as may wait without a token that may read the job do already: send a token, "
            "or try again without `wait`"
        )
    async with places if counts else nullcontext():
        yield


class CursorExpiredError(RequestError):
    """The log does not have all changes since a cursor."""

    status = 410

    def __init__(self) -> None:
        super().__init__(
            "the cursor has expired: it is of another service, from before its restart, or too old; "
            "read all jobs again, whose pages have a new cursor"
        )


class ChangeLog:
    """The jobs that have changed since this service started, or began to learn of others' changes, in order.

    It wakes the requests that wait for a change. A cursor is a position in this log, which is in memory. A
    client whose cursor is of another service, from before a restart, or older than the log, reads all jobs.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._closed = False
        # Waiting requests hold the futures, so a job without waiting requests leaves no entry.
        self._waits: WeakValueDictionary[str, asyncio.Future[None]] = WeakValueDictionary()
        self._begin()

    def _begin(self) -> None:
        self._id = uuid4().hex
        self._changes: OrderedDict[str, int] = OrderedDict()
        """The number of the last change of each job, the latest last."""
        self._last = 0
        self._forgotten = 0
        """The number of the last change that is no longer in the log."""

    @property
    def cursor(self) -> str:
        """The cursor after the last change."""
        return self._cursor(self._last)

    def add(self, job_id: str) -> None:
        """Record that a job was changed or deleted, after the commit."""
        self._last += 1
        self._changes[job_id] = self._last
        self._changes.move_to_end(job_id)
        if len(self._changes) > self._max_entries:
            _, self._forgotten = self._changes.popitem(last=False)
        self._wake(job_id)
        self._wake(_ANY)

    def restart(self) -> None:
        """Begin a new log, because changes may have been missed: all cursors expire."""
        self._begin()
        self._wake_all()

    def close(self) -> None:
        """Wake all waiting requests; later ones do not wait."""
        self._closed = True
        self._wake_all()

    def since(self, cursor: str, limit: int) -> list[tuple[str, str]]:
        """Return at most `limit` jobs that have changed since a cursor, the first to change first.

        Each has the cursor after its change. The state of a job has to be read after this call.
        """
        after = self._position(cursor)
        # From the end: most clients ask for the latest few of many changes.
        found = list(takewhile(lambda change: change[1] > after, reversed(self._changes.items())))
        return [(job_id, self._cursor(number)) for job_id, number in islice(reversed(found), limit)]

    async def wait(self, cursor: str, seconds: float, closed: Closed = None) -> None:
        """Wait until there is a change after a cursor, or the cursor expires, or for `seconds`."""

        async def has_changed() -> bool:
            return self._position(cursor) != self._last

        await self.wait_until(has_changed, _ANY, seconds, closed)

    async def wait_until(
        self, condition: Callable[[], Awaitable[bool]], job_id: str, seconds: float, closed: Closed = None
    ) -> None:
        """Wait for a condition that a change of a job may fulfil, but not after the client has left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            # Subscribed before the condition is read, so that no change in between is missed.
            change = self._waits.get(job_id)
            if change is None:
                change = self._waits[job_id] = loop.create_future()
            if await condition() or self._closed or (closed is not None and closed.done()):
                return
            remaining = deadline - loop.time()
            if remaining <= 0:
                return
            ends = [change] if closed is None else [change, closed]
            await asyncio.wait(ends, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)

    def _position(self, cursor: str) -> int:
        log_id, _, number = cursor.partition("-")
        if log_id != self._id or not number.isdecimal():
            raise CursorExpiredError
        position = int(number)
        if not self._forgotten <= position <= self._last:
            raise CursorExpiredError
        return position

    def _cursor(self, number: int) -> str:
        return f"{self._id}-{number}"

    def _wake(self, job_id: str) -> None:
        change = self._waits.pop(job_id, None)
        if change is not None and not change.done():
            change.set_result(None)

    def _wake_all(self) -> None:
        for job_id in list(self._waits):
            self._wake(job_id)
