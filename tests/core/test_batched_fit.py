"""Models of many jobs at once: those of `StepTimeModel.fit`, whichever jobs are fitted together."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchPlan
from adascale_core.messages.reports import StepTime
from adascale_core.performance.batched_fit import MAX_BATCH, MIN_BATCH, fit_all
from adascale_core.performance.throughput import StepTimeModel
from support.examples import examples

step_times = st.builds(
    StepTime,
    replicas=st.integers(1, 64),
    local_bsz=st.integers(1, 512),
    accumulation=st.integers(1, 8),
    step_time=st.floats(0.01, 10.0),
    nodes=st.integers(1, 4),
    sync_time=st.none() | st.floats(0.0, 1.0),
)
truths = st.builds(
    StepTimeModel,
    fixed=st.floats(0.001, 1),
    per_sample=st.floats(1e-4, 0.1),
    sync=st.floats(1e-4, 1),
    sync_per_replica=st.floats(1e-5, 0.1),
    node_sync=st.floats(1e-4, 2),
    node_sync_per_replica=st.floats(1e-5, 0.1),
    overlap=st.floats(1, 10),
)


@st.composite
def noisy(draw: st.DrawFn) -> Sequence[StepTime]:
    """Draw the measurements of a job: of a model, with noise."""
    truth = draw(truths)
    plans = draw(st.lists(st.tuples(st.integers(1, 32), st.integers(1, 256), st.integers(1, 4)), max_size=8))
    return tuple(
        StepTime(*plan, truth.step_time(BatchPlan(*plan), nodes) * draw(st.floats(0.9, 1.1)), nodes=nodes)
        for plan, nodes in zip(plans, draw(st.lists(st.integers(1, 3), min_size=8)), strict=False)
    )


questions = st.tuples(
    st.lists(step_times, max_size=40).map(tuple) | noisy(), st.just(()) | noisy().map(tuple)
)


def assert_same(found: StepTimeModel | None, expected: StepTimeModel | None) -> None:
    """Check that models predict the same step times, up to the precision of a fit."""
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.separates_batch_size == expected.separates_batch_size
    for replicas, size, nodes in product((1, 2, 16), (8, 64), (1, 2)):
        plan = BatchPlan(replicas, size)
        assert found.step_time(plan, nodes) == pytest.approx(expected.step_time(plan, nodes), rel=1e-3)


@given(st.lists(questions, min_size=1, max_size=6))
def test_models_of_many_jobs_are_those_of_each_job(
    drawn: Sequence[tuple[Sequence[StepTime], Sequence[StepTime]]],
) -> None:
    repeated = [*drawn] * -(-MIN_BATCH // len(drawn))
    for found, question in zip(fit_all(repeated), repeated, strict=True):
        assert_same(found, StepTimeModel.fit(*question))


@given(st.lists(questions, min_size=MIN_BATCH, max_size=MIN_BATCH + 4), questions)
@settings(max_examples=examples(10))
def test_a_model_does_not_depend_on_the_jobs_that_are_fitted_with_it(
    drawn: Sequence[tuple[Sequence[StepTime], Sequence[StepTime]]],
    other: tuple[Sequence[StepTime], Sequence[StepTime]],
) -> None:
    assert fit_all([*drawn, other])[:-1] == fit_all(drawn)


def test_more_jobs_than_fit_into_a_batch_keep_their_order() -> None:
    measured = [((StepTime(1, 8, 1, 0.01 * (i + 1)),), ()) for i in range(MAX_BATCH + 1)]
    times = [model.step_time(BatchPlan(1, 8)) for model in fit_all(measured) if model is not None]
    assert times == pytest.approx([0.01 * (i + 1) for i in range(MAX_BATCH + 1)])


def test_without_measurements_a_job_has_the_model_of_its_template_or_none() -> None:
    template = (StepTime(2, 8, 1, 0.5),)
    found = fit_all([((), template), ((), ())] * MIN_BATCH)
    assert found[:2] == [StepTimeModel.fit(template), None]
