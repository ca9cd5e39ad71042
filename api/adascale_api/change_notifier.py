"""Long polling: requests that wait until a job changes.

Changes made by this process wake them at once. Changes made by another process on the same database are found
by polling the versions of all awaited jobs in one query.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from weakref import WeakValueDictionary

from adascale_core.messages import AllocationView

POLL_INTERVAL = 1.0
"""Seconds between two polls for changes by other processes."""


class ChangeNotifier:
    """Wakes the requests that wait for a job.

    Args:
        read_versions: returns the versions of the given jobs that exist.
    """

    def __init__(self, read_versions: Callable[[Iterable[str]], Awaitable[dict[str, int]]]) -> None:
        self._read_versions = read_versions
        self._polled: dict[str, int] = {}
        # Waiting requests hold the futures, so a job without waiting requests leaves no entry.
        self._changes: WeakValueDictionary[str, asyncio.Future[None]] = WeakValueDictionary()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify(self, job_id: str) -> None:
        """Wake the requests that wait for a job."""
        change = self._changes.pop(job_id, None)
        if change is not None and not change.done():
            change.set_result(None)

    def close(self) -> None:
        """Wake all requests; later ones do not wait. May be called from a signal handler."""
        self._closed = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify_all)

    def _notify_all(self) -> None:
        for job_id in list(self._changes):
            self.notify(job_id)

    async def wait_for_change(
        self, job_id: str, version: int, seconds: float, read: Callable[[], Awaitable[AllocationView]]
    ) -> AllocationView:
        """Return the result of `read` once its version is not `version`, or after `seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            # Subscribed before reading, so that no change in between is missed.
            change = self._subscribe(job_id)
            view = await read()
            remaining = deadline - loop.time()
            if view.version != version or remaining <= 0 or self._closed:
                return view
            await asyncio.wait([change], timeout=remaining)

    async def poll(self) -> None:
        """Notify of changes by other processes since the last poll."""
        awaited = list(self._changes)
        versions = await self._read_versions(awaited) if awaited else {}
        for job_id in awaited:
            if versions.get(job_id) != self._polled.get(job_id):
                self.notify(job_id)
        self._polled = versions

    def _subscribe(self, job_id: str) -> asyncio.Future[None]:
        change = self._changes.get(job_id)
        if change is None:
            self._loop = asyncio.get_running_loop()
            change = self._loop.create_future()
            self._changes[job_id] = change
        return change
