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
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from typing import Any, Final

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, KubernetesCluster
from adascale_controller.operator.types.kubernetes import ApiObject
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

PAUSED: Final = "this process did not run: it was paused, or does not get enough processor time"
"""Why the lease was lost, if not because of the API server."""

Spec = Mapping[str, Any]
"""`spec` of a Lease, as JSON."""


class LeaseLostError(AdaScaleError):
    """The lease is lost: another operator may be running."""


@dataclass(eq=False)
class Election:
    """Acquires, renews and releases the lease.

    A lease of the same identity is taken over at once: it belongs to an earlier process of the same pod.
    """

    api: KubernetesCluster
    place: tuple[str, str]  # namespace and name of the Lease
    identity: str
    duration: float = DURATION  # seconds without a renewal after which another operator takes over
    renew_deadline: float = RENEW_DEADLINE  # seconds without a renewal after which this process stops
    retry_interval: float = RETRY_INTERVAL
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._namespace, self._name = self.place
        self._observed: Spec | None = None
        self._observed_at = 0.0
        self._own: ApiObject | None = None
        """The lease as this process wrote it last."""
        self._valid_until = 0.0

    @property
    def held(self) -> bool:
        """Whether this process holds the lease now. It may be false at any later moment."""
        return self._own is not None and self.clock() < self._valid_until

    async def acquire(self) -> None:
        """Wait until this process holds the lease. Errors of the API server are retried."""
        logged = ""
        while True:
            try:
                async with asyncio.timeout(CALL_TIMEOUT):
                    if await self._try_acquire():
                        return
                message = f"{self._observed_holder} holds it"
            except (ApiServerError, TimeoutError) as error:
                message = _text(error)
            if message != logged:
                logger.info("Waiting for the lease: %s", message)
                logged = message
            await asyncio.sleep(min(self.retry_interval, POLL_INTERVAL))

    async def hold(self) -> None:
        """Renew the lease until that fails."""
        cause = "it was never acquired" if self._own is None else PAUSED
        while self.held:
            pause = min(self.retry_interval, self._valid_until - self.clock())
            due = self.clock() + pause
            await asyncio.sleep(pause)
            left = self._valid_until - self.clock()
            if left <= 0:
                if self.clock() > due + self.retry_interval:
                    cause = PAUSED
                break
            try:
                async with asyncio.timeout(min(left, CALL_TIMEOUT)):
                    await self._renew()
                cause = "it changes all the time"
            except (ApiServerError, TimeoutError) as error:
                cause = _text(error)
                logger.warning("The lease could not be renewed: %s; retrying", cause)
        self._own = None
        raise LeaseLostError(f"the lease could not be renewed within {self.renew_deadline:g} s: {cause}")

    async def release(self) -> None:
        """Release the lease if it is held, so that no other operator waits until it expires."""
        own, self._own = self._own, None
        if own is None:
            return
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                lease: ApiObject | None = own
                # Twice, because a cancelled renewal may have been written.
                for _ in range(2):
                    if lease is None or not self._is_own(lease, own):
                        return
                    released = {**_spec(lease), "holderIdentity": "", "renewTime": _now()}
                    if await self.api.replace("leases", {**lease, "spec": released}) is not None:
                        return
                    lease = await self._read()
        except (ApiServerError, TimeoutError) as error:
            logger.warning("The lease could not be released and has to expire: %s", _text(error))

    # -- acquiring -------------------------------------------------------------------------------------------

    async def _try_acquire(self) -> bool:
        lease = await self._read()
        if lease is None:
            return await self._write(None, self._first_spec(transitions=0))
        spec = _spec(lease)
        if self._observed != spec:
            self._observed, self._observed_at = spec, self.clock()
        if not self._is_free(lease):
            return False
        transitions = (spec.get("leaseTransitions") or 0) + (_holder(lease) != self.identity)
        return await self._write(lease, self._first_spec(transitions))

    def _is_free(self, lease: ApiObject) -> bool:
        if _holder(lease) in ("", self.identity):
            return True
        # The holder's own duration, which may differ from ours.
        duration = _spec(lease).get("leaseDurationSeconds") or ceil(self.duration)
        return self.clock() - self._observed_at >= duration

    @property
    def _observed_holder(self) -> str:
        return (self._observed or {}).get("holderIdentity") or "another operator"

    # -- renewing --------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        own = self._own
        assert own is not None
        spec = {**_spec(own), "renewTime": _now(), "leaseDurationSeconds": ceil(self.duration)}
        if await self._write(own, spec):
            return
        # It has changed: by a renewal whose answer was lost, by a label, or by another holder.
        lease = await self._read()
        if lease is None:
            await self._write(None, spec)
        elif not self._is_own(lease, own):
            self._own = None
            raise LeaseLostError(f"the lease is held by {_holder(lease) or 'no operator'}")
        else:
            await self._write(lease, spec)

    def _is_own(self, lease: ApiObject, own: ApiObject) -> bool:
        """Whether this process holds a lease, and not a later process of the same identity."""
        keys = ("holderIdentity", "acquireTime")
        return all(_spec(lease).get(key) == _spec(own).get(key) for key in keys)

    async def _read(self) -> ApiObject | None:
        return _checked(await self.api.get("leases", self._namespace, self._name))

    async def _write(self, lease: ApiObject | None, spec: Spec) -> bool:
        """Create or replace the lease. Returns whether this process holds it."""
        began = self.clock()
        known = lease["metadata"] if lease is not None else {}
        manifest = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**known, "name": self._name, "namespace": self._namespace},
            "spec": spec,
        }
        write = self.api.create if lease is None else self.api.replace
        written = _checked(await write("leases", manifest))
        if written is None:
            return False
        self._own, self._valid_until = written, began + self.renew_deadline
        return True

    def _first_spec(self, transitions: int) -> Spec:
        now = _now()
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": ceil(self.duration),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


def _checked(lease: ApiObject | None) -> ApiObject | None:
    """Return a lease as the API server answers it, or raise an error if a proxy has answered."""
    if lease is not None and "metadata" not in lease:
        raise ApiServerError(f"the API server answers {lease!r} instead of a Lease")
    return lease


def _spec(lease: ApiObject) -> Spec:
    return lease.get("spec") or {}


def _holder(lease: ApiObject) -> str:
    """Return the identity of the holder of a lease. Empty if there is none."""
    return _spec(lease).get("holderIdentity") or ""


def _now() -> str:
    """Return the time of day in the format of the API, always with microseconds, unlike `isoformat`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _text(error: Exception) -> str:
    return str(error) or "the API server does not answer in time"
