"""Measurements of a job from successive views: stability, downtime and preparation time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.schedule.measurements import (
    DEFAULT_DOWNTIME,
    DEFAULT_PREPARATION,
    JobMeasurements,
    MeasuredTemplate,
    TemplateMeasurements,
    TypeRatios,
    training_target,
)
from adascale_core.batch.plans import candidate_plans
from adascale_core.decision.job_utility import JobState
from adascale_core.messages.allocation import ActiveAllocation, Allocation
from adascale_core.messages.job_spec import JobSpec, LocalBszLimit
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.performance.goodput_table import candidate_counts
from adascale_core.views.jobs import JobView, ReplicaView

REPORT = GainReport(
    generation=1, step=10, progress=10.0, epoch=0, replicas=1, local_bsz=4, accumulation=1, scale=1.0,
    gain=1.0, grad_sqr=0.1, grad_var=0.9, step_time=0.01, time=100.0, loss=0.5,
)  # fmt: skip
JOB = "default.digits"
SPEC = JobSpec(4, 64, (4, 16), 1, 4, 1000)


def view(generation: int, latest: GainReport | None, desired: int | None = None) -> JobView:
    return replace(
        JobView.empty(JOB),
        desired=Allocation(desired or generation, 1),
        active=ActiveAllocation(generation, 1),
        latest=latest,
        step_times=(StepTime(1, 4, 1, 0.01), StepTime(2, 8, 1, 0.02)),
    )


def test_a_job_is_stable_from_the_first_report_of_its_generation() -> None:
    measurements = JobMeasurements()
    assert measurements.update(view(1, None), 5.0) is None
    assert measurements.job_state(JOB, SPEC, view(1, None), 1000).stable_since is None
    assert measurements.update(view(1, REPORT), 6.0) == REPORT
    assert measurements.update(view(1, replace(REPORT, step=11)), 7.0) is None
    state = measurements.job_state(JOB, SPEC, view(1, REPORT), 1000)
    assert (state.stable_since, state.remaining, state.largest) == (6.0, 990.0, 2)
    assert state.restart_seconds == DEFAULT_DOWNTIME


@pytest.mark.parametrize("spec", [{"train_samples": 4000}, {}], ids=["job", "program"])
def test_the_rest_of_a_job_of_samples_is_in_samples(spec: dict[str, int]) -> None:
    declared = JobSpec(4, 64, (4, 16), 1, 4, **spec)  # type: ignore[arg-type]
    report = replace(REPORT, scale=4.0, gain=3.0, target=1000.0, counts_samples=True)
    measurements = JobMeasurements()
    for progress in (100.0, 2000.0):
        measurements.add_reported(view(1, replace(report, progress=progress)))
    measurements.template.add_estimate(report.estimate, 100, 500.0)
    state = measurements.job_state(JOB, declared, view(1, report), training_target(declared, view(1, report)))
    assert (state.remaining, state.counts_samples) == (1000 - REPORT.progress, True)
    assert state.later_estimates == ((100 - REPORT.progress, report.estimate),)


def test_the_decision_knows_which_counts_need_batches_that_do_not_fit() -> None:
    declared = JobSpec(8, 64, (5, 16), 1, 4, 1000)
    for limit, counts in ((None, (1, 2, 3, 4)), (7, (2, 3, 4))):
        limited = replace(view(1, REPORT), local_bsz_limit=limit)
        state = JobMeasurements().job_state(JOB, declared, limited, 1000)
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
    state = JobMeasurements().job_state(JOB, SPEC, on_l4, 1000, accelerator)
    assert state.bounds == SPEC.bounds.with_limit(limit)


def test_a_job_is_not_stable_while_another_allocation_is_desired_or_a_replica_is_lost() -> None:
    measurements = JobMeasurements()
    measurements.update(view(1, REPORT), 6.0)
    assert measurements.job_state(JOB, SPEC, view(1, REPORT, desired=2), 1000).stable_since is None
    broken = replace(view(1, REPORT), broken=True)
    assert measurements.job_state(JOB, SPEC, broken, 1000).stable_since is None


def test_restart_seconds_is_the_mean_downtime_of_the_changes() -> None:
    measurements = JobMeasurements()
    measurements.update(view(1, REPORT), 6.0)
    measurements.update(view(1, replace(REPORT, step=15, time=105.0)), 7.0)
    measurements.update(view(2, replace(REPORT, step=20, time=110.0)), 7.1)
    measurements.update(view(2, replace(REPORT, generation=2, step=31, time=112.1)), 8.0)
    assert measurements.last_downtime == pytest.approx(2.0)
    measurements.update(view(3, replace(REPORT, generation=3, step=32, time=116.1)), 9.0)
    assert measurements.job_state(JOB, SPEC, view(3, REPORT), None).restart_seconds == pytest.approx(3.0)


def test_prepare_seconds_is_the_time_from_the_decision_to_the_last_step() -> None:
    measurements = JobMeasurements()
    measurements.update(view(1, REPORT), 6.0)
    assert measurements.job_state(JOB, SPEC, view(1, REPORT), None).prepare_seconds == DEFAULT_PREPARATION
    measurements.update(view(1, REPORT, desired=2), 10.0)
    measurements.update(view(1, replace(REPORT, time=114.0), desired=2), 15.0)
    measurements.update(view(2, replace(REPORT, generation=2, step=11, time=115.0)), 16.0)
    assert measurements.last_downtime == pytest.approx(1.0)
    assert measurements.job_state(JOB, SPEC, view(2, REPORT), None).prepare_seconds == pytest.approx(5.0)


def test_the_downtime_of_a_loss_does_not_count_for_restart_seconds() -> None:
    measurements = JobMeasurements()
    measurements.update(view(1, REPORT), 6.0)
    after_loss = replace(view(2, replace(REPORT, generation=2, time=190.0)), disruptions=1)
    measurements.update(after_loss, 8.0)
    assert measurements.last_downtime == 90.0
    assert measurements.job_state(JOB, SPEC, view(2, REPORT), None).restart_seconds == DEFAULT_DOWNTIME


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
    state = measurements.job_state(JOB, SPEC, resumed, None)
    assert (state.restart_seconds, state.prepare_seconds) == (DEFAULT_DOWNTIME, DEFAULT_PREPARATION)
    measurements.update(view(4, replace(REPORT, generation=4, step=12, time=7107.0)), 7012.0)
    assert measurements.job_state(JOB, SPEC, resumed, None).restart_seconds == pytest.approx(2.0)


def test_reports_of_previous_runs_are_ignored() -> None:
    measurements = JobMeasurements()
    measurements.ignore_before(2)
    assert measurements.update(view(1, REPORT), 6.0) is None
    assert measurements.job_state(JOB, SPEC, view(1, REPORT), 1000).stable_since is None
    assert measurements.update(view(2, replace(REPORT, generation=2, time=900.0)), 7.0) is not None
    assert measurements.last_downtime is None


def test_measurements_on_another_type_of_accelerator_are_used_for_more_replicas() -> None:
    slow = [StepTime(1, 4, 1, 0.1, accelerator="NVIDIA-T4"), StepTime(8, 4, 1, 0.2, accelerator="NVIDIA-T4")]
    fast = [StepTime(2, 4, 1, 0.01, accelerator="NVIDIA-H200")]
    reported = replace(view(1, replace(REPORT, accelerator="NVIDIA-T4")), step_times=(*slow, *fast))
    measurements = JobMeasurements()

    def used(job: JobMeasurements, seen: JobView, accelerator: str | None) -> tuple[list[StepTime], ...]:
        job.add_reported(seen)
        state = job.job_state(JOB, SPEC, seen, 1000, accelerator)
        assert state.largest == max(
            (each.replicas for each in (*state.step_times, *state.template_step_times)), default=0
        )
        return list(state.step_times), list(state.template_step_times)

    assert used(measurements, reported, "NVIDIA-T4") == (slow, slow)
    (own, template) = used(measurements, reported, "NVIDIA-H200")
    assert own == fast, "it was moved, and has no report yet"
    assert template[:1] == fast
    assert [each.replicas for each in template[1:]] == [8], "of another type, on more replicas"
    (own, template) = used(measurements, reported, "NVIDIA-L4")
    assert own == []
    assert [each.step_time for each in template] == [0.1, 0.2], "as long as on T4: no ratio is known"
    assert used(measurements, reported, None) == (slow, slow), "the type of the last report"
    following, unknown = JobMeasurements(measurements.template), JobView.empty(JOB)
    assert used(following, unknown, "NVIDIA-H200")[1][:1] == fast
    assert used(following, unknown, None) == ([], slow), "the type on which the template was measured last"


def test_step_times_that_hardly_change_stay_those_from_before() -> None:
    measurements = JobMeasurements()

    def step_times(*measured: StepTime) -> tuple[StepTime, ...]:
        seen = replace(view(1, REPORT), step_times=measured)
        measurements.add_reported(seen)
        return tuple(measurements.job_state(JOB, SPEC, seen, 1000).step_times)

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


def test_the_ratio_of_types_is_that_of_other_templates_until_a_template_was_on_both() -> None:
    templates = TemplateMeasurements()

    def times(accelerator: str, factor: float) -> list[StepTime]:
        return [
            StepTime(1, size, 1, factor * (0.1 + 0.01 * size), accelerator=accelerator)
            for size in (8, 16, 32)
        ]

    def on_h200() -> JobState:
        """Return the state of a job that was measured on T4 only."""
        measurements = JobMeasurements(templates.of("new"))
        seen = replace(view(1, replace(REPORT, accelerator="T4")), step_times=tuple(times("T4", 2.0)))
        measurements.add_reported(seen)
        return measurements.job_state(JOB, SPEC, seen, 1000, "H200")

    assert "times 1.00 are used (no ratio is known)" in on_h200().assumption
    for name, factor in (("a", 0.2), ("b", 0.05)):
        templates.of(name).add(name, [*times("T4", 1.0), *times("H200", factor)], "H200")
    state = on_h200()
    assert [each.step_time for each in state.template_step_times] == pytest.approx(
        [0.1 * each.step_time for each in times("T4", 2.0)], rel=0.02
    ), "the geometric mean of both ratios"
    assert state.assumption == (
        "on H200 it was not measured: step times on T4 times 0.10 are used (the ratio of 2 other programs)"
    )
    templates.of("new").add("before", [*times("T4", 2.0), *times("H200", 1.0)], "H200")
    assert on_h200().assumption == "", "jobs of its template were measured there"


def test_the_ratio_of_a_template_that_is_not_remembered_any_more_is_none_of_another_one() -> None:
    ratios = TypeRatios()
    times = {
        name: [StepTime(1, size, 1, factor * (0.1 + 0.01 * size), accelerator=name) for size in (8, 16, 32)]
        for name, factor in (("T4", 1.0), ("H200", 0.2))
    }
    for _ in range(3):
        # Often in the same place of the memory.
        template = MeasuredTemplate(ratios)
        assert ratios.of("H200", "T4", template) == (1.0, "no ratio is known")
        ratios.add(template, times)
        assert ratios.of("H200", "T4", template)[1] == "the ratio of one replica"
        del template


def test_the_time_that_a_job_is_suspended_is_not_that_of_a_move() -> None:
    measurements = JobMeasurements()
    on_t4 = replace(REPORT, accelerator="T4")
    running = ReplicaView(
        replica=0, instance="a", address="127.0.0.1", port=1, state=ReplicaState.RUNNING, generation=1,
        seconds_since_heartbeat=0.0,
    )  # fmt: skip
    measurements.update(view(1, on_t4), 0.0)
    suspended = replace(view(1, on_t4), desired=Allocation(2, 0))
    measurements.update(replace(suspended, replicas=(running,)), 1.0)
    measurements.update(suspended, 6.0)
    measurements.update(suspended, 2000.0)
    measurements.update(view(1, on_t4, desired=3), 3006.0)
    moved = replace(on_t4, generation=3, step=11, time=3110.0, accelerator="H200")
    measurements.update(view(3, moved), 3011.0)
    state = measurements.job_state(JOB, SPEC, view(3, moved), 1000)
    assert state.move_seconds == pytest.approx(3110.0 - 100.0 - 3000.0)
