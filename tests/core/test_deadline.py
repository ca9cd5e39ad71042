"""Deadlines: which count meets them, what they are worth, and whether they can be met at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.batch.gain import GradientEstimate
from adascale_core.decision.deadline import DeadlineOutlook
from adascale_core.decision.explanation import explain
from adascale_core.decision.job_utility import JobState, JobUtility
from adascale_core.performance.throughput import StepTimeModel
from adascale_core.views.decision import LimitKind
from support.job_states import (
    CLEAR,
    NOISY,
    NOW,
    OF_SAMPLES,
    capacities,
    counts,
    job,
    job_states,
    several_jobs,
    solved,
    unmeasured,
)

ALL = (1, 2, 4, 8)
PARTLY = GradientEstimate(grad_sqr=1.0, grad_var=2.0)
"""The gain of a larger batch is at most 3."""
OVERHEAD = StepTimeModel(fixed=2.0, per_sample=0.01)
"""Larger batches train more samples per second."""


def due(state: JobState, left: float | None) -> JobState:
    """Return a job whose deadline is `left` seconds away."""
    return replace(state, deadline=None if left is None else NOW + left)


def long(name: str, left: float | None = None, *, arrival: float = 0.0, replicas: int = 4) -> JobState:
    """Return a job of 3286 s on one replica, 813 s on 4 and 411 s on 8; a change takes 10 s."""
    return due(job(name, replicas, arrival=arrival, measured=ALL, remaining=10_000.0), left)


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        # no deadline, or one that the count for the highest goodput meets
        (None, 4),
        (5000.0, 4),
        # more replicas are needed
        (850.0, 4),
        (700.0, 5),
        (600.0, 6),
        (500.0, 7),
        # 8 replicas would miss it: it is treated as without a deadline
        (300.0, 4),
        (1.0, 4),
    ],
)
def test_a_job_gets_the_replicas_that_its_deadline_needs_if_any_count_meets_it(
    left: float | None, expected: int
) -> None:
    other = replace(long("b"), remaining=1_000.0)
    assert counts([long("a", left), other], 8) == {"a": expected, "b": 8 - expected}


def test_of_two_deadlines_that_cannot_both_be_met_the_one_of_fewer_replica_hours_is() -> None:
    short = due(job("short", 4, measured=ALL, remaining=5_000.0), 300.0)
    assert counts([long("long", 600.0), short], 8) == {"long": 2, "short": 6}


@pytest.mark.parametrize(
    ("present", "remaining", "left", "met"),
    [(4, 6_000.0, 350.0, "short"), (6, 6_000.0, 350.0, "long"), (6, 3_000.0, 175.0, "short")],
)
def test_a_count_that_meets_a_deadline_is_given_up_for_half_of_the_replica_hours(
    present: int, remaining: float, left: float, met: str
) -> None:
    short = due(job("short", 8 - present, measured=ALL, remaining=remaining), left)
    found = counts([long("long", 600.0, replicas=present), short], 8)
    assert max(found, key=lambda name: found[name]) == met
    assert max(found.values()) >= 6


def test_a_job_grows_towards_a_count_that_it_may_not_have_yet() -> None:
    """8 replicas are needed, and only 2 are near those that were measured."""
    beginner = due(job("a", 1, measured=[1], remaining=10_000.0), 600.0)
    assert counts([beginner, long("b", replicas=7)], 8) == {"a": 2, "b": 6}


@pytest.mark.parametrize(
    ("first", "second", "runs"),
    [
        ({}, {}, "first"),
        ({}, {"deadline": NOW + 100}, "second"),
        ({"deadline": NOW + 50}, {"deadline": NOW + 100}, "first"),
        ({"deadline": NOW + 100}, {"deadline": NOW + 50}, "second"),
        ({"priority": 1}, {"deadline": NOW + 50}, "first"),
    ],
)
def test_jobs_are_admitted_by_priority_then_deadline_then_arrival(
    first: dict[str, float], second: dict[str, float], runs: str
) -> None:
    jobs = [
        replace(unmeasured("first", arrival=1.0), **first),  # type: ignore[arg-type]
        replace(unmeasured("second", arrival=2.0), **second),  # type: ignore[arg-type]
    ]
    assert [name for name, count in counts(jobs, 1).items() if count] == [runs]


@pytest.mark.parametrize(
    ("state", "sufficient"),
    [
        (long("a", 3000.0, replicas=1), 2),
        (long("a", 3290.0, replicas=1), 1),
        # a start takes a restart too
        (long("a", 3290.0, replicas=0), 2),
        # it gives up replicas only if the prediction may be too low by the uncertainty
        (long("a", 1700.0, replicas=4), 3),
        (long("a", 1700.0, replicas=2), 2),
        # the fastest count is tried while it may be predicted too slow
        (long("a", 400.0, replicas=8), 8),
        (long("a", 300.0, replicas=8), None),
    ],
)
def test_the_smallest_count_that_meets_a_deadline(state: JobState, sufficient: int | None) -> None:
    outlook = JobUtility.of(state).deadline_outlook(NOW)
    assert outlook is not None
    assert outlook.sufficient == sufficient


@pytest.mark.parametrize(
    ("left", "sufficient", "seconds_to_change"),
    [
        (600.5, 1, 0.5),
        (600.0, 1, 0.0),
        (599.0, 2, 299.0),
        (300.0, 2, 0.0),
        # the fastest is tried while it may be predicted too high by a factor of 1.2
        (299.0, 2, 49.0),
        (250.0, 2, 0.0),
        (249.0, None, inf),
    ],
)
def test_a_count_meets_a_deadline_until_the_change_that_is_foretold(
    left: float, sufficient: int | None, seconds_to_change: float
) -> None:
    outlook = DeadlineOutlook(left, (1, 2), np.array([[600.0, 300.0]] * 2), 2)
    assert outlook.sufficient == sufficient
    assert outlook.next_change() == seconds_to_change


@pytest.mark.parametrize(
    "state",
    [
        long("a"),
        due(unmeasured("a"), 100.0),
        replace(long("a", 100.0), remaining=None),
    ],
    ids=["no-deadline", "not-measured", "no-end"],
)
def test_nothing_is_predicted_of_a_deadline_without_an_end_and_measurements(state: JobState) -> None:
    assert JobUtility.of(state).deadline_outlook(NOW) is None


def test_what_others_have_estimated_later_counts_for_the_time_to_the_end() -> None:
    """A clear gradient gains nothing by larger batches; later it is noisy, and they do."""
    clear = replace(long("a", 1000.0, replicas=8), estimate=CLEAR)
    noisy_soon = replace(clear, later_estimates=((1.0, NOISY),))
    outlooks = [JobUtility.of(each).deadline_outlook(NOW) for each in (clear, noisy_soon, long("a", 1000.0))]
    seconds = [outlook.seconds[0][-1] for outlook in outlooks if outlook is not None]
    assert seconds[0] > 1.2 * seconds[1]
    assert seconds[1] == pytest.approx(seconds[2], abs=20.0)


def test_a_job_of_samples_takes_as_long_as_its_samples_on_the_plan_of_each_count() -> None:
    state = job("a", 1, measured=ALL, truth=OVERHEAD, estimate=PARTLY, remaining=10_000.0)
    utility = JobUtility.of(due(replace(state, efficiency=OF_SAMPLES), 1000.0))
    outlook, one, eight = utility.deadline_outlook(NOW), utility.prediction(1), utility.prediction(8)
    assert outlook is not None
    assert one is not None
    assert eight is not None
    assert eight.efficiency < 0.9 < one.efficiency
    for count, prediction, restart in ((1, one, 0.0), (8, eight, 10.0)):
        seconds = 10_000.0 * prediction.step_time / prediction.scale
        assert utility.seconds_left(count) == pytest.approx(seconds)
        assert outlook.seconds[0][outlook.counts.index(count)] == pytest.approx(seconds + restart)
    assert utility.remaining_seconds == utility.seconds_left(1)


@pytest.mark.parametrize(("seconds", "ends"), [(9.9, True), (10.1, False)])
def test_a_job_of_samples_does_not_change_if_its_samples_end_before_the_restart(
    seconds: float, ends: bool
) -> None:
    state = replace(job("a", 8, measured=ALL, truth=OVERHEAD, estimate=PARTLY), efficiency=OF_SAMPLES)
    prediction = JobUtility.of(state).prediction(8)
    assert prediction is not None
    remaining = seconds * prediction.scale / prediction.step_time
    change = JobUtility.of(replace(state, remaining=remaining)).change(NOW)
    assert (change.reason == "it ends before a change would pay off") == ends


def test_a_later_estimate_counts_with_its_error_as_the_present_one_does() -> None:
    state = due(job("a", 8, measured=ALL, truth=OVERHEAD, remaining=10_000.0), 1000.0)
    uncertain = GradientEstimate(1.0, 1000.0, grad_sqr_error=5.0)
    present = JobUtility.of(replace(state, estimate=uncertain)).deadline_outlook(NOW)
    later = JobUtility.of(replace(state, later_estimates=((0.0, uncertain),))).deadline_outlook(NOW)
    assert present is not None
    assert later is not None
    assert later.seconds == pytest.approx(present.seconds)


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (700.0, "it has a deadline in 700 s, which 5 replicas meet (662 s)"),
        (100.0, "it has a deadline in 100 s, which no count meets: 8 replicas take 420 s"),
    ],
)
def test_the_explanation_says_which_count_meets_the_deadline(left: float, text: str) -> None:
    view = explain(solved([long("a", left), long("b")], 8), NOW, 0.0, ["a"])["a"]
    assert [each.reason for each in view.limits if each.kind is LimitKind.DEADLINE] == [text]


@given(several_jobs, capacities)
def test_deadlines_that_are_not_worth_anything_change_no_count(
    jobs: Sequence[JobState], capacity: int
) -> None:
    """Those that every count meets add the same to each, and those that none meets add nothing."""
    late = [replace(each, deadline=NOW + 1e12 + each.arrival) for each in jobs]
    none = [replace(each, deadline=None) for each in jobs]
    assert counts(late, capacity) == counts(none, capacity)


@given(job_states("a"), st.integers(1, 24), st.floats(1.0, 1e5))
def test_a_job_alone_meets_its_deadline_if_a_count_that_it_may_have_does(
    state: JobState, capacity: int, left: float
) -> None:
    state = due(state, left)
    utility = JobUtility.of(state)
    outlook = utility.deadline_outlook(NOW)
    table, _ = utility.utilities(NOW)
    if outlook is None or not table:
        return
    met = {count for count, is_met in zip(outlook.counts, outlook.met[0], strict=False) if is_met}
    allowed = {count for count in table if count <= capacity}
    changes = utility.change(NOW).factor is not None or state.replicas not in table
    if met & allowed and changes:
        assert counts([state], capacity)["a"] in met
