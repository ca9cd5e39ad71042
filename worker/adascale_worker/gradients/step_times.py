"""The times of a step: how long this replica computes, and waits for the exchange of gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from adascale_core.batch.plans import BatchPlan
from adascale_core.performance.slow_replica import RecentTimes, TypicalTime
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device import MAX_PENDING, DeviceClock, Span

Place = tuple[int, BatchPlan]
"""The generation and the batch plan of a step: times are compared within these."""


class StepTimes:
    """The time for which a step waits for the exchange of gradients, and that of its computation.

    All replicas begin to compute at the same time, because all have waited for the same exchange, until their
    last backward pass ends. Where a replica waits in between, the computation is suspended.
    """

    def __init__(self, group: ReplicaGroup, clock: DeviceClock) -> None:
        self._group = group
        self._clock = clock
        self._exchanges: list[Span] = []
        """The exchanges of the present step: marks of the clock at their beginning and end."""
        self._exchanged: deque[tuple[None, list[Span]]] = deque(maxlen=MAX_PENDING)
        self._sync_time: float | None = None
        self._waited = 0.0
        """Seconds of exchanges that `take_waited` has not returned."""
        self._spans: list[Span] = []
        """Those of the computation."""
        self._since: Any = None
        """Mark of the clock at the beginning of the present span; None while it is suspended."""
        self._is_running = self._is_complete = False
        self._computed: deque[tuple[Place, list[Span]]] = deque(maxlen=MAX_PENDING)
        self._recent = RecentTimes()
        self._place: Place | None = None

    # -- the exchange -------------------------------------------------------------------------------------

    def begin_timing(self) -> None:
        """Time the exchange of gradients of the next steps only."""
        self._sync_time = None
        self._exchanges.clear()
        self._exchanged.clear()

    def begin_step(self) -> None:
        """Use the times that were measured in the steps before."""
        if self._exchanges:
            self._exchanged.append((None, self._exchanges))
            self._exchanges = []
        for _, seconds in self._clock.take(self._exchanged):
            self._sync_time = seconds
            self._waited += seconds

    def take_waited(self) -> float:
        """Return for how many seconds steps have waited for the exchange of gradients since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def sync_time(self) -> float | None:
        """Return the seconds for which a recent step has waited for the exchange of gradients.

        None if they were returned before.
        """
        measured, self._sync_time = self._sync_time, None
        return measured

    @contextmanager
    def measured_exchange(self) -> Iterator[None]:
        """Measure the time for which the gradients of this replica wait for those of the others."""
        if self._group.replicas == 1:
            yield
            return
        started = self._clock.mark()
        yield
        self._exchanges.append((started, self._clock.mark()))

    # -- the computation ----------------------------------------------------------------------------------

    def begin_computation(self) -> None:
        """Begin with a step, when all replicas have made the one before."""
        self._spans = []
        self._since = self._clock.mark()
        self._is_running, self._is_complete = True, False

    def suspend(self) -> None:
        """Leave out the time until `resume`, in which this replica may wait for others."""
        if self._since is not None:
            self._spans.append((self._since, self._clock.mark()))
            self._since = None

    def resume(self) -> None:
        """Continue after `suspend`."""
        if self._is_running and self._since is None:
            self._since = self._clock.mark()

    def end_backward(self) -> None:
        """End the computation: all gradients of this replica are there, and it waits for the others."""
        if self._is_running:
            self.suspend()
            self._is_running, self._is_complete = False, True

    def finish_step(self, place: Place, *, counts: bool) -> None:
        """Record the time of a step, if nothing else was done (`counts`). Does not wait for the device."""
        if place != self._place:
            self._place = place
            self._recent.clear()
        if counts and self._is_complete:
            self._computed.append((place, self._spans))
        for measured_in, seconds in self._clock.take(self._computed):
            if measured_in == place:
                self._recent.add(seconds)
        self._is_running = self._is_complete = False
        self._since = None

    @property
    def typical(self) -> TypicalTime:
        """The typical time of computation of the last steps."""
        return self._recent.typical
