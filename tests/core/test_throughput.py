"""Step time models: fitted to measurements, with cautious priors where measurements are missing."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchPlan
from adascale_core.messages.reports import StepTime
from adascale_core.performance.throughput import MAX_BATCH, StepTimeModel, fit_all
from support.examples import examples

plans = st.builds(BatchPlan, st.integers(1, 64), st.integers(1, 4096), st.integers(1, 16))


def measured(model: StepTimeModel, *plans: tuple[int, int, int]) -> list[StepTime]:
    return [StepTime(*plan, model.step_time(BatchPlan(*plan))) for plan in plans]


@pytest.mark.parametrize(
    ("plan", "seconds"),
    [
        (BatchPlan(1, 8), 0.1 + 8 * 0.01),
        (BatchPlan(1, 8, 3), 3 * (0.1 + 8 * 0.01)),
        (BatchPlan(2, 8), 0.1 + 8 * 0.01 + 0.05),
        (BatchPlan(5, 8, 2), 2 * (0.1 + 8 * 0.01) + 0.05 + 3 * 0.002),
    ],
)
def test_a_step_takes_the_time_of_its_micro_batches_and_of_a_synchronization(
    plan: BatchPlan, seconds: float
) -> None:
    model = StepTimeModel(fixed=0.1, per_sample=0.01, sync=0.05, sync_per_replica=0.002)
    assert model.step_time(plan) == pytest.approx(seconds)
    assert model.throughput(plan) == pytest.approx(1 / seconds)


def test_without_measurements_the_model_is_none() -> None:
    assert StepTimeModel.fit([]) is None
    assert StepTimeModel.fit([StepTime(1, 8, 1, 0.0)]) is None, "a step time of 0 is not measured yet"


def test_a_stale_measurement_counts_only_if_there_is_no_other() -> None:
    good, slow = StepTime(2, 4, 1, 0.1, 500), StepTime(4, 2, 1, 0.5, 1)
    stale = replace(slow, stale=True)
    assert StepTimeModel.fit([good, stale]) == StepTimeModel.fit([good])
    assert StepTimeModel.fit([stale]) == StepTimeModel.fit([slow])


@pytest.mark.parametrize("seconds", [1e-9, 1e-3, 1.0, 1e3, 1e9])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_model_meets_a_single_measurement_and_extrapolates_by_the_prior(
    seconds: float, accumulation: int
) -> None:
    model = StepTimeModel.fit([StepTime(1, 8, accumulation, seconds)])
    assert model is not None
    assert not model.separates_batch_size
    assert model.step_time(BatchPlan(1, 8, accumulation)) == pytest.approx(seconds)
    assert model.step_time(BatchPlan(1, 16, accumulation)) == pytest.approx(1.5 * seconds)
    assert model.step_time(BatchPlan(1, 8, 2 * accumulation)) == pytest.approx(2 * seconds)
    assert model.step_time(BatchPlan(4, 8, accumulation)) == pytest.approx(seconds, rel=0.01), (
        "optimistic, so that more replicas are tried"
    )


def test_measurements_on_a_single_count_predict_the_same_time_for_other_counts() -> None:
    measurements = [StepTime(4, size, 1, 1.0 + 0.01 * size) for size in (8, 16, 32)]
    model = StepTimeModel.fit(measurements)
    assert model is not None
    for measurement in measurements:
        for replicas in (1, 2, 8):
            assert model.step_time(replace(measurement.plan, replicas=replicas)) == pytest.approx(
                measurement.step_time, rel=0.05
            )


def test_a_second_count_of_replicas_separates_the_synchronization_time() -> None:
    model = StepTimeModel.fit([StepTime(1, 8, 1, 0.1), StepTime(2, 8, 1, 0.16)])
    assert model is not None
    assert not model.separates_batch_size
    assert model.sync == pytest.approx(0.06, rel=0.15)
    assert model.step_time(BatchPlan(4, 8)) == pytest.approx(0.16, rel=0.05)


@pytest.mark.parametrize("nodes", [1, 2])
def test_communication_measured_on_one_count_is_predicted_to_take_about_as_long_on_others(nodes: int) -> None:
    """A ring all-reduce takes at most twice as long on any number of replicas as on two."""
    model = StepTimeModel.fit([StepTime(1, 8, 1, 0.1), StepTime(8, 8, 1, 0.3, nodes=nodes)])
    assert model is not None
    assert model.step_time(BatchPlan(8, 8), nodes) == pytest.approx(0.3, rel=0.05)
    assert model.step_time(BatchPlan(32, 8), nodes) <= 0.1 + 1.5 * 0.2


@given(st.floats(1e-3, 10), st.integers(2, 64), st.integers(1, 2))
def test_communication_between_nodes_is_not_faster_unless_measured(
    seconds: float, replicas: int, nodes: int
) -> None:
    model = StepTimeModel.fit([StepTime(1, 8, 1, 0.1), StepTime(replicas, 8, 1, seconds, nodes=nodes)])
    assert model is not None
    for count in (2, 8, 64):
        plan = BatchPlan(count, 8)
        assert model.step_time(plan, 1) <= model.step_time(plan, 2)


@given(
    fixed=st.floats(0, 1),
    per_sample=st.floats(1e-4, 1e-2),
    sync=st.floats(0, 1),
    sync_per_replica=st.floats(0, 0.1),
    unit=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_step_times_are_recovered_from_enough_measurements(
    fixed: float, per_sample: float, sync: float, sync_per_replica: float, unit: float
) -> None:
    truth = StepTimeModel(fixed * unit, per_sample * unit, sync * unit, sync_per_replica * unit)
    table = list(product((1, 2, 3, 8), (8, 32, 128), (1, 2)))
    model = StepTimeModel.fit(measured(truth, *table))
    assert model is not None
    assert model.separates_batch_size
    for plan in (BatchPlan(*plan) for plan in [*table, (4, 64, 1), (16, 256, 2), (6, 16, 4)]):
        assert model.step_time(plan) == pytest.approx(truth.step_time(plan), rel=0.15)


def test_contradicting_measurements_are_averaged() -> None:
    """More samples cannot take less time, so the model predicts the same time for both."""
    model = StepTimeModel.fit([StepTime(1, 8, 1, 0.4), StepTime(1, 16, 1, 0.2)])
    assert model is not None
    assert 0.2 <= model.step_time(BatchPlan(1, 8)) <= model.step_time(BatchPlan(1, 16)) <= 0.4


def test_no_neighbouring_model_has_a_smaller_error() -> None:
    noisy = [
        StepTime(1, 8, 1, 0.11),
        StepTime(1, 32, 1, 0.29),
        StepTime(2, 8, 1, 0.15),
        StepTime(2, 32, 2, 0.71),
        StepTime(4, 16, 1, 0.17),
        StepTime(8, 16, 1, 0.31),
    ]
    model = StepTimeModel.fit(noisy)
    assert model is not None

    def error(fixed: float, per_sample: float, sync: float, sync_per_replica: float) -> float:
        other = StepTimeModel(fixed, per_sample, sync, sync_per_replica)
        return mean((other.step_time(time.plan) / time.step_time - 1) ** 2 for time in noisy)

    best = (model.fixed, model.per_sample, model.sync, model.sync_per_replica)
    for index, sign in product(range(4), (-1, 1)):
        moved = [value * (1 + sign * 0.05 * (i == index)) for i, value in enumerate(best)]
        assert error(*best) <= 1.2 * error(*moved) + 1e-4, "errors are logarithms, and the prior has weight"


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-10, 1e10])
def test_impossible_step_times_are_ignored(bad: float) -> None:
    good = [StepTime(1, 8, 1, 0.1), StepTime(2, 8, 1, 0.2)]
    assert StepTimeModel.fit([*good, StepTime(4, 16, 1, bad)]) == StepTimeModel.fit(good)


@given(
    st.lists(
        st.builds(
            StepTime,
            st.integers(1, 64),
            st.integers(1, 10**6),
            st.integers(1, 64),
            st.sampled_from([1e-300, 1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e12, 1e300]) | st.floats(1e-6, 1e3),
        ),
        min_size=1,
        max_size=12,
    ),
    plans,
)
def test_step_times_are_positive_finite_and_deterministic_for_any_measurements(
    measurements: list[StepTime], plan: BatchPlan
) -> None:
    model = StepTimeModel.fit(measurements)
    assert model == StepTimeModel.fit(measurements)
    assert (model is None) == all(not 1e-9 <= measurement.step_time <= 1e9 for measurement in measurements)
    if model is None:
        return
    parameters = (model.fixed, model.per_sample, model.sync, model.sync_per_replica)
    assert all(value >= 0 and math.isfinite(value) for value in parameters)
    assert 0 < model.step_time(plan) < math.inf
    assert 0 < model.throughput(plan) < math.inf


def test_accumulation_without_measured_cost_leaves_the_predicted_time_above_zero() -> None:
    model = StepTimeModel.fit([StepTime(2, 8, 1, 1.0), StepTime(2, 8, 64, 0.5)])
    assert model is not None
    assert model.throughput(BatchPlan(1, 8)) <= 1e3


@pytest.mark.timeout(10)
def test_the_parameters_are_recovered_from_4096_measurements_within_the_timeout() -> None:
    truth = StepTimeModel(fixed=0.02, per_sample=0.001, sync=0.03, sync_per_replica=0.004)
    table = list(product(range(1, 65), range(8, 264, 8), (1, 2)))
    model = StepTimeModel.fit(measured(truth, *table))
    assert model is not None
    assert model.fixed == pytest.approx(truth.fixed, rel=0.01)
    assert model.per_sample == pytest.approx(truth.per_sample, rel=0.01)
    assert model.sync == pytest.approx(truth.sync, rel=0.01)
    assert model.sync_per_replica == pytest.approx(truth.sync_per_replica, rel=0.02)


# -- many jobs at once ----------------------------------------------------------------------------------

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


@given(st.lists(questions, min_size=1, max_size=6), st.lists(questions, max_size=3))
@settings(max_examples=examples(50))
def test_a_model_does_not_depend_on_the_jobs_that_are_fitted_with_it(
    drawn: Sequence[tuple[Sequence[StepTime], Sequence[StepTime]]],
    others: Sequence[tuple[Sequence[StepTime], Sequence[StepTime]]],
) -> None:
    alone = [StepTimeModel.fit(*question) for question in drawn]
    assert fit_all([*others, *drawn])[len(others) :] == alone


def test_more_jobs_than_fit_into_a_batch_keep_their_order() -> None:
    measured = [((StepTime(1, 8, 1, 0.01 * (i + 1)),), ()) for i in range(MAX_BATCH + 1)]
    times = [model.step_time(BatchPlan(1, 8)) for model in fit_all(measured) if model is not None]
    assert times == pytest.approx([0.01 * (i + 1) for i in range(MAX_BATCH + 1)])


def test_without_measurements_a_job_has_the_model_of_its_template_or_none() -> None:
    template = (StepTime(2, 8, 1, 0.5),)
    assert fit_all([((), template), ((), ())]) == [StepTimeModel.fit(template), None]
