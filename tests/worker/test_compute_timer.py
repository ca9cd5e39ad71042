"""The time in which a replica computes, on a device that is behind the program."""

from __future__ import annotations

import pytest
import torch

from adascale_core.batch.plans import BatchPlan
from adascale_core.performance.slow_replica import WINDOW
from adascale_worker.gradients.step_times import StepTimes
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device import DeviceClock
from adascale_worker.process.environment import RankAssignment

PLACE = (1, BatchPlan(2, 8, 1))


class LateClock(DeviceClock):
    """A clock of a device that passes a mark when `reached` is set to its time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.reached = 0.0

    def mark(self) -> float:
        return self.now

    def seconds_between(self, start: float, end: float) -> float | None:
        return end - start if end <= self.reached else None


def times_of(clock: DeviceClock) -> StepTimes:
    return StepTimes(ReplicaGroup(RankAssignment(0, 2), torch.device("cpu")), clock)


def step(
    timer: StepTimes,
    clock: LateClock,
    place: tuple[int, BatchPlan] = PLACE,
    *,
    exchanges: bool = True,
    counts: bool = True,
) -> None:
    """Make a step: 3 s of computation around 5 s of waiting for buffers, and 7 s of waiting for gradients."""
    timer.begin_computation()
    clock.now += 1.0
    timer.suspend()
    clock.now += 5.0
    timer.resume()
    clock.now += 2.0
    if exchanges:
        timer.end_backward()
    clock.now += 7.0
    timer.resume()
    timer.finish_step(place, counts=counts)


def test_the_time_of_waiting_is_left_out_and_the_device_is_not_waited_for() -> None:
    clock = LateClock()
    timer = times_of(clock)
    for _ in range(WINDOW):
        step(timer, clock)
    assert timer.typical.seconds == 0.0, "the device has passed no mark"
    clock.reached = clock.now
    step(timer, clock)
    assert timer.typical.seconds == pytest.approx(3.0)


@pytest.mark.parametrize(("exchanges", "counts"), [(True, False), (False, True)])
def test_a_step_with_a_pause_or_without_an_exchange_is_left_out(*, exchanges: bool, counts: bool) -> None:
    clock = LateClock()
    clock.reached = float("inf")
    timer = times_of(clock)
    for _ in range(WINDOW + 1):
        step(timer, clock, exchanges=exchanges, counts=counts)
    assert timer.typical.seconds == 0.0


def test_times_of_other_replicas_or_of_another_batch_do_not_count() -> None:
    clock = LateClock()
    timer = times_of(clock)
    for _ in range(WINDOW):
        step(timer, clock)
    clock.reached = float("inf")
    step(timer, clock, (2, BatchPlan(2, 8, 1)))
    assert timer.typical.seconds == 0.0


def test_the_exchange_of_gradients_is_timed_and_returned_once() -> None:
    times = times_of(DeviceClock())
    for _ in range(2):
        with times.measured_exchange():
            assert times.sync_time() is None, "of a step that is complete"
    times.begin_step()
    seconds = times.sync_time()
    assert seconds is not None
    assert 0.0 <= seconds < 60.0
    assert times.sync_time() is None
