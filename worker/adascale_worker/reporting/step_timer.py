"""Measurement of step times, per batch plan and number of nodes."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from adascale_core.batch.plans import BatchPlan
from adascale_core.messages.reports import StepTime
from adascale_worker.process.device_clock import DeviceClock, HostClock, PendingTimes

Key = tuple[BatchPlan, int]
"""A plan, and the number of nodes of its replicas."""
MAX_STEPS_PER_PLAN = 200
"""Number of newest steps of a plan from which its median step time is computed."""
MAX_PLANS = 16
"""Number of newest plans whose step times are kept."""


class StepTimer:
    """Measures the time from one step to the next.

    It leaves out the first step of a process, which includes warm-up, and the first step after a pause,
    which would include the pause (an evaluation, a checkpoint). The times are those of the device, which may
    be some steps behind the program: a step is measured when a later one finds that the device has done it.
    """

    def __init__(self, accelerator: str = "", clock: DeviceClock | None = None) -> None:
        self._accelerator = accelerator
        self._times: dict[Key, deque[float]] = {}
        self._sync_times: dict[Key, deque[float]] = {}
        self._measured: PendingTimes[tuple[Key, float]] = PendingTimes(clock or HostClock())
        self._last_mark: Any = None
        """Of the clock, at the end of the last step; None after a pause."""
        self._left_out = 0.0
        """Seconds since then that do not count."""
        self._warm = False
        self._since_lap: list[float] = []
        self._recent: deque[float] = deque(maxlen=MAX_STEPS_PER_PLAN)
        self.steps = 0
        """Number of steps recorded."""

    @property
    def is_running(self) -> bool:
        """Whether the time until the next step is measured."""
        return self._last_mark is not None

    @property
    def recent_median(self) -> float:
        """The median time of the last steps of any plan, in seconds; 0 if none was measured."""
        return median(self._recent) if self._recent else 0.0

    def step(self, plan: BatchPlan | None, mark: Any, nodes: int = 1) -> None:
        """Record that a step ended. Does not wait for the device."""
        if self._last_mark is not None and self._warm and plan is not None:
            self._measured.add(((plan, nodes), self._left_out), (self._last_mark, mark))
        for (key, left_out), seconds in self._measured.take():
            self._record(key, max(seconds - left_out, 0.0))
        self._warm = self._warm or self._last_mark is not None
        self._last_mark, self._left_out = mark, 0.0
        self.steps += 1

    def _record(self, key: Key, seconds: float) -> None:
        self._times.setdefault(key, deque(maxlen=MAX_STEPS_PER_PLAN)).append(seconds)
        self._since_lap.append(seconds)
        self._recent.append(seconds)
        while len(self._times) > MAX_PLANS:
            oldest = next(iter(self._times))
            del self._times[oldest]
            self._sync_times.pop(oldest, None)

    def add_sync_time(self, plan: BatchPlan, nodes: int, seconds: float) -> None:
        """Record for how long a step has waited for the exchange of gradients, if its plan has step times."""
        if (plan, nodes) in self._times:
            self._sync_times.setdefault((plan, nodes), deque(maxlen=MAX_STEPS_PER_PLAN)).append(seconds)

    def pause(self) -> None:
        """Leave out the time between the last step and the next step."""
        self._last_mark = None

    def leave_out(self, seconds: float) -> None:
        """Do not count some time since the last step, in which the device was idle."""
        self._left_out += seconds

    def lap(self) -> float:
        """Return the mean time of the steps measured since the last lap, in seconds; 0 if there are none."""
        mean = sum(self._since_lap) / len(self._since_lap) if self._since_lap else 0.0
        self._since_lap.clear()
        return mean

    def step_times(self) -> list[StepTime]:
        """Return the median step time of each plan on each number of nodes."""
        found = []
        for (plan, nodes), times in self._times.items():
            sync = self._sync_times.get((plan, nodes))
            found.append(
                StepTime(
                    plan.replicas,
                    plan.local_bsz,
                    plan.accumulation,
                    median(times),
                    len(times),
                    nodes,
                    median(sync) if sync else None,
                    self._accelerator,
                )
            )
        return found

    def state_dict(self) -> list[list[float | str | None]]:
        """Return a row per plan and number of nodes: the members of `StepTime`."""
        return [list(vars(measured).values()) for measured in self.step_times()]

    def load_state_dict(self, rows: list[list[float | str | None]]) -> None:
        """Restore what was measured on this type of accelerator; each step gets the median of its plan."""
        for row in rows:
            measured = StepTime(*row)  # type: ignore[arg-type]
            if measured.accelerator != self._accelerator:
                continue
            key = measured.plan, measured.nodes
            self._times[key] = deque([measured.step_time] * measured.reports, maxlen=MAX_STEPS_PER_PLAN)
            if measured.sync_time is not None:
                self._sync_times[key] = deque([measured.sync_time], maxlen=MAX_STEPS_PER_PLAN)
