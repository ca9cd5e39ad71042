"""Requests that wait for a job to change.

Changes made by this process wake them at once. Those made by another process on the same database are
found by looking at the versions now and then, all jobs in one query.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from weakref import WeakValueDictionary

from adascale_core.messages import AllocationView

POLL_INTERVAL = 1.0
"""Seconds between two looks for changes by other processes."""


class Waiting:
    """Wakes those who wait for a job.

    Args:
        versions: the versions of those of the given jobs that exist.
    """

    def __init__(self, versions: Callable[[Iterable[str]], Awaitable[dict[str, int]]]) -> None:
        self._versions = versions
        self._seen: dict[str, int] = {}
        # Held by those who wait, so that a job nobody waits for leaves nothing here.
        self._changes: WeakValueDictionary[str, asyncio.Future[None]] = WeakValueDictionary()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify(self, job_id: str) -> None:
        """Wake those who wait for `job_id`."""
        change = self._changes.pop(job_id, None)
        if change is not None and not change.done():
            change.set_result(None)

    def close(self) -> None:
        """Wake everyone, and let nobody wait any more. May be called from a signal's handler."""
        self._closed = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify_all)

    def _notify_all(self) -> None:
        for job_id in list(self._changes):
            self.notify(job_id)

    async def until_changed(
        self, job_id: str, version: int, seconds: float, read: Callable[[], Awaitable[AllocationView]]
    ) -> AllocationView:
        """What `read` gives once its version is not `version`, or `seconds` are over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            # Before reading, lest a change in between go unnoticed.
            change = self._next_change(job_id)
            view = await read()
            left = deadline - loop.time()
            if view.version != version or left <= 0 or self._closed:
                return view
            await asyncio.wait([change], timeout=left)

    async def poll(self) -> None:
        """Look for changes by other processes, once."""
        awaited = list(self._changes)
        now = await self._versions(awaited) if awaited else {}
        for job_id in awaited:
            if now.get(job_id) != self._seen.get(job_id):
                self.notify(job_id)
        self._seen = now

    def _next_change(self, job_id: str) -> asyncio.Future[None]:
        change = self._changes.get(job_id)
        if change is None:
            self._loop = asyncio.get_running_loop()
            change = self._loop.create_future()
            self._changes[job_id] = change
        return change
