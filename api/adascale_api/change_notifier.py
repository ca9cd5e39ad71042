"""Long polling: requests that wait until a job changes."""

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from adascale_core.messages import AllocationView


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

    def _subscribe(self, job_id: str) -> asyncio.Future[None]:
        change = self._changes.get(job_id)
        if change is None:
            change = asyncio.get_running_loop().create_future()
            self._changes[job_id] = change
        return change
