"""The deadline of a job in the operator: what the decision says, and the condition DeadlineFeasible."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.reconcile.reconciler import next_deadline
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.actions import StatusChange
from adascale_controller.operator.types.kubernetes import ConditionType, condition_of, timestamp
from adascale_core.decision.deadline import Feasibility
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.reports import StepTime
from support.observed_jobs import (
    NOW,
    ON_CPU,
    actions_for,
    condition,
    decided,
    finished_pod,
    job,
    observed,
    report,
    training_job,
    with_status,
)

ENDED = {"status": "True", "lastTransitionTime": "2027-01-15T08:00:00Z"}
FOUR = Feasibility(4, "its own step times")
NONE = Feasibility(None, "its own step times")
SPEC = JobSpec(4, 64, (4, 16), 1, 4, scale_invariant_steps=1000)


def measured(seconds: int | None) -> ObservedJob:
    """Return a job that was created 100 s ago, and makes some 20 steps a second on two replicas."""
    at_two = training_job((2, 2), spec=SPEC, completion_deadline_seconds=seconds, template=ON_CPU)
    assert at_two.service is not None
    times = (StepTime(1, 4, 1, 0.1), StepTime(2, 4, 1, 0.101), StepTime(2, 8, 1, 0.15))
    return replace(at_two, service=replace(at_two.service, step_times=times, latest=report(2, 2)))


@pytest.mark.parametrize(("seconds", "can"), [(None, None), (50, None), (102, False), (100_000, True)])
def test_the_decision_says_whether_the_deadline_can_be_met(seconds: int | None, can: bool | None) -> None:
    (decision,) = decided(Scheduler(), measured(seconds)).values()
    found = decision.feasibility
    assert (None if found is None else found.count is not None) == can
    if found is not None:
        assert found.source == "its own step times"


@pytest.mark.parametrize(
    ("left", "status", "feasibility", "expected"),
    [
        pytest.param(500, {}, None, None, id="not measured"),
        pytest.param(
            500,
            {},
            FOUR,
            (True, "CountSuffices", "4 replicas or more, from now on, meet completionDeadlineSeconds (600)"),
            id="feasible",
        ),
        pytest.param(
            500,
            {},
            NONE,
            (False, "NoCountSuffices", "No replica count meets completionDeadlineSeconds (600)"),
            id="infeasible",
        ),
        pytest.param(
            0,
            {},
            FOUR,
            (False, "DeadlineMissed", "Not complete within completionDeadlineSeconds (100); it goes on"),
            id="missed",
        ),
        pytest.param(
            500,
            {"conditions": [{"type": "Complete", "reason": "Finished", **ENDED}]},
            None,
            (True, "DeadlineMet", "Complete within completionDeadlineSeconds (600)"),
            id="met",
        ),
        pytest.param(
            500,
            {"conditions": [{"type": "Failed", "reason": "ProgramFailed", **ENDED}]},
            None,
            (False, "DeadlineMissed", "Not complete within completionDeadlineSeconds (600)"),
            id="failed",
        ),
        pytest.param(None, {}, FOUR, None, id="no deadline"),
    ],
)
def test_the_condition_says_whether_the_deadline_can_be_met(
    left: int | None,
    status: dict[str, Any],
    feasibility: Feasibility | None,
    expected: tuple[bool, str, str] | None,
) -> None:
    seconds = None if left is None else 100 + left
    seen = observed(job((1, 2), status=status, completion_deadline_seconds=seconds))
    actions = actions_for(seen, None if status else 2, feasibility=feasibility)
    found = condition_of(actions.status, ConditionType.DEADLINE_FEASIBLE)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.status, found.reason) == expected[:2]
        assert found.message.startswith(expected[2])


@pytest.mark.parametrize(("completed", "reason"), [(-1, "DeadlineMet"), (1, "DeadlineMissed")])
def test_a_job_is_complete_when_a_pod_has_finished_and_not_when_the_operator_looks(
    completed: int, reason: str
) -> None:
    due = NOW - 40
    running = training_job(completion_deadline_seconds=60)
    seen = replace(running, pods=[finished_pod(0, due + completed), finished_pod(1, due + completed + 3)])
    actions = actions_for(seen)
    assert condition(actions, ConditionType.DEADLINE_FEASIBLE).reason == reason
    assert actions.status["completionTime"] == timestamp(due + completed)
    gone = replace(with_status(seen, actions), pods=())
    assert actions_for(gone).status == actions.status


def test_a_program_that_has_finished_does_not_go_on_after_the_deadline() -> None:
    running = training_job(completion_deadline_seconds=600)
    assert running.service is not None
    actions = actions_for(running, 2, feasibility=FOUR)
    finished = replace(
        with_status(running, actions), service=replace(running.service, complete=True), now=NOW + 500
    )
    assert condition(actions_for(finished, 2), ConditionType.DEADLINE_FEASIBLE).reason == "CountSuffices"


def test_the_operator_looks_at_a_job_at_its_deadline() -> None:
    running = training_job(completion_deadline_seconds=600)
    assert next_deadline(running, assess(running)) == NOW + 500
    missed = replace(running, now=NOW + 500)
    assert condition(actions_for(missed, 2), ConditionType.DEADLINE_FEASIBLE).reason == "DeadlineMissed"
    assert next_deadline(missed, assess(missed)) == inf
    complete = replace(running, pods=[finished_pod(0), finished_pod(1)])
    assert next_deadline(complete, assess(complete)) == inf


def test_the_condition_stays_while_nothing_is_predicted() -> None:
    seen = observed(job((1, 2), completion_deadline_seconds=600))
    actions = actions_for(seen, 2, feasibility=FOUR)
    after = actions_for(with_status(seen, actions), 2)
    assert condition(after, ConditionType.DEADLINE_FEASIBLE) == condition(
        actions, ConditionType.DEADLINE_FEASIBLE
    )


@pytest.mark.parametrize("feasibility", [Feasibility(3, "its own step times"), NONE])
def test_another_prediction_is_not_urgent(feasibility: Feasibility) -> None:
    """It may differ in each decision."""
    before = training_job(completion_deadline_seconds=600)
    predicted = with_status(before, actions_for(before, 2, feasibility=FOUR))
    again = actions_for(predicted, 2, feasibility=feasibility)
    assert again.status_change is StatusChange.REPORTED
    missed = actions_for(replace(predicted, now=NOW + 500), 2)
    assert missed.status_change is StatusChange.URGENT


@pytest.mark.parametrize(
    ("seconds", "edit"),
    [
        pytest.param(100, {"completion_deadline_seconds": 600}, id="later than one that was missed"),
        pytest.param(600, {"completion_deadline_seconds": 700}, id="another one"),
        pytest.param(600, {"completion_deadline_seconds": 600, "suspend": True}, id="suspended"),
    ],
)
def test_an_edit_ends_what_was_predicted(seconds: int, edit: dict[str, Any]) -> None:
    before = training_job(completion_deadline_seconds=seconds)
    actions = actions_for(before, 2, feasibility=FOUR)
    assert condition_of(actions.status, ConditionType.DEADLINE_FEASIBLE) is not None
    edited = replace(before, resource=job(status=actions.status, **edit))
    assert condition_of(actions_for(edited, 2).status, ConditionType.DEADLINE_FEASIBLE) is None


def test_a_count_beyond_the_limit_of_the_job_meets_no_deadline() -> None:
    seen = observed(job((1, 2), completion_deadline_seconds=600, replica_limit=3))
    found = condition(actions_for(seen, 2, feasibility=FOUR), ConditionType.DEADLINE_FEASIBLE)
    assert (found.status, found.reason) == (False, "NoCountSuffices")
    assert found.message.endswith("and it has at most 3")
