"""Waiting for any event that concerns an agent."""

from __future__ import annotations

import os
import queue

from adascale_worker.agent.trainer_process import reap_orphans

POLL_INTERVAL = 0.5
"""Seconds after which `Events.wait` returns without an event."""


class Events:
    """Events from the agent's threads and signal handlers."""

    def __init__(self) -> None:
        # A SimpleQueue, unlike other locks, can be used in a signal handler.
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._parent = os.getppid()
        self._terminating = False

    @property
    def terminating(self) -> bool:
        """Whether the agent must exit, by SIGTERM, SIGINT, SIGHUP or the death of its parent."""
        return self._terminating

    def notify(self) -> None:
        """Wake up `wait`. Safe in any thread."""
        self._queue.put(None)

    def terminate(self) -> None:
        """Make the agent exit. Safe in a signal handler."""
        self._terminating = True
        self._queue.put(None)

    def wait(self) -> None:
        """Wait for the next event, for `POLL_INTERVAL` at most."""
        if os.getppid() == 1 and self._parent != 1:
            self._terminating = True
        reap_orphans()
        try:
            self._queue.get(timeout=POLL_INTERVAL)
        except queue.Empty:
            return
