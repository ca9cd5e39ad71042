"""Measurements of a job from successive views: stability, downtime and preparation time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.job import Job
from adascale_controller.measurements import DEFAULT_DOWNTIME, DEFAULT_PREPARATION, JobMeasurements
from adascale_core.batch.plans import candidate_plans
from adascale_core.messages.allocation import ActiveAllocation, Allocation
from adascale_core.messages.job_spec import JobSpec, LocalBszLimit
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.performance.goodput_table import candidate_counts
from adascale_core.views.jobs import JobView

REPORT = GainReport(
    generation=1, step=10, progress=10.0, epoch=0, replicas=1, local_bsz=4, accumulation=1, scale=1.0,
    gain=1.0, grad_sqr=0.1, grad_var=0.9, step_time=0.01, time=100.0, loss=0.5,
)  # fmt: skip
JOB = Job("default.digits", JobSpec(4, 64, (4, 16), 1, 4, 1000))


def view(generation: int, latest: GainReport | None, desired: int | None = None) -> JobView:
    return replace(
        JobView.empty(JOB.id),
        desired=Allocation(desired or generation, 1),
        active=ActiveAllocation(generation, 1),
        latest=latest,
        step_times=(StepTime(1, 4, 1, 0.01), StepTime(2, 8, 1, 0.02)),
    )


def test_a_job_is_stable_from_the_first_report_of_its_generation() -> None:
    measurements = JobMeasurements()
    assert measurements.update(view(1, None), 5.0) is None
    assert measurements.job_state(JOB, view(1, None), 1000).stable_since is None
    assert measurements.update(view(1, REPORT), 6.0) == REPORT
    assert measurements.update(view(1, replace(REPORT, step=11)), 7.0) is None
    state = measurements.job_state(JOB, view(1, REPORT), 1000)
    assert (state.stable_since, state.remaining, state.largest) == (6.0, 990.0, 2)
    assert state.restart_seconds == DEFAULT_DOWNTIME


def test_the_decision_knows_which_counts_need_batches_that_do_not_fit() -> None:
    job = Job("default.digits", JobSpec(8, 64, (5, 16), 1, 4, 1000))
    for limit, counts in ((None, (1, 2, 3, 4)), (7, (2, 3, 4))):
        limited = replace(view(1, REPORT), local_bsz_limit=limit)
        state = JobMeasurements().job_state(job, limited, 1000)
        assert candidate_counts(state.bounds, 1, 4) == counts
        plans = [plan for count in counts for plan in candidate_plans(state.bounds, count)]
        assert max(plan.local_bsz for plan in plans) == (limit or 16)


@pytest.mark.parametrize(
    ("accelerator", "limit"), [("NVIDIA-T4", 7), ("NVIDIA-H200", None), ("NVIDIA-L4", 12), (None, 12)]
)
def test_the_decision_has_the_limit_that_was_learned_on_the_type_of_accelerator(
    accelerator: str | None, limit: int | None
) -> None:
    limits = (LocalBszLimit("NVIDIA-L4", 12), LocalBszLimit("NVIDIA-T4", 7))
    on_l4 = replace(
        view(1, replace(REPORT, accelerator="NVIDIA-L4")), local_bsz_limits=limits, local_bsz_limit=12
    )
    state = JobMeasurements().job_state(JOB, on_l4, 1000, accelerator)
    assert state.bounds == JOB.spec.bounds.with_limit(limit)


def test_a_job_is_not_stable_while_another_allocation_is_desired_or_a_replica_is_lost() -> None:
    measurements = JobMeasurements()
    measurements.update(view(1, REPORT), 6.0)
    assert measurements.job_state(JOB, view(1, REPORT, desired=2), 1000).stable_since is None
    broken = replace(view(1, REPORT), broken=True)
    assert measurements.job_state(JOB, broken, 1000).stable_since is None


def test_restart_seconds_is_the_mean_downtime_of_the_changes() -> None:
    measurements = JobMeasurements()
    measurements.update(view(1, REPORT), 6.0)
    measurements.update(view(1, replace(REPORT, step=15, time=105.0)), 7.0)
    measurements.update(view(2, replace(REPORT, step=20, time=110.0)), 7.1)
    measurements.update(view(2, replace(REPORT, generation=2, step=31, time=112.1)), 8.0)
    assert measurements.last_downtime == pytest.approx(2.0)
    measurements.update(view(3, replace(REPORT, generation=3, step=32, time=116.1)), 9.0)
    assert measurements.job_state(JOB, view(3, REPORT), None).restart_seconds == pytest.approx(3.0)


def test_prepare_seconds_is_the_time_from_the_decision_to_the_last_step() -> None:
    measurements = JobMeasurements()
    measurements.update(view(1, REPORT), 6.0)
    assert measurements.job_state(JOB, view(1, REPORT), None).prepare_seconds == DEFAULT_PREPARATION
    measurements.update(view(1, REPORT, desired=2), 10.0)
    measurements.update(view(1, replace(REPORT, time=114.0), desired=2), 15.0)
    measurements.update(view(2, replace(REPORT, generation=2, step=11, time=115.0)), 16.0)
    assert measurements.last_downtime == pytest.approx(1.0)
    assert measurements.job_state(JOB, view(2, REPORT), None).prepare_seconds == pytest.approx(5.0)


def test_the_downtime_of_a_loss_does_not_count_for_restart_seconds() -> None:
    measurements = JobMeasurements()
    measurements.update(view(1, REPORT), 6.0)
    after_loss = replace(view(2, replace(REPORT, generation=2, time=190.0)), disruptions=1)
    measurements.update(after_loss, 8.0)
    assert measurements.last_downtime == 90.0
    assert measurements.job_state(JOB, view(2, REPORT), None).restart_seconds == DEFAULT_DOWNTIME


def test_the_time_without_replicas_does_not_count_for_restart_seconds() -> None:
    measurements = JobMeasurements()
    measurements.update(view(1, REPORT), 6.0)
    suspended = replace(view(1, REPORT), desired=Allocation(2, 0), active=None)
    measurements.update(suspended, 7.0)
    measurements.update(suspended, 7000.0)
    measurements.update(view(1, REPORT, desired=3), 7001.0)
    resumed = view(3, replace(REPORT, generation=3, step=11, time=7105.0))
    assert measurements.update(resumed, 7010.0) is not None
    assert measurements.last_downtime is None
    state = measurements.job_state(JOB, resumed, None)
    assert (state.restart_seconds, state.prepare_seconds) == (DEFAULT_DOWNTIME, DEFAULT_PREPARATION)
    measurements.update(view(4, replace(REPORT, generation=4, step=12, time=7107.0)), 7012.0)
    assert measurements.job_state(JOB, resumed, None).restart_seconds == pytest.approx(2.0)


def test_reports_of_previous_runs_are_ignored() -> None:
    measurements = JobMeasurements()
    measurements.ignore_before(2)
    assert measurements.update(view(1, REPORT), 6.0) is None
    assert measurements.job_state(JOB, view(1, REPORT), 1000).stable_since is None
    assert measurements.update(view(2, replace(REPORT, generation=2, time=900.0)), 7.0) is not None
    assert measurements.last_downtime is None


def test_only_measurements_on_the_present_type_of_accelerator_are_used() -> None:
    slow = [StepTime(1, 4, 1, 0.1, accelerator="NVIDIA-T4"), StepTime(8, 4, 1, 0.2, accelerator="NVIDIA-T4")]
    fast = [StepTime(2, 4, 1, 0.01, accelerator="NVIDIA-H200")]
    reported = replace(view(1, replace(REPORT, accelerator="NVIDIA-T4")), step_times=(*slow, *fast))
    measurements = JobMeasurements()

    def used(job: JobMeasurements, seen: JobView, accelerator: str | None) -> tuple[list[StepTime], ...]:
        job.add_reported(seen)
        state = job.job_state(JOB, seen, 1000, accelerator)
        assert state.largest == max(
            (each.replicas for each in (*state.step_times, *state.template_step_times)), default=0
        )
        return list(state.step_times), list(state.template_step_times)

    assert used(measurements, reported, "NVIDIA-T4") == (slow, slow)
    assert used(measurements, reported, "NVIDIA-H200") == (fast, fast), "it was moved, and has no report yet"
    assert used(measurements, reported, "NVIDIA-L4") == ([], [])
    assert used(measurements, reported, None) == (slow, slow), "the type of the last report"
    following, unknown = JobMeasurements(measurements.template), JobView.empty(JOB.id)
    assert used(following, unknown, "NVIDIA-H200") == ([], fast)
    assert used(following, unknown, None) == ([], slow), "the type on which the template was measured last"


def test_step_times_that_hardly_change_stay_those_from_before() -> None:
    measurements = JobMeasurements()

    def step_times(*measured: StepTime) -> tuple[StepTime, ...]:
        seen = replace(view(1, REPORT), step_times=measured)
        measurements.add_reported(seen)
        return tuple(measurements.job_state(JOB, seen, 1000).step_times)

    first = StepTime(2, 4, 1, 1.0, sync_time=0.2)
    assert step_times(first) == (first,)
    assert step_times(replace(first, step_time=1.009, reports=5)) == (first,)
    assert step_times(replace(first, sync_time=0.191)) == (first,)
    for changed in (
        replace(first, step_time=1.011),
        replace(first, step_time=1.03, sync_time=0.1),
        replace(first, sync_time=None),
    ):
        assert step_times(changed) == (changed,)
    other = replace(first, local_bsz=8)
    assert step_times(changed, other) == (changed, other)
    assert step_times(other) == (other,), "the service has dropped the other plan"
