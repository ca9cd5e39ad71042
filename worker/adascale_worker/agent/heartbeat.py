"""The agent's line to the metrics service: it tells and it listens, each in a thread of its own.

What the agent does is told at once when it changes and again as a heartbeat; what the service says of the
job's generations is waited for. An absent service is tried again and again; the agent goes on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from adascale_client import JobClient, ServiceError
from adascale_core.messages import AllocationView, Registration
from adascale_core.names import HEARTBEAT_INTERVAL

WAIT = 20.0
"""Seconds that one question for the generations stays open."""
MAX_BACKOFF = 2.0


class Heartbeat:
    """Tells the service what the agent does, and the agent what the service says.

    Args:
        client: the metrics service.
        on_change: called, from a thread of this object's, when `view` has changed.
    """

    def __init__(self, client: JobClient, on_change: Callable[[], None]) -> None:
        self._client = client
        self._on_change = on_change
        self._changed = threading.Condition()
        self._registration: Registration | None = None
        self._told: Registration | None = None
        self._view: AllocationView | None = None
        self._ended = False
        self._complaint: str | None = None

    @property
    def view(self) -> AllocationView | None:
        """The job's generations as last heard; none before the first answer."""
        return self._view

    @property
    def complaint(self) -> str | None:
        """Why the service could not be reached, while it cannot."""
        return self._complaint

    def start(self) -> None:
        """Begin to listen, and to tell as soon as there is something to tell."""
        threading.Thread(target=self._tell, name="adascale-tell", daemon=True).start()
        threading.Thread(target=self._listen, name="adascale-listen", daemon=True).start()

    def tell(self, registration: Registration, patience: float = 0.0) -> bool:
        """Tell what the agent does now.

        Args:
            registration: it.
            patience: seconds to wait for it to be told.

        Returns:
            whether it has been told by then.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            self._registration = registration
            self._changed.notify_all()
            while self._told != registration:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _tell(self) -> None:
        pause = 0.1
        while True:
            with self._changed:
                while self._registration is None:
                    self._changed.wait()
                registration, known = self._registration, self._view
            try:
                self._hear(self._client.register(registration), known)
            except ServiceError as error:
                self._complain(error)
                with self._changed:
                    if self._registration == registration:
                        self._changed.wait(pause)
                pause = min(2 * pause, MAX_BACKOFF)
                continue
            pause = 0.1
            with self._changed:
                self._told = registration
                self._changed.notify_all()
                if self._registration == registration:
                    self._changed.wait(HEARTBEAT_INTERVAL)

    def _listen(self) -> None:
        while True:
            known = self._view
            try:
                if known is None:
                    self._hear(self._client.get_allocation(), known)
                else:
                    self._hear(self._client.get_allocation(known.version, WAIT), known)
            except ServiceError as error:
                self._complain(error)
                time.sleep(0.2)

    def _hear(self, view: AllocationView, known: AllocationView | None) -> None:
        """Take up an answer to a question that was put when `known` was what had been heard last."""
        with self._changed:
            self._complaint = None
            # Answers to the two threads can overtake each other. Where that cannot be, a lower version
            # comes from a service that has lost its data and counts anew.
            last = self._view
            overtaken = last is not None and last is not known and view.version <= last.version
            if overtaken or view == last:
                return
            self._view = view
        self._on_change()

    def _complain(self, error: ServiceError) -> None:
        if self._complaint is None:
            print(f"adascale-agent: {error}; trying again", flush=True)
        self._complaint = str(error)
