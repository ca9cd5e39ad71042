"""Leader election with a Lease of coordination.k8s.io: one operator runs at a time.

`kubernetes.aio.leaderelection` is not usable here: a lost connection ends it with an exception that no task
awaits, errors of the leader's task are lost, and the lease is never released.

Why two operators never run at once: the holder measures from before it sends a renewal, and stops when
`renew_deadline` has passed since the last success. A candidate measures from when it observed the last
change of the lease, which is later, and waits longer. Both use their own monotonic clock; the timestamps in
the lease are for people.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from typing import Any, Final, Protocol

from kubernetes.aio.client import ApiClient

from adascale_controller.operator.apply.kubernetes_cluster import NoAnswerError, call
from adascale_core.errors import AdaScaleError

logger = logging.getLogger(__name__)

DURATION: Final = 30
"""Seconds without a renewal after which another operator may take the lease."""
RENEW_DEADLINE: Final = 20
"""Seconds without a renewal after which the holder stops, before another operator can start."""
RETRY_INTERVAL: Final = 3
"""Seconds between two renewals."""
POLL_INTERVAL: Final = 1
"""Seconds between two reads by a candidate, at most: a released lease is taken over that soon."""
CALL_TIMEOUT: Final = 5
"""Seconds until a call to the API server fails."""

LATENESS_INTERVAL: Final = 0.5
"""Seconds between two measurements of how late this process runs."""

LATE: Final = (
    "this process has not run for {seconds:.0f} s: it was paused, or does not get enough processor time"
)
"""Why the lease was lost, if not because of the API server."""

Spec = Mapping[str, Any]
"""`spec` of a Lease, as JSON."""


class LeaseLostError(AdaScaleError):
    """The lease is lost: another operator may be running."""


class UnansweredError(Exception):
    """The API server did not answer, or answered with something other than a Lease."""


@dataclass(frozen=True)
class Lease:
    """A Lease."""

    spec: Spec
    metadata: Mapping[str, Any]  # its metadata, with the resource version

    @property
    def holder(self) -> str:
        """The identity of the holder. Empty if there is none."""
        return self.spec.get("holderIdentity") or ""


class LeaseApi(Protocol):
    """The Lease at the API server. Each call may raise UnansweredError."""

    async def read(self) -> Lease | None:
        """Return the lease. None if it does not exist."""

    async def create(self, spec: Spec) -> Lease | None:
        """Create the lease. None if it exists already."""

    async def replace(self, lease: Lease, spec: Spec) -> Lease | None:
        """Write another spec. None if the lease has changed since it was read."""


class Election:
    """Acquires, renews and releases the lease.

    A lease of the same identity is taken over at once: it belongs to an earlier process of the same pod.
    """

    def __init__(
        self,
        api: LeaseApi,
        identity: str,
        duration: float = DURATION,  # seconds without a renewal after which another operator takes over
        renew_deadline: float = RENEW_DEADLINE,  # seconds without a renewal after which this process stops
        retry_interval: float = RETRY_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < retry_interval < renew_deadline < duration:
            raise ValueError(
                "must be 0 < retry_interval < renew_deadline < duration; "
                f"got {retry_interval}, {renew_deadline}, {duration}"
            )
        self._api = api
        self._identity = identity
        self._duration = ceil(duration)
        self._renew_deadline = renew_deadline
        self._retry_interval = retry_interval
        self._clock = clock
        self._observed: Spec | None = None
        self._observed_at = 0.0
        self._own: Lease | None = None
        """The lease as this process wrote it last."""
        self._valid_until = 0.0
        self._late = 0.0
        """Seconds since the last renewal in which this process did not run though it should have."""

    @property
    def held(self) -> bool:
        """Whether this process holds the lease now. It may be false at any later moment."""
        return self._own is not None and self._clock() < self._valid_until

    async def acquire(self) -> None:
        """Wait until this process holds the lease. Errors of the API server are retried."""
        logged = ""
        while True:
            try:
                async with asyncio.timeout(CALL_TIMEOUT):
                    if await self._try_acquire():
                        return
                message = f"{self._observed_holder} holds it"
            except (UnansweredError, TimeoutError) as error:
                message = _text(error)
            if message != logged:
                logger.info("Waiting for the lease: %s", message)
                logged = message
            await asyncio.sleep(min(self._retry_interval, POLL_INTERVAL))

    async def hold(self) -> None:
        """Renew the lease until that fails."""
        cause = "it was never acquired" if self._own is None else "it changes all the time"
        self._late = 0.0
        if self._own is not None and not self.held:
            self._late = self._clock() - self._valid_until + self._renew_deadline
        measuring = asyncio.create_task(self._measure_lateness())
        try:
            while self.held:
                await asyncio.sleep(min(self._retry_interval, self._valid_until - self._clock()))
                left = self._valid_until - self._clock()
                if left <= 0:
                    break
                try:
                    async with asyncio.timeout(min(left, CALL_TIMEOUT)):
                        await self._renew()
                    self._late = 0.0
                except (UnansweredError, TimeoutError) as error:
                    cause = _text(error)
                    logger.warning("The lease could not be renewed: %s; retrying", cause)
        finally:
            measuring.cancel()
        self._own = None
        if self._late > self._renew_deadline / 2:
            cause = LATE.format(seconds=self._late)
        raise LeaseLostError(f"the lease could not be renewed within {self._renew_deadline:g} s: {cause}")

    async def _measure_lateness(self) -> None:
        """Add up the seconds in which this process did not run though it should have."""
        while True:
            due = self._clock() + LATENESS_INTERVAL
            await asyncio.sleep(LATENESS_INTERVAL)
            self._late += max(self._clock() - due, 0.0)

    async def release(self) -> None:
        """Release the lease if it is held, so that no other operator waits until it expires."""
        own, self._own = self._own, None
        if own is None:
            return
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                lease: Lease | None = own
                # Twice, because a cancelled renewal may have been written.
                for _ in range(2):
                    if lease is None or not self._is_own(lease, own):
                        return
                    released = dict(lease.spec) | {"holderIdentity": "", "renewTime": _now()}
                    if await self._api.replace(lease, released) is not None:
                        return
                    lease = await self._api.read()
        except (UnansweredError, TimeoutError) as error:
            logger.warning("The lease could not be released and has to expire: %s", _text(error))

    # -- acquiring -------------------------------------------------------------------------------------------

    async def _try_acquire(self) -> bool:
        lease = await self._api.read()
        if lease is None:
            return await self._write(None, self._spec(transitions=0))
        if self._observed != lease.spec:
            self._observed, self._observed_at = lease.spec, self._clock()
        if not self._is_free(lease):
            return False
        transitions = (lease.spec.get("leaseTransitions") or 0) + (lease.holder != self._identity)
        return await self._write(lease, self._spec(transitions))

    def _is_free(self, lease: Lease) -> bool:
        if lease.holder in ("", self._identity):
            return True
        # The holder's own duration, which may differ from ours.
        duration = lease.spec.get("leaseDurationSeconds") or self._duration
        return self._clock() - self._observed_at >= duration

    @property
    def _observed_holder(self) -> str:
        return (self._observed or {}).get("holderIdentity") or "another operator"

    # -- renewing --------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        own = self._own
        assert own is not None
        spec = dict(own.spec) | {"renewTime": _now(), "leaseDurationSeconds": self._duration}
        if await self._write(own, spec):
            return
        # It has changed: by a renewal whose answer was lost, by a label, or by another holder.
        lease = await self._api.read()
        if lease is None:
            await self._write(None, spec)
        elif not self._is_own(lease, own):
            self._own = None
            raise LeaseLostError(f"the lease is held by {lease.holder or 'no operator'}")
        else:
            await self._write(lease, spec)

    def _is_own(self, lease: Lease, own: Lease) -> bool:
        """Whether this process holds a lease, and not a later process of the same identity."""
        keys = ("holderIdentity", "acquireTime")
        return all(lease.spec.get(key) == own.spec.get(key) for key in keys)

    async def _write(self, lease: Lease | None, spec: Spec) -> bool:
        """Create or replace the lease. Returns whether this process holds it."""
        began = self._clock()
        written = await (self._api.create(spec) if lease is None else self._api.replace(lease, spec))
        if written is None:
            return False
        self._own, self._valid_until = written, began + self._renew_deadline
        return True

    def _spec(self, transitions: int) -> Spec:
        now = _now()
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._duration,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


class KubernetesLease:
    """A Lease at the API server: implements `LeaseApi`."""

    def __init__(self, api: ApiClient, namespace: str, name: str) -> None:
        self._api = api
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self._object: Mapping[str, Any] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": namespace},
        }

    async def read(self) -> Lease | None:
        """As `LeaseApi.read`."""
        return await self._call("GET", self._path, None, absent=frozenset({404}))

    async def create(self, spec: Spec) -> Lease | None:
        """As `LeaseApi.create`."""
        body = {**self._object, "spec": spec}
        return await self._call("POST", self._collection, body, absent=frozenset({409}))

    async def replace(self, lease: Lease, spec: Spec) -> Lease | None:
        """As `LeaseApi.replace`."""
        body = {**self._object, "metadata": lease.metadata, "spec": spec}
        return await self._call("PUT", self._path, body, absent=frozenset({404, 409}))

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, absent: frozenset[int]
    ) -> Lease | None:
        """Return the lease in the answer. None for a status in `absent`."""
        try:
            response = await call(self._api, method, path, timeout=CALL_TIMEOUT, body=body)
        except NoAnswerError as error:
            raise UnansweredError(str(error)) from error
        if response.status in absent:
            return None
        try:
            content = json.loads(response.content)
            if response.status < 300:
                return Lease(content.get("spec") or {}, content["metadata"])
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            # A proxy between here and the API server has answered.
            raise UnansweredError(f"{method} {path}: unexpected answer {response.content[:200]!r}") from error
        raise UnansweredError(f"{method} {path} was rejected: {content.get('message') or response.status}")


def _now() -> str:
    """Return the time of day in the format of the API, always with microseconds, unlike `isoformat`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _text(error: Exception) -> str:
    return str(error) or "the API server does not answer in time"
