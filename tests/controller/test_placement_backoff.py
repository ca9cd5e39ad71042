"""Backoff for replica counts that could not be placed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.job.placement_backoff import (
    FIRST_PAUSE,
    MAX_PAUSE,
    TIMEOUT_TRAINING,
    TIMEOUT_WAITING,
    PlacementBackoff,
)
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.pods import PodExit, PodProblem
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_core.failures import EXIT_CHECK_FAILED, EXIT_REFUSED
from support.observed_jobs import ON_CPU, decided, job, observed, pod, view

UNSCHEDULABLE = ("Unschedulable", "0/2 nodes are available")


def update(backoff: PlacementBackoff, now: float, **changes: Any) -> None:
    """Record that 4 replicas are being placed while 2 train."""
    state: dict[str, Any] = {
        "generation": 5, "count": 4, "training": 2, "problem": UNSCHEDULABLE, "placed": 2,
        "valid": lambda: [1, 2, 4, 8], "capacity": lambda: 8, "now": now,
    }  # fmt: skip
    backoff.update(**{**state, **changes})


def backoff_after(elapsed: float = TIMEOUT_TRAINING, **changes: Any) -> PlacementBackoff:
    """Return the backoff of a job whose placement has failed for some seconds, from time 0."""
    backoff = PlacementBackoff()
    update(backoff, 0.0, **changes)
    update(backoff, elapsed, **changes)
    return backoff


def test_a_count_fails_after_a_timeout() -> None:
    assert backoff_after(TIMEOUT_TRAINING - 1).limit(lambda: 8, TIMEOUT_TRAINING) is None
    assert backoff_after().limit(lambda: 8, TIMEOUT_TRAINING) == 2


def test_the_timeout_is_shorter_while_nothing_trains() -> None:
    waiting = backoff_after(TIMEOUT_WAITING, training=0, placed=1)
    assert waiting.limit(lambda: 8, TIMEOUT_WAITING) == 1


def test_a_failed_count_is_limited_until_its_pause_is_over_or_capacity_grows() -> None:
    backoff = backoff_after()
    end = TIMEOUT_TRAINING + FIRST_PAUSE
    assert backoff.limit(lambda: 8, end - 1) == 2
    assert backoff.limit(lambda: 9, end - 1) is None
    assert backoff.limit(lambda: 8, end) is None
    assert backoff.failed_placement(end - 1) is not None
    assert backoff.failed_placement(end) is None


def test_pauses_double_up_to_a_maximum() -> None:
    backoff, now, pauses = PlacementBackoff(), 0.0, []
    for generation in range(6):
        update(backoff, now, generation=generation)
        now += TIMEOUT_TRAINING
        update(backoff, now, generation=generation)
        failed = backoff.failed_placement(now)
        assert failed is not None
        pauses.append(failed.pause)
        now = failed.until
    assert pauses == [60, 120, 240, 480, 900, MAX_PAUSE]


def test_the_timeout_restarts_when_the_problem_disappears_in_between() -> None:
    backoff = PlacementBackoff()
    update(backoff, 0.0)
    update(backoff, 30.0, problem=None)
    update(backoff, 40.0)
    now = 40.0 + TIMEOUT_TRAINING - 1
    update(backoff, now)
    assert backoff.failed_placement(now) is None


@pytest.mark.parametrize(("since", "is_allowed"), [(TIMEOUT_TRAINING + 5.0, True), (1.0, False)])
def test_a_count_that_a_quota_did_not_allow_is_tried_when_the_quota_is_raised(
    since: float, is_allowed: bool
) -> None:
    backoff = backoff_after(problem=(Reason.QUOTA_EXCEEDED, "exceeded quota: pods"))
    backoff.allow(Reason.UNSCHEDULABLE, since)
    backoff.allow(Reason.QUOTA_EXCEEDED, since)
    assert (backoff.failed_placement(TIMEOUT_TRAINING + 6.0) is None) == is_allowed


def test_a_count_that_trains_is_no_longer_limited() -> None:
    backoff = backoff_after()
    update(backoff, 90.0, generation=6, count=4, training=4, problem=None)
    assert backoff.failed_placement(90.0) is None


def test_a_count_without_a_smaller_valid_count_does_not_fail() -> None:
    smallest = backoff_after(count=1, training=0, placed=0)
    assert smallest.failed_placement(TIMEOUT_TRAINING) is None
    only = backoff_after(count=4, training=0, placed=0, valid=lambda: [4, 8])
    assert only.failed_placement(TIMEOUT_TRAINING) is None


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (EXIT_REFUSED, Reason.REPLICA_REFUSED, "it has 9.9"),
        (EXIT_CHECK_FAILED, Reason.REPLICA_CHECK_FAILED, "pod digits-2: it has 9.9"),
    ],
)
def test_a_count_is_given_up_if_a_replica_is_refused_or_fails_its_check(
    code: int, reason: Reason, message: str
) -> None:
    scheduler = Scheduler()
    ended = pod(2, uid="ended", phase="Failed", exit=PodExit(code, message="it has 9.9"))
    pods = (pod(0), pod(1), pod(2), ended)
    growing = observed(job((6, 3), template=ON_CPU), view((6, 3), (5, 2)), pods)
    later = replace(growing, now=growing.now + TIMEOUT_TRAINING)
    for each in (growing, later):
        decided(scheduler, each)
    failed = scheduler.schedule(later).failed_placement
    assert failed is not None
    assert (failed.count, failed.limit) == (3, 2)
    assert (failed.reason, failed.message) == (reason, message)
    # Only a look at the job counts as an observation of it.
    scheduler.note_request(later.resource.id, 2)
    scheduler.set_resources(None, ())
    again = replace(later, now=failed.until)
    decided(scheduler, again)
    assert scheduler.schedule(again).failed_placement is None


def test_replicas_that_wait_for_a_scheduling_gate_are_no_failed_placement() -> None:
    scheduler = Scheduler()
    gated = PodProblem(Reason.SCHEDULING_GATED, "waiting for Kueue")
    pods = (pod(0), pod(1), pod(2, node=None, phase="Pending", problem=gated))
    growing = observed(job((6, 3), template=ON_CPU), view((6, 3), (5, 2)), pods)
    later = replace(growing, now=growing.now + TIMEOUT_TRAINING)
    for each in (growing, later):
        decided(scheduler, each)
    assert scheduler.schedule(later).failed_placement is None
