"""Tests of the step timer: it measures consecutive steps only, when the device has done them."""

from hypothesis import given
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchPlan
from adascale_worker.process.device import MAX_PENDING, DeviceClock
from adascale_worker.reporting.progress import StepTimer

PLAN = BatchPlan(1, 4)


def run(timer: StepTimer, *times: float, plan: BatchPlan = PLAN) -> None:
    for now in times:
        timer.step(plan, now)


def test_the_first_step_is_not_counted() -> None:
    timer = StepTimer()
    run(timer, 10.0, 15.0)  # the first step takes long
    assert timer.lap() == 0.0
    run(timer, 15.5, 16.0)
    assert timer.lap() == 0.5


def test_the_step_after_a_pause_is_not_counted() -> None:
    timer = StepTimer()
    run(timer, 0.0, 1.0, 2.0)
    timer.pause()
    run(timer, 100.0, 101.0)
    assert [time.step_time for time in timer.step_times()] == [1.0]


def test_a_lap_returns_the_mean_since_the_last_lap() -> None:
    timer = StepTimer()
    run(timer, 0.0, 1.0, 2.0, 4.0)
    assert timer.lap() == 1.5
    assert timer.lap() == 0.0


def test_each_plan_has_its_own_median() -> None:
    timer = StepTimer()
    run(timer, 0.0, 1.0, 2.0, 3.0, 13.0)
    run(timer, 15.0, 17.0, plan=BatchPlan(1, 8))
    assert {(time.local_bsz, time.step_time) for time in timer.step_times()} == {(4, 1.0), (8, 2.0)}


def test_measurements_survive_reentry() -> None:
    timer, restored = StepTimer(), StepTimer()
    run(timer, 0.0, 1.0, 2.0, 3.0)
    timer.step(PLAN, 5.0, nodes=2)
    timer.add_sync_time(PLAN, 2, 0.25)
    restored.load_state_dict(timer.state_dict())
    assert restored.step_times() == timer.step_times()


def test_measurements_on_another_type_of_accelerator_are_not_restored() -> None:
    timer = StepTimer("NVIDIA-H200")
    run(timer, 0.0, 1.0, 2.0, 3.0)
    for accelerator, restored in (("NVIDIA-H200", 1), ("NVIDIA-L4", 0)):
        other = StepTimer(accelerator)
        other.load_state_dict(timer.state_dict())
        assert len(other.step_times()) == restored


def test_a_plan_is_measured_on_each_number_of_nodes() -> None:
    timer = StepTimer()
    run(timer, 0.0, 1.0, 2.0)
    for now in (4.0, 6.0):
        timer.step(PLAN, now, nodes=2)
    for seconds in (0.5, 0.7, 0.75):
        timer.add_sync_time(PLAN, 2, seconds)
    timer.add_sync_time(PLAN, 3, 1.0)
    assert {(time.nodes, time.step_time, time.sync_time) for time in timer.step_times()} == {
        (1, 1.0, None),
        (2, 2.0, 0.7),
    }


class LateDevice(DeviceClock):
    """A device that is behind the program: it has passed the marks up to `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def mark(self) -> float:
        raise NotImplementedError("the tests have their own times")

    def seconds_between(self, start: float, end: float) -> float | None:
        return end - start if max(start, end) <= self.now else None


def test_steps_are_measured_when_the_device_has_done_them_with_the_plan_that_they_had() -> None:
    device = LateDevice()
    timer = StepTimer(clock=device)
    run(timer, 0.0, 1.0, 2.0, 3.0)
    assert (timer.step_times(), timer.lap(), timer.recent_median) == ([], 0.0, 0.0)
    device.now = 3.0
    run(timer, 13.0, plan=BatchPlan(1, 8))
    assert [(time.local_bsz, time.reports) for time in timer.step_times()] == [(4, 2)]
    device.now = 13.0
    run(timer, 14.0)
    assert {(time.local_bsz, time.step_time) for time in timer.step_times()} == {(4, 1.0), (8, 10.0)}
    assert timer.lap() == 4.0


durations = st.sampled_from([0.25, 0.5, 1.0, 2.0])


@given(
    st.lists(st.tuples(durations, st.sampled_from([4, 8]), st.booleans(), st.integers(0, 6)), max_size=40),
)
def test_a_device_that_is_behind_measures_the_same_as_one_that_is_not(
    steps: list[tuple[float, int, bool, int]],
) -> None:
    """Each step has a duration, a local batch size, whether a pause follows, and how far the device is."""
    device = LateDevice()
    late, timer = StepTimer(clock=device), StepTimer()
    now, ends = 0.0, [0.0]
    for duration, local_bsz, is_pause, behind in steps:
        now += duration
        ends.append(now)
        device.now = max(device.now, ends[max(len(ends) - 1 - behind, 0)])
        for each in (late, timer):
            each.step(BatchPlan(1, local_bsz), now)
            if is_pause:
                each.pause()
    device.now = now
    for each in (late, timer):
        each.pause()
        each.step(PLAN, now + 1)
    assert late.step_times() == timer.step_times()
    assert late.recent_median == timer.recent_median
    assert late.lap() == timer.lap()


def test_a_device_that_is_far_behind_costs_bounded_memory() -> None:
    device = LateDevice()
    timer = StepTimer(clock=device)
    run(timer, *map(float, range(2 * MAX_PENDING)))
    device.now = 2.0 * MAX_PENDING
    run(timer, 2.0 * MAX_PENDING)
    (time,) = timer.step_times()
    assert time.step_time == 1.0
    assert time.reports <= MAX_PENDING
