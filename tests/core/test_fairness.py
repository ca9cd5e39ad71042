"""Fairness: a table of weights and of counts, and what holds for random jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.decision.job_utility import JobState, JobUtility, weighted, weights_by_size
from adascale_core.decision.type_choice import TypeChoice, TypeOptions
from adascale_core.placement.packing import Demand, Node
from support.job_states import NOW, allowed, capacities, decide, job, several_jobs

fairness_values = st.just(0.0) | st.floats(0, 1)
sizes_of_jobs = st.dictionaries(st.text("abcdef", max_size=3), st.none() | st.floats(0, 1e6))


@pytest.mark.parametrize(
    ("fairness", "weights"),
    [
        # of two jobs of known size, the larger has 2 * (1/2)^2, the smaller 2 * (1 - (1/2)^2)
        (0.0, {"small": 1.5, "large": 0.5, "unknown": 1.0}),
        (0.5, {"small": 1.25, "large": 0.75, "unknown": 1.0}),
        (1.0, {"small": 1.0, "large": 1.0, "unknown": 1.0}),
    ],
)
def test_weights(fairness: float, weights: Mapping[str, float]) -> None:
    assert weights_by_size({"small": 10.0, "large": 20.0, "unknown": None}, fairness) == weights


@pytest.mark.parametrize(("fairness", "counts"), [(0.0, (6, 2)), (0.5, (5, 3)), (1.0, (4, 4))])
def test_replicas_of_a_short_and_a_long_job(fairness: float, counts: tuple[int, int]) -> None:
    short, long = (
        job(name, 1, remaining=remaining, measured=(1, 2, 4, 8), at_most=16)
        for name, remaining in (("short", 1e4), ("long", 1e6))
    )
    found = decide([short, long], 8, NOW, fairness=fairness)
    assert (found["short"].replicas, found["long"].replicas) == counts
    assert (found == decide([short, long], 8, NOW)) is (fairness == 0.0), "the default is short jobs first"


def test_the_weights_among_the_jobs_of_all_types() -> None:
    nodes = [Node(kind, {"gpu": 4, "pods": 100}) for kind in ("a100", "t4")]
    jobs = [
        TypeOptions(
            name,
            {"a100": 1, "t4": 1},
            {node.name: Demand({"gpu": 1}, frozenset({node.name}), {}) for node in nodes},
            None,
            {
                node.name: replace(
                    job(name, remaining=remaining, measured=(1, 2), at_most=4), accelerator=node.name
                )
                for node in nodes
            },
        )
        for name, remaining in (("short", 1e4), ("long", 1e6))
    ]
    by_default = TypeChoice.of(jobs, nodes, NOW).weights
    assert (
        by_default == TypeChoice.of(jobs, nodes, NOW, fairness=0.5).weights == {"short": 1.25, "long": 0.75}
    )
    assert TypeChoice.of(jobs, nodes, NOW, fairness=0.0).weights == {"short": 1.5, "long": 0.5}
    assert TypeChoice.of(jobs, nodes, NOW, fairness=1.0).weights == {"short": 1.0, "long": 1.0}


@given(sizes_of_jobs, fairness_values)
def test_weights_are_one_on_average_and_get_nearer_to_each_other(
    sizes: Mapping[str, float | None], fairness: float
) -> None:
    shortest_first, found = weights_by_size(sizes), weights_by_size(sizes, fairness)
    assert sum(found.values()) == pytest.approx(len(sizes))
    assert min(found.values(), default=1.0) > 0
    for name, weight in found.items():
        assert weight - 1 == pytest.approx((1 - fairness) * (shortest_first[name] - 1))


@given(several_jobs, capacities, fairness_values)
def test_no_other_allocation_has_a_higher_utility(
    jobs: Sequence[JobState], capacity: int, fairness: float
) -> None:
    jobs = [
        replace(state, stable_since=-inf)
        for state in jobs
        if state.estimate and state.step_times and allowed(state)
    ][:3]
    if not jobs or sum(allowed(state)[0] for state in jobs) > capacity:
        return
    found = weighted([JobUtility.of(state) for state in jobs], fairness=fairness)
    tables = [utility.utilities(NOW)[0] for utility in found]
    best = max(
        sum(table[count] for table, count in zip(tables, shares, strict=True))
        for shares in product(*tables)
        if sum(shares) <= capacity
    )
    decided = decide(jobs, capacity, NOW, fairness=fairness)
    assert sum(table[decided[state.id].replicas] for table, state in zip(tables, jobs, strict=True)) == best
