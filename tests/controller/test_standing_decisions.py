"""What an old decision says about jobs and nodes that have changed meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.schedule.standing_decisions import StandingDecisions
from adascale_core.batch.plans import BatchBounds
from adascale_core.decision.decide import Decision
from adascale_core.decision.job_utility import JobState

STATE = JobState("team.a", 0.0, BatchBounds(4, 64, (4, 16)), 1, 8, replicas=2)


def adopted(
    replicas: int, present: JobState | None = STATE, *, may_grow: bool = True
) -> tuple[StandingDecisions, set[str], set[str]]:
    """Adopt a decision about `STATE`, when the job is in the state `present`."""
    standing = StandingDecisions()
    states = {} if present is None else {present.id: present}
    changed, outdated = standing.adopt(
        {STATE.id: Decision(replicas, "because")}, {STATE.id: STATE}, states, may_grow=may_grow
    )
    return standing, changed, outdated


def count(standing: StandingDecisions, state: JobState) -> int | None:
    decision = standing.decision(state)
    return decision.replicas if decision is not None else None


def test_a_decision_about_an_unchanged_job_holds_until_the_next() -> None:
    standing, changed, outdated = adopted(4)
    assert (changed, outdated) == ({"team.a"}, set())
    assert standing.decision(STATE) == Decision(4, "because")
    assert count(standing, replace(STATE, replicas=4)) == 4
    again = standing.adopt(
        {STATE.id: Decision(4, "unchanged")}, {STATE.id: STATE}, {STATE.id: STATE}, may_grow=True
    )
    assert again == (set(), set())


@pytest.mark.parametrize(
    "changes",
    [{"max_replicas": 3}, {"limit": 2}, {"min_replicas": 2}, {"replicas": 3}, {"arrival": 9.0}],
)
def test_a_late_decision_about_a_job_that_has_changed_is_made_again(changes: dict[str, Any]) -> None:
    present = replace(STATE, **changes)
    standing, changed, outdated = adopted(8, present)
    assert (changed, outdated) == (set(), {"team.a"})
    assert count(standing, present) == present.replicas, "it keeps its count"


def test_a_late_decision_holds_if_only_measurements_are_new_or_the_job_has_followed_it() -> None:
    for present in (replace(STATE, remaining=7.0, stable_since=3.0), replace(STATE, replicas=8)):
        assert count(adopted(8, present)[0], present) == 8


def test_a_late_decision_about_a_job_that_is_gone_is_dropped() -> None:
    standing, changed, outdated = adopted(8, None)
    assert (changed, outdated) == (set(), set())
    assert standing.get("team.a") is None


def test_on_nodes_that_have_less_room_now_jobs_only_shrink() -> None:
    assert adopted(8, may_grow=False)[2] == {"team.a"}
    assert count(adopted(1, may_grow=False)[0], STATE) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"limit": 2}, 2),
        ({"max_replicas": 3}, 3),
        ({"max_replicas": 6}, 4),
        ({"min_replicas": 5}, 4),
        ({"limit": 0}, 1),
    ],
    ids=["spec.replicaLimit", "maxReplicas", "larger", "minReplicas-waits", "the-smallest-is-always-tried"],
)
def test_until_the_next_decision_a_job_gets_no_more_than_it_allows(
    changes: dict[str, Any], expected: int
) -> None:
    standing, _, _ = adopted(4)
    assert count(standing, replace(STATE, replicas=4, **changes)) == expected


def test_a_job_that_was_never_decided_about_keeps_its_count() -> None:
    standing = StandingDecisions()
    assert count(standing, STATE) == 2
    assert count(standing, replace(STATE, replicas=0)) is None
