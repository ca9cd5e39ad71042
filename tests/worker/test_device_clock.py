"""Tests of the clocks of devices, on the CPU, and with `make test-gpu` on a GPU."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from adascale_core.batch.plans import BatchPlan
from adascale_worker.process.device import DeviceClock, Span
from adascale_worker.reporting.progress import StepTimer
from support.training import WAITS

GPU = torch.device("cuda", 0)


def test_the_clock_of_the_host_measures_what_has_happened_between_two_marks() -> None:
    clock = DeviceClock()
    before = time.perf_counter()
    start = clock.mark()
    inside = time.perf_counter()
    end = clock.mark()
    after = time.perf_counter()
    assert start <= inside <= end
    measured = clock.seconds_between(start, end)
    assert measured is not None
    assert 0.0 <= measured <= after - before


def test_a_measurement_has_the_time_of_all_its_spans() -> None:
    pending: deque[tuple[str, list[Span]]] = deque([("exchanges", [(1.0, 2.0), (5.0, 5.5)]), ("none", [])])
    assert list(DeviceClock().take(pending)) == [("exchanges", 1.5), ("none", 0.0)]
    assert not pending


@pytest.fixture
def work() -> Callable[[], object]:
    """Launches a tenth of a second of work or so on the GPU; it is loaded and warm."""
    matrix = torch.randn(4096, 4096, device=GPU)

    def launch() -> object:
        result = matrix
        for _ in range(40):
            result = torch.mm(result, matrix).sin_()
        return result

    launch()
    torch.cuda.synchronize(GPU)
    return launch


@pytest.mark.gpu
def test_events_agree_with_the_clock_of_the_host_around_a_synchronized_device(
    work: Callable[[], object],
) -> None:
    clock = DeviceClock(GPU)
    for _ in range(3):
        torch.cuda.synchronize(GPU)
        before = time.perf_counter()
        start = clock.mark()
        work()
        end = clock.mark()
        torch.cuda.synchronize(GPU)
        expected = time.perf_counter() - before
        measured = clock.seconds_between(start, end)
        assert measured == pytest.approx(expected, rel=0.05, abs=0.001)


@pytest.mark.gpu
def test_a_mark_is_passed_when_the_device_has_done_the_work_before_it(work: Callable[[], object]) -> None:
    clock = DeviceClock(GPU)
    start = clock.mark()
    for _ in range(20):
        work()
    end = clock.mark()
    assert clock.seconds_between(start, end) is None, "the device works for seconds"
    torch.cuda.synchronize(GPU)
    assert clock.seconds_between(start, end) is not None


@pytest.mark.gpu
def test_marks_are_recorded_in_the_current_stream(work: Callable[[], object]) -> None:
    clock, side = DeviceClock(GPU), torch.cuda.Stream(GPU)
    for _ in range(20):
        work()
    with torch.cuda.stream(side):
        start, end = clock.mark(), clock.mark()
    side.synchronize()
    assert clock.seconds_between(start, end) is not None, "the other stream does not wait for the work"
    torch.cuda.synchronize(GPU)


@pytest.mark.gpu
def test_timing_steps_never_waits_for_the_device(work: Callable[[], object]) -> None:
    clock, steps = DeviceClock(GPU), 30

    def waits(after_step: Callable[[], object]) -> tuple[int, StepTimer]:
        timer = StepTimer(clock=clock)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
            for _ in range(steps):
                work()
                timer.step(BatchPlan(1, 4), clock.mark())
                timer.lap()
                timer.step_times()
                after_step()
        names = Counter(event.name for event in profiled.events())
        return sum(names[name] for name in WAITS), timer

    found, timer = waits(lambda: None)
    assert found <= 2, "the profiler itself waits when it ends"
    torch.cuda.synchronize(GPU)
    timer.step(BatchPlan(1, 4), clock.mark())
    (measured,) = timer.step_times()
    assert steps - 2 <= measured.reports <= steps - 1, "all but the first step, and perhaps the last"
    found, _ = waits(torch.cuda.current_stream(GPU).synchronize)
    assert found >= steps, "so the profile shows what waits"
