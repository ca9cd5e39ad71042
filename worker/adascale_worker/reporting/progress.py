"""The progress of training, its goodput, and the times of its steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from adascale_core.batch.plans import BatchPlan
from adascale_core.messages.reports import StepTime
from adascale_worker.errors import FROM_SCRATCH, UnusableCheckpointError
from adascale_worker.process.device import MAX_PENDING, DeviceClock, Span


@dataclass
class TrainingProgress:
    """The progress of training since the job began.

    The position in the data is `consumed`, where the present step begins, and `in_step`, what was delivered
    of it. Batches are loaded from `consumed` on, only where `in_step` is 0. The state has `consumed` only.
    """

    step: int = 0
    progress: float = 0.0  # sum of the gains, or the samples over `batch_size`; both in steps at `batch_size`
    epoch: int = 0  # current epoch, from 0
    consumed: int = 0  # samples of all replicas together, over all passes, in steps that are over
    in_step: int = 0  # samples of all replicas together that the programs have got in the present step
    # progress at which training ends; None if the program decides, or before the length of the data set
    # is known
    target: float | None = None
    finish_reason: str | None = None  # the argument of `ElasticTrainer.finish`; None if it was not called
    # whether a step adds its scale to the progress, and not its gain, because the job has `train_samples`
    counts_samples: bool = False

    def begin_at(self, epoch: int, steps: int, batch_size: int) -> None:
        """Begin where another run has ended."""
        self.epoch, self.step, self.progress, self.consumed = epoch, steps, float(steps), steps * batch_size

    def advance(self, gain: float, samples: int, batch_size: int) -> None:
        """Count one optimizer step."""
        self.step += 1
        if self.counts_samples:
            # From whole numbers, so that no error adds up.
            self.progress = (round(self.progress * batch_size) + samples) / batch_size
        else:
            self.progress += gain
        self.end_step()

    def end_step(self) -> None:
        """Count the samples that were delivered, also for a step that the program has left out."""
        self.consumed, self.in_step = self.consumed + self.in_step, 0

    @property
    def schedule_position(self) -> int:
        """The whole steps of a schedule at this progress, of which it has none after the end of training."""
        return int(self.progress if self.target is None else min(self.progress, self.target))

    def state_dict(self) -> dict[str, int | float | str | None]:
        """Return the progress as plain values."""
        return {name: value for name, value in vars(self).items() if name != "in_step"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved progress."""
        # Earlier versions have counted gains alone.
        saved = bool(state.get("counts_samples", False))
        if saved != self.counts_samples:
            raise UnusableCheckpointError(
                f"the checkpoint counts progress in {_unit(saved)}, but the job now in "
                f"{_unit(self.counts_samples)}: {'set' if saved else 'leave out'} train_samples "
                f"(trainSamples in the job file) as before, or {FROM_SCRATCH}"
            )
        self.step = int(state["step"])
        self.progress = float(state["progress"])
        self.epoch = int(state["epoch"])
        self.consumed, self.in_step = int(state["consumed"]), 0
        self.target = state["target"]
        self.finish_reason = state["finish_reason"]


def _unit(counts_samples: bool) -> str:
    return "samples" if counts_samples else "gains"


WINDOW = 60.0
"""Seconds of training after which a measurement has 1/e of the weight of a new one."""


class Goodput:
    """The mean progress per second of about the last minute of training, without interruptions."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._progress = 0.0
        self._made = self._seconds = 0.0

    def update(self, step: int, progress: float, step_time: float) -> float | None:
        """Return the goodput after a report; None if it is not measured yet.

        `step_time` is the mean of the steps since the last report; 0 if they were not measured.
        """
        before, self._step = self._step, step
        made, self._progress = progress - self._progress, progress
        # Steps that were lost with a replica are repeated.
        if before is not None and step > before and made > 0 and step_time > 0:
            seconds = (step - before) * step_time
            kept = math.exp(-seconds / WINDOW)
            # The rate is constant within a report, and its earlier steps weigh less too.
            weight = WINDOW * (1 - kept)
            self._made = kept * self._made + weight * made / seconds
            self._seconds = kept * self._seconds + weight
        return self._made / self._seconds if self._seconds > 0 else None


Key = tuple[BatchPlan, int]
"""A plan, and the number of nodes of its replicas."""
MAX_STEPS_PER_PLAN = 200
"""Number of newest steps of a plan from which its median step time is computed."""
MAX_PLANS = 16
"""Number of newest plans whose step times are kept."""


class StepTimer:
    """Measures the time from one step to the next, on the device, which may be some steps behind the program.

    It leaves out the first step of a process, which includes warm-up, and the first step after a pause, such
    as an evaluation or a checkpoint.
    """

    def __init__(self, accelerator: str = "", clock: DeviceClock | None = None) -> None:
        self._accelerator = accelerator
        self._times: dict[Key, deque[float]] = {}
        self._sync_times: dict[Key, deque[float]] = {}
        self._clock = clock or DeviceClock()
        self._measured: deque[tuple[tuple[Key, float], list[Span]]] = deque(maxlen=MAX_PENDING)
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
            self._measured.append((((plan, nodes), self._left_out), [(self._last_mark, mark)]))
        for (key, left_out), seconds in self._clock.take(self._measured):
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
