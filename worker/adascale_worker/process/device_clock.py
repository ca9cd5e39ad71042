"""The time of work on a device, read without waiting for the device.

A program that trains on a GPU launches its work and runs ahead of it, so the host's clock at the end of a
step is the time of a launch. Events in the stream of the device have the time at which the work before them
is done. They are read when the device has passed them, some steps later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

Label = TypeVar("Label")

MAX_PENDING: Final = 256
"""Measurements that wait for the device at the same time; more are left out. CUDA lets a program run ahead by
about a thousand kernels."""


class DeviceClock(Protocol):
    """A clock of a device."""

    def mark(self) -> Any:
        """Return a mark for the time at which the device has done what was launched so far."""

    def seconds_between(self, start: Any, end: Any) -> float | None:
        """Return the seconds from one mark to another; None if the device has not passed both."""


class HostClock:
    """The clock of the host, for devices whose work is done when its call returns, such as the CPU."""

    def mark(self) -> float:
        """Return the present time, in seconds."""
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float | None:
        """Return the seconds from one time to another."""
        return end - start


class CudaClock:
    """Events in the current stream of a GPU.

    `mark` and `seconds_between` launch and query, and never wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event in the current stream of the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Return the seconds between two events; None if one of them has not happened."""
        # Both are queried: after a change of the current stream, they are in different ones.
        if not (start.query() and end.query()):
            return None
        return float(start.elapsed_time(end)) / 1000


def clock_of(device: torch.device) -> DeviceClock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class PendingTimes(Generic[Label]):
    """Measurements whose end the device may not have reached yet, in their order."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._pending: deque[tuple[Label, list[tuple[Any, Any]]]] = deque()

    def add(self, label: Label, *spans: tuple[Any, Any]) -> None:
        """Add a measurement: the time in all `spans` together, each from one mark to another."""
        if len(self._pending) < MAX_PENDING:
            self._pending.append((label, list(spans)))

    def take(self) -> Iterator[tuple[Label, float]]:
        """Remove and yield the measurements that are complete, with their seconds. Does not wait."""
        while self._pending:
            label, spans = self._pending[0]
            seconds = 0.0
            for span in spans:
                found = self._clock.seconds_between(*span)
                if found is None:
                    return
                seconds += found
            self._pending.popleft()
            yield label, seconds

    def clear(self) -> None:
        """Discard all measurements."""
        self._pending.clear()
