"""What an old decision says about jobs that have changed meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.schedule.standing import holding, still_applies
from adascale_core.batch.plans import BatchBounds
from adascale_core.decision.decide import Decision
from adascale_core.decision.job_utility import JobState

STATE = JobState("team.a", 0.0, BatchBounds(4, 64, (4, 16)), 1, 8, replicas=2)


@pytest.mark.parametrize(
    ("changes", "applies"),
    [
        ({}, True),
        ({"remaining": 7.0, "stable_since": 3.0}, True),
        ({"replicas": 8}, True),
        ({"max_replicas": 3}, False),
        ({"limit": 2}, False),
        ({"min_replicas": 2}, False),
        ({"replicas": 3}, False),
        ({"arrival": 9.0}, False),
    ],
)
def test_a_late_decision_applies_if_only_measurements_are_new_or_the_job_has_followed_it(
    changes: dict[str, Any], applies: bool
) -> None:
    assert still_applies(replace(STATE, **changes), STATE, Decision(8, "because")) == applies


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4),
        ({"limit": 2}, 2),
        ({"max_replicas": 3}, 3),
        ({"max_replicas": 6}, 4),
        ({"min_replicas": 5}, 4),
        ({"limit": 0}, 1),
    ],
    ids=["same", "spec.replicaLimit", "maxReplicas", "larger", "minReplicas-waits", "the-smallest-is-tried"],
)
def test_until_the_next_decision_a_job_gets_no_more_than_it_allows(
    changes: dict[str, Any], expected: int
) -> None:
    found = holding(Decision(4, "because"), replace(STATE, replicas=4, **changes))
    assert found is not None
    assert found.replicas == expected


def test_a_job_that_was_never_decided_about_keeps_what_it_allows_of_its_count() -> None:
    assert holding(None, STATE) == Decision(2, "unchanged")
    assert holding(None, replace(STATE, replicas=4, limit=2)) == Decision(2, "at most 2 may be used now")
    assert holding(None, replace(STATE, replicas=0)) is None
