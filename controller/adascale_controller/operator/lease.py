"""One operator at a time, by a Lease of coordination.k8s.io.

`kubernetes.aio.leaderelection` has no ground to stand on here: a connection that fails ends it with an
exception that nobody awaits, what the leader's task raises is lost, and the lease is never released.

How it is safe: the holder counts from before it sends a renewal, and stops when `renew_deadline` has passed
since the last one that was answered. Whoever waits counts from when it has seen the lease change, which is
later, and for longer. Each counts by its own monotonic clock; the times in the lease are for people.
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

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from adascale_core.errors import AdaScaleError

logger = logging.getLogger(__name__)

DURATION: Final = 30
"""Seconds without a renewal after which another may take the lease."""
RENEW_DEADLINE: Final = 20
"""Seconds without a renewal after which the holder stops: time enough, before another begins, to do so."""
RETRY: Final = 3
"""Seconds between two looks at the lease, and between two renewals."""
ANSWER_TIMEOUT: Final = 5
"""Seconds to wait for an answer of the API server, at most."""

Spec = Mapping[str, Any]
"""`spec` of a Lease, as its JSON."""


class LeaseLostError(AdaScaleError):
    """Another operator may be at work by now."""


class UnansweredError(Exception):
    """The API server did not answer, or not with what was asked for."""


@dataclass(frozen=True)
class Lease:
    """A Lease.

    Args:
        spec: who holds it since when.
        metadata: its labels, and the version that this is of it.
    """

    spec: Spec
    metadata: Mapping[str, Any]

    @property
    def holder(self) -> str:
        """Who holds it; empty: nobody."""
        return self.spec.get("holderIdentity") or ""


class Leases(Protocol):
    """The one Lease that is asked for, in the API. Each call may raise UnansweredError."""

    async def read(self) -> Lease | None:
        """The lease, if there is one."""

    async def create(self, spec: Spec) -> Lease | None:
        """The lease, made; none if there is one already."""

    async def replace(self, lease: Lease, spec: Spec) -> Lease | None:
        """The lease, with another spec; none if it has been changed since."""


class Election:
    """Gets the lease, holds it, and gives it back.

    Args:
        leases: the lease in the API.
        identity: who this is; another process of the same identity is taken for this one, started again.
        duration: seconds without a renewal after which another may take the lease; rounded up.
        renew_deadline: seconds without a renewal after which this one stops.
        retry: seconds between two calls.
        clock: a monotonic clock, in seconds.

    Raises:
        ValueError: not retry < renew_deadline < duration.
    """

    def __init__(
        self,
        leases: Leases,
        identity: str,
        duration: float = DURATION,
        renew_deadline: float = RENEW_DEADLINE,
        retry: float = RETRY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < retry < renew_deadline < duration:
            raise ValueError(
                f"must be 0 < retry < renew_deadline < duration; got {retry}, {renew_deadline}, {duration}"
            )
        self._leases = leases
        self._identity = identity
        self._duration = ceil(duration)
        self._renew_deadline = renew_deadline
        self._retry = retry
        self._clock = clock
        self._seen: Spec | None = None
        self._seen_at = 0.0
        self._own: Lease | None = None
        """The lease as this one wrote it last."""
        self._until = 0.0

    @property
    def held(self) -> bool:
        """Whether no other can be at work: true again and again, it may be false at any next moment."""
        return self._own is not None and self._clock() < self._until

    async def acquire(self) -> None:
        """Wait until the lease is this one's. Errors of the API server are waited out."""
        told = ""
        while True:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT):
                    if await self._take():
                        return
                news = f"{self._seen_holder} is at work"
            except (UnansweredError, TimeoutError) as error:
                news = _unanswered(error)
            if news != told:
                logger.info("Waiting for the lease: %s", news)
                told = news
            await asyncio.sleep(self._retry)

    async def hold(self) -> None:
        """Renew the lease for as long as that works.

        Raises:
            LeaseLostError: another has it, or it could not be renewed in time.
        """
        why = "it was never held" if self._own is None else "others change it all the time"
        while self.held:
            await asyncio.sleep(min(self._retry, max(self._until - self._clock(), 0.0)))
            left = self._until - self._clock()
            if left <= 0:
                break
            try:
                async with asyncio.timeout(min(left, ANSWER_TIMEOUT)):
                    await self._renew()
            except (UnansweredError, TimeoutError) as error:
                why = _unanswered(error)
                logger.warning("The lease could not be renewed: %s; trying again", why)
        self._own = None
        raise LeaseLostError(f"the lease could not be renewed in {self._renew_deadline:g} s: {why}")

    async def release(self) -> None:
        """Give the lease back, if it is held, so that nobody has to wait until it expires."""
        own, self._own = self._own, None
        if own is None:
            return
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                lease: Lease | None = own
                # Twice, since a renewal that was broken off may have been carried out.
                for _ in range(2):
                    if lease is None or not self._is_mine(lease, own):
                        return
                    nobody = dict(lease.spec) | {"holderIdentity": "", "renewTime": _now()}
                    if await self._leases.replace(lease, nobody) is not None:
                        return
                    lease = await self._leases.read()
        except (UnansweredError, TimeoutError) as error:
            logger.warning("The lease could not be released, so it has to expire: %s", _unanswered(error))

    # -- getting it -----------------------------------------------------------------------------------------

    async def _take(self) -> bool:
        lease = await self._leases.read()
        if lease is None:
            return await self._write(None, self._spec(transitions=0))
        if self._seen != lease.spec:
            self._seen, self._seen_at = lease.spec, self._clock()
        if not self._is_free(lease):
            return False
        transitions = (lease.spec.get("leaseTransitions") or 0) + (lease.holder != self._identity)
        return await self._write(lease, self._spec(transitions))

    def _is_free(self, lease: Lease) -> bool:
        if lease.holder in ("", self._identity):
            return True
        # The holder's own duration: it may have been started with another one.
        duration = lease.spec.get("leaseDurationSeconds") or self._duration
        return self._clock() - self._seen_at >= duration

    @property
    def _seen_holder(self) -> str:
        return (self._seen or {}).get("holderIdentity") or "another operator"

    # -- holding it -----------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        own = self._own
        assert own is not None
        spec = dict(own.spec) | {"renewTime": _now(), "leaseDurationSeconds": self._duration}
        if await self._write(own, spec):
            return
        # Changed since: by a renewal whose answer was lost, by somebody's label, or by another holder.
        lease = await self._leases.read()
        if lease is None:
            await self._write(None, spec)
        elif not self._is_mine(lease, own):
            self._own = None
            raise LeaseLostError(f"the lease is held by {lease.holder or 'nobody'}")
        else:
            await self._write(lease, spec)

    def _is_mine(self, lease: Lease, own: Lease) -> bool:
        """Whether this very process holds a lease, not one of the same identity that came after it."""
        keys = ("holderIdentity", "acquireTime")
        return all(lease.spec.get(key) == own.spec.get(key) for key in keys)

    async def _write(self, lease: Lease | None, spec: Spec) -> bool:
        """Make the lease, or change this one; whether it is this one's now."""
        began = self._clock()
        written = await (self._leases.create(spec) if lease is None else self._leases.replace(lease, spec))
        if written is None:
            return False
        self._own, self._until = written, began + self._renew_deadline
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


class LeaseElection(Election):
    """The election of one operator of a cluster.

    Args:
        api: the client.
        namespace, name: of the Lease.
        identity: the name of the pod.
        duration, renew_deadline, retry: as of `Election`.
    """

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        duration: float = DURATION,
        renew_deadline: float = RENEW_DEADLINE,
        retry: float = RETRY,
    ) -> None:
        super().__init__(_ApiLeases(api, namespace, name), identity, duration, renew_deadline, retry)


class _ApiLeases:
    """The Lease of one name in the API."""

    def __init__(self, api: ApiClient, namespace: str, name: str) -> None:
        self._api = api
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._folder}/{name}"
        self._object: Mapping[str, Any] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": namespace},
        }

    async def read(self) -> Lease | None:
        return await self._call("GET", self._path, None, absent=frozenset({404}))

    async def create(self, spec: Spec) -> Lease | None:
        return await self._call("POST", self._folder, {**self._object, "spec": spec}, absent=frozenset({409}))

    async def replace(self, lease: Lease, spec: Spec) -> Lease | None:
        changed = {**self._object, "metadata": lease.metadata, "spec": spec}
        return await self._call("PUT", self._path, changed, absent=frozenset({404, 409}))

    async def _call(self, method: str, path: str, body: object, *, absent: frozenset[int]) -> Lease | None:
        """The lease of an answer; none where its status is in `absent`."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        try:
            request = await self._api.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            answer = await self._api.call_api(*request, _request_timeout=ANSWER_TIMEOUT)
            content = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError, ApiException) as error:
            raise UnansweredError(str(error) or "no answer in time") from error
        if answer.status in absent:
            return None
        try:
            told = json.loads(content)
            if answer.status < 300:
                return Lease(told.get("spec") or {}, told["metadata"])
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            # Something between here and the API server answers in its own words.
            raise UnansweredError(f"{method} {path} was answered with {content[:200]!r}") from error
        raise UnansweredError(f"{method} {path} was refused: {told.get('message') or answer.status}")


def _now() -> str:
    """The time of day as the API has it, always with microseconds, which `isoformat` leaves out at times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _unanswered(error: Exception) -> str:
    return str(error) or "the API server does not answer in time"
