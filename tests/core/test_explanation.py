"""Explanations agree with the decisions that they explain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchBounds
from adascale_core.decision.explanation import MAX_COUNTS, MAX_GIVING, explain
from adascale_core.decision.job_utility import JobState, JobUtility, weighted
from adascale_core.placement.capacity import Capacity, NodeCapacity
from adascale_core.placement.packing import Demand, Node
from adascale_core.views.decision import DecisionView, LimitKind, Verdict
from support.job_states import (
    CLEAR,
    COMPUTE,
    FIXED,
    GPU,
    NOW,
    OF_SAMPLES,
    SLOW_SYNC,
    allowed,
    capacities,
    decide,
    job,
    several_jobs,
    solved,
    unmeasured,
)


def explained(jobs: Sequence[JobState], capacity: int | Capacity) -> dict[str, DecisionView]:
    return explain(solved(jobs, capacity), NOW, 1000.0, [each.id for each in jobs])


def verdicts(view: DecisionView) -> dict[int, Verdict]:
    return {each.replicas: each.verdict for each in view.counts}


def given_by(view: DecisionView, count: int) -> Mapping[str, int]:
    (found,) = [each for each in view.counts if each.replicas == count]
    return {each.job: each.replicas for each in found.given}


def test_the_bounds_name_what_fits_into_memory() -> None:
    state = job("a")
    limit = state.bounds.lower
    view = explained([replace(state, bounds=state.bounds.with_limit(limit))], 8)["a"]
    assert f"memory holds local batches of at most {limit}" in view.limits[0].reason


def test_the_limits_name_the_type_of_accelerator_of_a_job_that_is_tied_to_one() -> None:
    for accelerator, named in (
        (None, []),
        ("NVIDIA-H200", ["it runs on accelerators of the type NVIDIA-H200"]),
    ):
        view = explained([replace(job("a", 4), accelerator=accelerator)], 8)["a"]
        assert [limit.reason for limit in view.limits if limit.kind is LimitKind.NODES] == named


# -- cases ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "count", "verdict"),
    [
        (job("a", 4), 8, Verdict.CHOSEN),
        (job("a", 4), 4, Verdict.NOT_WORTH),
        (job("a", 2), 8, Verdict.NOT_MEASURED),
        (unmeasured("a", 1), 2, Verdict.NOT_MEASURED),
        (job("a", 4, estimate=CLEAR, truth=FIXED), 8, Verdict.NOT_WORTH),
        (job("a", 1, measured=[1, 2, 3], estimate=CLEAR, truth=SLOW_SYNC), 3, Verdict.NOT_WORTH),
        (job("a", 2, stable_for=None), 4, Verdict.NO_CHANGE),
        (job("a", 2, stable_for=1.0), 4, Verdict.NO_CHANGE),
        (job("a", 4, remaining=1.0), 8, Verdict.NO_CHANGE),
        (job("a", 0, at_least=9, at_most=10), 9, Verdict.NO_CAPACITY),
    ],
)
def test_each_count_has_a_verdict(state: JobState, count: int, verdict: Verdict) -> None:
    assert verdicts(explained([state], 8)["a"])[count] is verdict


def test_it_says_who_would_have_to_give_replicas() -> None:
    jobs = [job("a", 4, truth=COMPUTE), job("b", 4, arrival=1.0, truth=COMPUTE)]
    view = explained(jobs, 8)["a"]
    assert view.replicas == 4
    assert verdicts(view)[8] is Verdict.NO_CAPACITY, "b needs one replica"
    assert verdicts(view)[6] is Verdict.OTHER_JOBS
    assert given_by(view, 6) == {"b": 2}


def test_a_job_that_waits_is_told_what_it_waits_for() -> None:
    jobs = [job("a", 2, at_least=2), job("b", 0, arrival=1.0)]
    view = explained(jobs, 2)["b"]
    assert view.waiting
    assert view.reason == "Insufficient capacity for 1 replica"
    assert set(verdicts(view).values()) <= {Verdict.NO_CAPACITY, Verdict.NOT_MEASURED}
    assert [limit.reason for limit in view.limits if limit.kind is LimitKind.CAPACITY] == [
        "0 of 2 replicas are free",
        "it needs 1 at least, and waits for jobs to end that arrived before it and need 2 at least (a: 2)",
    ]


def test_a_job_that_waits_for_a_job_of_higher_priority_is_told_so() -> None:
    jobs = [replace(job("a", 2, at_least=2, arrival=1.0), priority=7), job("b", 0)]
    reasons = [limit.reason for limit in explained(jobs, 2)["b"].limits]
    assert (
        "it needs 1 at least, and waits for jobs to end that have a higher priority or arrived before it and "
        "need 2 at least (a: 2)"
    ) in reasons


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (0, "it needs 9 at least, which do not fit even if no other job runs"),
        (2, "arrived before it and need 4 at least (0: 1, 1: 3)"),
        (3, "arrived before it and need 6 at least (0: 1, 1: 3, 1 more)"),
        (4, "arrived before it and need 8 at least (0: 1, 1: 3, 2 more)"),
    ],
)
def test_a_job_that_waits_is_told_of_earlier_jobs_only(others: int, expected: str) -> None:
    smallest = (1, 3, 2, 2)[:others]
    jobs = [job(str(i), count, arrival=i, at_least=count) for i, count in enumerate(smallest)]
    jobs += [job("waits", 0, arrival=5.0, at_least=9, at_most=10), job("later", 0, arrival=6.0)]
    for capacity in (8, NodeCapacity(*unlike_nodes(jobs, 8))):
        limits = explained(jobs, capacity)["waits"].limits
        assert any(expected in limit.reason for limit in limits if limit.kind is LimitKind.CAPACITY)


def unlike_nodes(jobs: Sequence[JobState], slots: int) -> tuple[Sequence[Node], Mapping[str, Demand]]:
    """Return a node with some slots, and replicas that request different amounts of memory."""
    demands = {each.id: Demand({GPU: 1, "memory": i}) for i, each in enumerate(jobs, 1)}
    return [Node("n", {GPU: slots, "memory": 1000, "pods": 100})], demands


def test_the_end_of_a_job_is_predicted_with_its_restart() -> None:
    view = explained([job("a", 4, remaining=1000.0, restart=10.0)], 8)["a"]
    for each in view.counts:
        assert each.goodput is not None
        assert each.seconds_left == pytest.approx(
            1000.0 / each.goodput + (10.0 if each.replicas != 4 else 0.0)
        )


def test_it_names_what_limits_the_count() -> None:
    def limits(state: JobState) -> dict[LimitKind, str]:
        return {limit.kind: limit.reason for limit in explained([state], 64)["a"].limits}

    assert limits(job("a", 2))[LimitKind.MEASUREMENTS] == (
        "it grows step by step, to at most 2 times the largest measured count: 4 at present"
    )
    assert limits(replace(job("a", 2), limit=3))[LimitKind.SCHEDULING].startswith("at most 3 replicas")
    assert "changed 1 s ago" in limits(job("a", 2, stable_for=1.0))[LimitKind.CHANGE]
    assert "1.09 times" in limits(job("a", 2))[LimitKind.CHANGE]
    of_samples = replace(
        job("a", 2, bounds=BatchBounds(8, None, (8, 8)), estimate=CLEAR), efficiency=OF_SAMPLES
    )
    assert limits(of_samples)[LimitKind.EFFICIENCY] == (
        "the efficiency of every batch on 2 replicas is below efficiencyTarget 0.8, a bound for jobs whose "
        "length is in samples"
    )
    assert LimitKind.EFFICIENCY not in limits(replace(of_samples, bounds=job("a").bounds))
    assert "minReplicas 9" in limits(replace(job("a"), min_replicas=9))[LimitKind.BOUNDS]


def test_on_equal_nodes_it_names_the_counts_that_are_considered() -> None:
    demands = {"a": Demand({GPU: 1}, None, {})}
    nodes = [Node(f"n{i}", {GPU: 4, "pods": 100}) for i in range(4)]
    view = explained([job("a", 0, measured=[1, 2, 4], at_most=16)], NodeCapacity(nodes, demands))["a"]
    assert {each.replicas for each in view.counts} == {1, 2, 4, 8, 12, 16}
    assert LimitKind.NODES in {limit.kind for limit in view.limits}


def test_only_the_named_jobs_are_explained_and_their_reasons_can_be_replaced() -> None:
    jobs = [job("a", 4), job("b", 4)]
    solution = solved(jobs, 8)
    limited = replace(solution.decisions["a"], reason="spec.replicaLimit is 4")
    solution = replace(solution, decisions={**solution.decisions, "a": limited})
    found = explain(solution, NOW, 1.0, ["a"])
    assert set(found) == {"a"}
    assert found["a"].reason == "spec.replicaLimit is 4"


# -- properties -----------------------------------------------------------------------------------------


@given(several_jobs, capacities)
def test_an_explanation_agrees_with_the_decision(jobs: Sequence[JobState], capacity: int) -> None:
    decisions = decide(jobs, capacity, NOW)
    views = explained(jobs, capacity)
    assert set(views) == set(decisions)
    tables = {
        each.job.id: each.utilities(NOW)[0] if each.counts else {}
        for each in weighted([JobUtility.of(state) for state in jobs])
    }
    for state in jobs:
        view, decision = views[state.id], decisions[state.id]
        assert (view.replicas, view.waiting, view.present) == (
            decision.replicas,
            decision.waiting,
            state.replicas,
        )
        assert view.reason.startswith(decision.reason)
        chosen = [each.replicas for each in view.counts if each.verdict is Verdict.CHOSEN]
        assert chosen == ([decision.replicas] if decision.replicas else [])
        for each in view.counts:
            assert each.replicas in allowed(state)
            loss = 0
            if each.verdict in {Verdict.OTHER_JOBS, Verdict.NODES}:
                # Those who give stay on a valid count, all fit, and it would not be better in total.
                after = {name: found.replicas for name, found in decisions.items()} | {
                    state.id: each.replicas
                }
                for other in each.given:
                    before, after[other.job] = after[other.job], after[other.job] - other.replicas
                    assert other.replicas > 0
                    loss += tables[other.job][before] - tables[other.job][after[other.job]]
                assert sum(after.values()) <= capacity
                assert tables[state.id][each.replicas] - tables[state.id][decision.replicas] <= loss


@given(several_jobs, capacities)
def test_an_explanation_survives_json_and_has_a_bounded_size(jobs: Sequence[JobState], capacity: int) -> None:
    for view in explained(jobs, capacity).values():
        assert DecisionView.from_json(json.loads(json.dumps(view.to_json(), allow_nan=False))) == view
        assert len(view.counts) <= MAX_COUNTS
        assert all(len(each.given) <= MAX_GIVING for each in view.counts)


@given(st.integers(25, 1024), st.integers(1, 1024))
def test_of_many_counts_some_are_shown_with_those_that_matter(most: int, present: int) -> None:
    state = replace(job("a", present, at_most=most, measured=[1, present]), largest=present)
    view = explained([state], 1024)["a"]
    shown = [each.replicas for each in view.counts]
    assert shown == sorted(set(shown))
    assert len(shown) <= MAX_COUNTS
    assert view.replicas in shown
