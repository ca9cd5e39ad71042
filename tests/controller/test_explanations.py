"""When decisions are explained and stored."""

from __future__ import annotations

from adascale_controller.schedule.standing import EXPLAIN_INTERVAL, MAX_EXPLAINED, ExplanationSchedule
from adascale_core.decision.decide import Decision

STAYS = Decision(2, "unchanged")
GROWS = Decision(4, "grows")


def test_a_changed_decision_is_due_at_once_and_an_unchanged_one_at_intervals() -> None:
    schedule = ExplanationSchedule()
    assert schedule.due({"a": STAYS, "b": STAYS}, 0.0) == ["a", "b"]
    assert schedule.due({"a": STAYS, "b": STAYS}, 1.0) == []
    assert schedule.due({"a": STAYS, "b": GROWS}, 2.0) == ["b"]
    assert schedule.due({"a": STAYS, "b": GROWS}, EXPLAIN_INTERVAL) == ["a"]


def test_a_decision_that_could_not_be_stored_is_due_again() -> None:
    schedule = ExplanationSchedule()
    schedule.due({"a": STAYS}, 0.0)
    schedule.repeat("a")
    assert schedule.due({"a": STAYS}, 1.0) == ["a"]


def test_a_job_that_returns_is_due() -> None:
    schedule = ExplanationSchedule()
    schedule.due({"a": STAYS}, 0.0)
    schedule.due({}, 1.0)
    assert schedule.due({"a": STAYS}, 2.0) == ["a"]


def test_of_many_jobs_all_are_explained_in_turn_changed_ones_first() -> None:
    schedule = ExplanationSchedule()
    decisions = {f"job-{i:03}": STAYS for i in range(3 * MAX_EXPLAINED)}
    explained: list[str] = []
    for now in range(3):
        explained += schedule.due(decisions, float(now))
    assert sorted(explained) == sorted(decisions)
    decisions["job-007"] = GROWS
    assert schedule.due(decisions, 10 * EXPLAIN_INTERVAL)[0] == "job-007"
