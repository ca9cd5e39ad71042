"""What a job of the same template has reported is known when the next one starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.schedule.measurements import MeasuredTemplate, TemplateMeasurements
from adascale_core.batch.gain import GradientEstimate
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.reports import StepTime
from support.observed_jobs import SPEC, decided, new_job, report, training_job

TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "mine:1"}]}}


def first_job() -> ObservedJob:
    """Return a job that has trained on 1 and 2 replicas."""
    at_two = training_job((2, 2), template=TEMPLATE)
    assert at_two.service is not None
    times = (StepTime(1, 4, 1, 0.1), StepTime(2, 4, 1, 0.101), StepTime(2, 8, 1, 0.15))
    service = replace(at_two.service, step_times=times, latest=report(2, 2))
    return replace(at_two, service=service)


def next_job(
    name: str, namespace: str = "team", template: dict[str, Any] = TEMPLATE, spec: JobSpec = SPEC
) -> ObservedJob:
    """Return a job that has not started."""
    return new_job(name, namespace=namespace, template=template, spec=spec)


def decide(scheduler: Scheduler, *jobs: ObservedJob) -> dict[str, int]:
    return {job_id: decision.replicas for job_id, decision in decided(scheduler, *jobs).items()}


OTHER = {"spec": {"containers": [{"name": "worker", "image": "mine:2"}]}}


@pytest.mark.parametrize(
    ("later", "replicas"),
    [
        (next_job("same"), 4),
        (next_job("image", template=OTHER), 1),
        (next_job("same", namespace="others"), 1),
        (next_job("batch", spec=replace(SPEC, batch_size=8)), 1),
    ],
    ids=["same", "another-image", "another-namespace", "another-batch-size"],
)
def test_a_job_starts_with_what_jobs_of_the_same_template_have_reported(
    later: ObservedJob, replicas: int
) -> None:
    scheduler = Scheduler()
    first = first_job()
    assert decide(scheduler, later)[later.resource.id] == 1, "nothing is known yet"
    assert decide(scheduler, first, later)[later.resource.id] == replicas
    scheduler.retain({later.resource.uid})
    assert decide(scheduler, later)[later.resource.id] == replicas, "the first job is gone"


def test_the_estimate_of_a_template_is_of_an_early_step_but_not_of_the_first_steps() -> None:
    template = MeasuredTemplate()
    for step, expected in ((1, 1), (50, 1), (120, 120), (121, 120), (5000, 120)):
        template.add_estimate(GradientEstimate(1.0, float(step)), step, progress=step)
        assert template.first_estimate == GradientEstimate(1.0, float(expected))


def test_later_estimates_of_a_template_are_few_and_of_its_last_job() -> None:
    template = MeasuredTemplate()
    for job_ in (1.0, 2.0):
        for progress in range(2000):
            template.add_estimate(GradientEstimate(job_, float(progress)), progress, progress)
    later = template.estimates_after(1000.0)
    assert 2 <= len(later) <= 8
    assert [progress for progress, _ in later] == sorted(progress for progress, _ in later)
    assert all(progress > 1000 for progress, _ in later)
    assert {estimate.grad_sqr for _, estimate in later} == {2.0}
    assert template.estimates_after(2000.0) == ()


@pytest.mark.parametrize("counts_samples", [False, True])
def test_later_estimates_are_of_jobs_whose_progress_counts_the_same(counts_samples: bool) -> None:
    template = MeasuredTemplate()
    estimates = {False: GradientEstimate(1.0, 2.0), True: GradientEstimate(1.0, 3.0)}
    for each, estimate in estimates.items():
        template.add_estimate(estimate, 100, 500.0, counts_samples=each)
    later = template.estimates_after(100.0, counts_samples=counts_samples)
    assert later == ((500.0, estimates[counts_samples]),)


def test_the_templates_and_jobs_that_are_remembered_are_bounded() -> None:
    templates = TemplateMeasurements()
    first = templates.of("0")
    for i in range(templates.MAX_TEMPLATES):
        assert templates.of(str(i)) is templates.of(str(i))
    assert templates.of("0") is first
    templates.of("one more")
    assert templates.of("1") is not None
    assert templates.of("0") is first
    for i in range(2 * first.MAX_JOBS):
        first.add(f"job-{i}", [StepTime(1, 4, 1, float(i))])
    assert len(first._times["", 1, 1, 4, 1]) == first.MAX_JOBS
