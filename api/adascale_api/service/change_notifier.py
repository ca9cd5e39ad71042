"""Long polling: requests that wait until a job changes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from adascale_api.errors import UnavailableError


class Versioned(Protocol):
    """What has a version."""

    @property
    def version(self) -> int:
        """Rises with every change."""
        ...


V = TypeVar("V", bound=Versioned)


MAX_ANONYMOUS_WAITS = 256
"""Requests without a token that may wait at the same time. Connections whose requests wait are not closed in
favour of new ones, so those of agents must not be taken by anyone."""
MAX_ANONYMOUS_FOLLOWERS = 16
"""Requests without a token that may wait for a change of any job: each reads the jobs after a change."""


Closed = asyncio.Future[None] | None
"""Is done once a client has left; None if that is not known."""


def has_left(closed: Closed) -> bool:
    """Whether a client has left."""
    return closed is not None and closed.done()


async def wait_for(change: asyncio.Future[None], closed: Closed, seconds: float) -> None:
    """Wait for a change, but not after the client has left, nor for more than `seconds`."""
    ends = [change] if closed is None else [change, closed]
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


class WaitLimit:
    """The requests without a token that wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting = 0

    @contextmanager
    def one(self, *, counts: bool) -> Iterator[None]:
        """Count a request while it waits."""
        if not counts:
            yield
            return
        if self._waiting >= self._limit:
            raise UnavailableError(
                f"{self._limit} requests without a token that may read the job wait already: send a token, "
                "or try again without `wait`"
            )
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1


class ChangeNotifier:
    """Wakes the requests that wait for a job."""

    def __init__(self) -> None:
        # Waiting requests hold the futures, so a job without waiting requests leaves no entry.
        self._changes: WeakValueDictionary[str, asyncio.Future[None]] = WeakValueDictionary()
        self._closed = False

    def notify(self, job_id: str) -> None:
        """Wake the requests that wait for a job."""
        change = self._changes.pop(job_id, None)
        if change is not None and not change.done():
            change.set_result(None)

    def notify_all(self) -> None:
        """Wake all requests, because changes may have been missed."""
        for job_id in list(self._changes):
            self.notify(job_id)

    def close(self) -> None:
        """Wake all requests; later ones do not wait."""
        self._closed = True
        self.notify_all()

    async def wait_for_change(
        self,
        job_id: str,
        version: int,
        seconds: float,
        read: Callable[[], Awaitable[V]],
        closed: Closed = None,
    ) -> V:
        """Return the result of `read` once its version is not `version`, or after `seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            # Subscribed before reading, so that no change in between is missed.
            change = self._subscribe(job_id)
            found = await read()
            remaining = deadline - loop.time()
            if found.version != version or remaining <= 0 or self._closed or has_left(closed):
                return found
            await wait_for(change, closed, remaining)

    def _subscribe(self, job_id: str) -> asyncio.Future[None]:
        change = self._changes.get(job_id)
        if change is None:
            change = asyncio.get_running_loop().create_future()
            self._changes[job_id] = change
        return change
