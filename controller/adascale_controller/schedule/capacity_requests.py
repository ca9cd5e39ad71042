"""Replica counts that a job requests although they do not fit, so that room is made for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from adascale_controller.formatting import duration, plural
from adascale_controller.job.reasons import Reason


@dataclass(frozen=True)
class CapacityRequest:
    """A replica count that is requested although it does not fit."""

    count: int
    fitting: int  # the largest count that fits; 0 if none does
    # of the condition while its pods are not placed
    reason: Reason
    message: str


@dataclass(frozen=True)
class RequestKind:
    """Why a count is requested although it does not fit."""

    reason: Reason  # the reason of the condition while its pods are not placed
    purpose: str
    timeout: float  # seconds after which it is given up


NODES = RequestKind(Reason.NODES_REQUESTED, "so that an autoscaler adds nodes", 600.0)
PREEMPTION = RequestKind(Reason.PREEMPTING, "so that pods of lower priority are preempted", 300.0)
FIRST_REQUEST_PAUSE = 300.0
"""Seconds from the end of the first request to the next one."""
MAX_REQUEST_PAUSE = 3600.0
"""The longest pause, in seconds."""
MAX_REQUESTING_JOBS = 8
"""Jobs that have such a request at the same time, at most."""


class CapacityRequests:
    """The request of a job beyond the capacity, if it has any, and the refusals before."""

    def __init__(self) -> None:
        self.active: CapacityRequest | None = None
        self.granted = False
        """Whether all replicas of the request are placed, so that the next decision counts them."""
        self._kind: RequestKind | None = None
        self._until = -inf
        self._refused: RequestKind | None = None
        self._refused_until = -inf
        self._pause = 0.0

    def may_begin(self, now: float) -> bool:
        """Whether a request may be made at `now`, in seconds since 1970."""
        return self.active is None and now >= self._refused_until

    def begin(self, kind: RequestKind, count: int, fitting: int, now: float) -> None:
        """Record a request."""
        does, is_ = ("does", "is") if count == 1 else ("do", "are")
        message = (
            f"{plural(count, 'replica')} {does} not fit, and {is_} requested {kind.purpose}, for "
            f"{duration(kind.timeout)} at most"
        )
        self.active, self._kind = CapacityRequest(count, fitting, kind.reason, message), kind
        self._until = now + kind.timeout

    def update(self, placed: int, now: float) -> None:
        """Record how many ranks, counted from 0, are placed; the request ends at its timeout."""
        if self.active is None or self._kind is None or self.granted:
            return
        if placed >= self.active.count:
            self.granted = True
            self._refused, self._refused_until, self._pause = None, -inf, 0.0
        elif now >= self._until:
            self._pause = min(max(2 * self._pause, FIRST_REQUEST_PAUSE), MAX_REQUEST_PAUSE)
            self._refused, self._refused_until = self._kind, now + self._pause
            self.cancel()

    def cancel(self) -> None:
        """Drop the request without a refusal."""
        self.active, self._kind, self.granted = None, None, False

    def next_due(self, now: float) -> float:
        """Return when time alone changes something, in seconds since 1970; infinite if it does not."""
        until = self._refused_until
        if self.active is not None:
            until = inf if self.granted else self._until
        return until if until > now else inf

    def describe_refusal(self, now: float) -> str:
        """Return that the last request had no success, while it may not be repeated, or an empty text."""
        if self._refused is None or now >= self._refused_until:
            return ""
        return (
            f"The replicas were requested {self._refused.purpose}, and were not placed within "
            f"{duration(self._refused.timeout)}; the next request is {duration(self._pause)} later"
        )
