"""The step_timer counts steps that follow each other, and nothing else."""

from adascale_core.batch import BatchPlan
from adascale_worker.step_timer import StepTimer

PLAN = BatchPlan(1, 4)


def run(watch: StepTimer, *times: float, plan: BatchPlan = PLAN) -> None:
    for now in times:
        watch.step(plan, now)


def test_the_first_step_is_not_counted() -> None:
    watch = StepTimer()
    run(watch, 10.0, 15.0)  # the first takes long, whatever it is measured from
    assert watch.lap() == 0.0
    run(watch, 15.5, 16.0)
    assert watch.lap() == 0.5


def test_the_step_after_a_pause_is_not_counted() -> None:
    watch = StepTimer()
    run(watch, 0.0, 1.0, 2.0)
    watch.pause()
    run(watch, 100.0, 101.0)
    assert [time.step_time for time in watch.step_times()] == [1.0]


def test_a_lap_is_the_mean_since_the_last_lap() -> None:
    watch = StepTimer()
    run(watch, 0.0, 1.0, 2.0, 4.0)
    assert watch.lap() == 1.5
    assert watch.lap() == 0.0


def test_plans_are_told_apart_by_their_median() -> None:
    watch = StepTimer()
    run(watch, 0.0, 1.0, 2.0, 3.0, 13.0)
    run(watch, 15.0, 17.0, plan=BatchPlan(1, 8))
    assert {(time.local_bsz, time.step_time) for time in watch.step_times()} == {(4, 1.0), (8, 2.0)}


def test_measurements_survive_a_re_entry() -> None:
    watch, later = StepTimer(), StepTimer()
    run(watch, 0.0, 1.0, 2.0, 3.0)
    later.load_state_dict(watch.state_dict())
    assert later.step_times() == watch.step_times()
