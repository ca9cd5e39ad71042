"""The agent's connection to the metrics service, in two threads.

One thread sends the replica's registration, at once when it changes and again as a heartbeat. The other waits
for changes of the job's generations. Both retry for as long as the service does not answer; the agent
continues meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from adascale_client import Backoff, MetricsServiceClient, ServiceError, ServiceRefusedError
from adascale_core.messages import registration as registrations
from adascale_core.messages.allocation import AllocationView, MemberView
from adascale_core.messages.registration import MAX_INTERVAL, Registration, change_wait
from adascale_core.messages.replica_seconds import ReplicaSeconds
from adascale_core.names import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT

CHANGE_TIMEOUT = 20.0
"""Seconds for which a request waits for a change of the generations, longer where there are many replicas."""
REFUSAL_GRACE = 10.0
"""Seconds for which an agent continues to ask after the members that are gone have been removed."""


class Heartbeat:
    """Registers the replica, and keeps the latest view of the job's generations."""

    def __init__(
        self,
        client: MetricsServiceClient,
        job_id: str,
        on_change: Callable[[], None],
        seconds: Callable[[], ReplicaSeconds] = dict,  # of the replica, by cause
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._clock = clock
        self._seconds = seconds
        self._on_change = on_change
        self._changed = threading.Condition()
        self.registration: Registration | None = None
        """What is sent; None before the first call of `register`."""
        self._acknowledged: Registration | None = None
        self.view: AllocationView | None = None
        """The latest view of the job's generations; None before the first answer."""
        self.error: str | None = None
        """Why the last request failed; None if it succeeded."""
        self._refusal: str | None = None
        self._refused_at: float | None = None
        self._refusal_timeout = HEARTBEAT_TIMEOUT + REFUSAL_GRACE
        self._interval = HEARTBEAT_INTERVAL
        self.key = ""
        """The secret of the job's members; empty before the first answer to a registration."""
        self.left_out: str | None = None
        """The registered trainer, if it can take part in no generation any more."""

    @property
    def refusal(self) -> str | None:
        """Why the service refuses the replica; None if it does not, or other members may still go."""
        if self._refused_at is None or self._clock() - self._refused_at < self._refusal_timeout:
            return None
        return self._refusal

    def start(self) -> None:
        """Start the threads. The first registration is sent once `register` has been called."""
        threading.Thread(target=self._send_registrations, name="adascale-register", daemon=True).start()
        threading.Thread(target=self._read_generations, name="adascale-generations", daemon=True).start()

    def register(self, registration: Registration, timeout: float = 0.0) -> bool:
        """Send a registration if it has changed, and repeat it as a heartbeat.

        Returns whether the service has acknowledged it within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            if registration != self.registration:
                self.registration = registration
                self._changed.notify_all()
            while self._acknowledged != registration:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(remaining)
        return True

    def _send_registrations(self) -> None:
        backoff = Backoff()
        while True:
            with self._changed:
                while self.registration is None:
                    self._changed.wait()
                registration, before = self.registration, self.view
            try:
                answer = self._send(registration)
                self._record_answer(answer, registration)
                self._update_view(answer, before)
            except ServiceError as error:
                self._record_refusal(error)
                self._record_error(error)
                with self._changed:
                    if self.registration == registration:
                        self._changed.wait(backoff.next())
                continue
            backoff.reset()
            with self._changed:
                self._acknowledged = registration
                self._changed.notify_all()
                if self.registration == registration:
                    self._changed.wait(self._interval)

    def _send(self, registration: Registration) -> MemberView:
        """Send a registration, without what version 0.1.0 of the service refuses if it does."""
        try:
            heartbeat = registrations.Heartbeat(**vars(registration), seconds=self._seconds())
            return self._client.register(self._job_id, heartbeat)
        except ServiceRefusedError as error:
            if error.status != 422:
                raise
        return self._client.register(self._job_id, replace(registration, state_port=0, pid=0))

    def _read_generations(self) -> None:
        backoff = Backoff()
        while True:
            before = self.view
            try:
                if before is None:
                    self._update_view(self._client.get_allocation(self._job_id), before)
                else:
                    wait = change_wait(self._interval, CHANGE_TIMEOUT)
                    self._update_view(self._client.get_allocation(self._job_id, before.version, wait), before)
                backoff.reset()
            except ServiceError as error:
                self._record_error(error)
                time.sleep(backoff.next())

    def _record_answer(self, answer: MemberView, registration: Registration) -> None:
        self._refused_at = None
        self._interval = min(max(answer.heartbeat_interval, HEARTBEAT_INTERVAL), MAX_INTERVAL)
        if answer.key != self.key:
            self.key = answer.key
            self._on_change()
        if answer.left_out and self.left_out != registration.instance:
            self.left_out = registration.instance
            self._on_change()

    def _record_refusal(self, error: ServiceError) -> None:
        """Record that the service refuses the replica, for example because of its version."""
        if isinstance(error, ServiceRefusedError) and error.status == 409:
            self._refusal = str(error)
            self._refusal_timeout = (error.retry_after or HEARTBEAT_TIMEOUT) + REFUSAL_GRACE
            if self._refused_at is None:
                self._refused_at = self._clock()
            self._on_change()

    def _update_view(self, view: AllocationView, before: AllocationView | None) -> None:
        """Store the view of an answer."""
        with self._changed:
            self.error = None
            # The answers to the two threads can overtake each other, so an answer with a lower version may be
            # old. If no other answer arrived since the request, the service has lost its data and its
            # versions restarted.
            latest = self.view
            is_old = latest is not None and latest is not before and view.version <= latest.version
            if is_old or view == latest:
                return
            self.view = AllocationView(view.version, view.desired, view.active, view.broken, view.complete)
        self._on_change()

    def _record_error(self, error: ServiceError) -> None:
        if self.error is None:
            print(f"adascale-agent: {error}; retrying", flush=True)
        self.error = str(error)
