"""How long steps take, per batch plan."""

from __future__ import annotations

from collections import deque
from statistics import median

from adascale_core.batch import BatchPlan
from adascale_core.messages import StepTime

KEPT_STEPS = 200
"""Newest steps of a plan that its time is taken from."""
KEPT_PLANS = 16
"""Newest plans whose times are kept."""


class StepTimer:
    """Measures steps that follow each other without a break.

    The first step of a program warms everything up, and the step after a break (an evaluation, a
    checkpoint) has the break in it: neither is counted.
    """

    def __init__(self) -> None:
        self._times: dict[BatchPlan, deque[float]] = {}
        self._last: float | None = None
        self._warm = False
        self._since_lap: list[float] = []

    def step(self, plan: BatchPlan, now: float) -> None:
        """A step with `plan` was done at `now`, in seconds of any clock."""
        if self._last is not None and self._warm:
            duration = now - self._last
            self._times.setdefault(plan, deque(maxlen=KEPT_STEPS)).append(duration)
            self._since_lap.append(duration)
            while len(self._times) > KEPT_PLANS:
                del self._times[next(iter(self._times))]
        self._warm = self._warm or self._last is not None
        self._last = now

    def pause(self) -> None:
        """The time from the last step on is not that of a step."""
        self._last = None

    def lap(self) -> float:
        """Mean seconds of the steps measured since the last lap; 0 if none was."""
        mean = sum(self._since_lap) / len(self._since_lap) if self._since_lap else 0.0
        self._since_lap.clear()
        return mean

    def step_times(self) -> list[StepTime]:
        """The median time of each plan."""
        return [
            StepTime(plan.replicas, plan.local_bsz, plan.accumulation, median(times), len(times))
            for plan, times in self._times.items()
        ]

    def state_dict(self) -> list[list[float]]:
        """One row per plan: replicas, local batch size, accumulation, median seconds, steps."""
        return [[t.replicas, t.local_bsz, t.accumulation, t.step_time, t.reports] for t in self.step_times()]

    def load_state_dict(self, rows: list[list[float]]) -> None:
        """Take up what was measured before."""
        for replicas, local_bsz, accumulation, seconds, steps in rows:
            plan = BatchPlan(int(replicas), int(local_bsz), int(accumulation))
            self._times[plan] = deque([seconds] * int(steps), maxlen=KEPT_STEPS)
