"""Counts of jobs with unlike replicas, chosen by prices, beside all choices that fit."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.decision.resource_prices import Consumer, choose_counts

tables = st.dictionaries(st.integers(1, 12), st.integers(-20, 20), min_size=1, max_size=6)
requests = st.tuples(st.integers(0, 3), st.integers(1, 8))
consumers = st.lists(st.builds(Consumer, tables, requests), max_size=6)


def used(jobs: list[Consumer], counts: list[int]) -> list[int]:
    return [sum(count * each.request[i] for each, count in zip(jobs, counts, strict=True)) for i in range(2)]


def utility(jobs: list[Consumer], counts: list[int]) -> int:
    return sum(each.utilities[count] for each, count in zip(jobs, counts, strict=True))


def smallest(jobs: list[Consumer]) -> list[int]:
    return [min(each.utilities) for each in jobs]


@given(consumers, st.integers(0, 40), st.integers(0, 100))
def test_the_counts_fit_and_no_exchange_between_two_jobs_is_better(
    jobs: list[Consumer], more: int, even_more: int
) -> None:
    least = used(jobs, smallest(jobs))
    totals = [least[0] + more, least[1] + even_more]
    counts = choose_counts(jobs, np.array(totals, dtype=np.float64))
    assert all(have <= total for have, total in zip(used(jobs, counts), totals, strict=True))
    for i, j in product(range(len(jobs)), repeat=2):
        for first, second in product(jobs[i].utilities, jobs[j].utilities):
            other = list(counts)
            other[i], other[j] = first, second
            if all(have <= total for have, total in zip(used(jobs, other), totals, strict=True)):
                assert utility(jobs, other) <= utility(jobs, counts)


@pytest.mark.parametrize("seed", range(8))
def test_the_total_utility_is_within_half_a_percent_of_the_best(seed: int) -> None:
    """Jobs with logarithmic utilities, as those of real jobs are, with all choices as the reference."""
    random = Random(seed)
    jobs = []
    for _ in range(5):
        speed = random.uniform(0.3, 1)
        weight = random.uniform(0.1, 2)
        table = {count: round(1e6 * weight * np.log(count**speed)) for count in range(1, 9)}
        jobs.append(Consumer(table, random.choice([(1, 4), (1, 8), (2, 4), (1, 12)])))
    totals = [16, 96]
    if any(have > total for have, total in zip(used(jobs, smallest(jobs)), totals, strict=True)):
        return
    best = max(
        utility(jobs, list(counts))
        for counts in product(range(1, 9), repeat=len(jobs))
        if all(have <= total for have, total in zip(used(jobs, list(counts)), totals, strict=True))
    )
    assert utility(jobs, choose_counts(jobs, np.array(totals, dtype=np.float64))) >= 0.995 * best
