"""The choice of one option of each job, beside all choices that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.decision import solver
from adascale_core.decision.solver import Options, solve

Option = tuple[int, tuple[int, ...]]
"""The utility, and what it takes of each resource."""


def options_of(jobs: Sequence[Sequence[Option]], totals: Sequence[int]) -> Options:
    """Return the options of jobs, of which the first fit together."""
    rows = [(i, *option) for i, options in enumerate(jobs) for option in options]
    starts = np.cumsum([0, *map(len, jobs)])[:-1]
    usage = np.array([row[2] for row in rows], dtype=np.float64).reshape(len(rows), len(totals))
    return Options(
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.int64),
        usage,
        starts.astype(np.int64),
        np.array(totals, dtype=np.float64),
    )


def fits(chosen: Sequence[Option], totals: Sequence[int]) -> bool:
    return all(
        sum(column) <= have
        for column, have in zip(zip(*[each[1] for each in chosen], strict=True), totals, strict=True)
    )


def utility(chosen: Sequence[Option]) -> int:
    return sum(each[0] for each in chosen)


def solved(jobs: Sequence[Sequence[Option]], totals: Sequence[int]) -> list[Option]:
    flat = [option for options in jobs for option in options]
    return [flat[i] for i in solve(options_of(jobs, totals)).tolist()]


def best(jobs: Sequence[Sequence[Option]], totals: Sequence[int]) -> int:
    return max(utility(chosen) for chosen in product(*jobs) if fits(chosen, totals))


def counts(table: Mapping[int, int], request: tuple[int, ...]) -> list[Option]:
    return [(value, tuple(count * units for units in request)) for count, value in sorted(table.items())]


tables = st.dictionaries(st.integers(1, 12), st.integers(-(10**9), 10**9), min_size=1, max_size=6)


def totals_of(jobs: Sequence[Sequence[Option]], more: Sequence[int]) -> list[int]:
    """Return what the first options take, and more."""
    return [sum(options[0][1][i] for options in jobs) + extra for i, extra in enumerate(more)]


@given(st.lists(tables, min_size=1, max_size=5), st.integers(0, 30))
def test_with_one_resource_the_choice_is_the_best(drawn: Sequence[Mapping[int, int]], more: int) -> None:
    jobs = [counts(table, (1,)) for table in drawn]
    totals = totals_of(jobs, [more])
    chosen = solved(jobs, totals)
    assert fits(chosen, totals)
    assert utility(chosen) == best(jobs, totals)


@given(
    st.lists(st.tuples(tables, st.tuples(st.integers(0, 3), st.integers(1, 8))), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(0, 100),
)
def test_with_two_resources_the_options_fit_and_no_exchange_between_two_jobs_is_better(
    drawn: Sequence[tuple[Mapping[int, int], tuple[int, int]]], more: int, even_more: int
) -> None:
    jobs = [counts(table, request) for table, request in drawn]
    totals = totals_of(jobs, [more, even_more])
    chosen = solved(jobs, totals)
    assert fits(chosen, totals)
    for i, j in product(range(len(jobs)), repeat=2):
        for first, second in product(jobs[i], jobs[j]):
            other = list(chosen)
            other[i], other[j] = first, second
            assert utility(other) <= utility(chosen) or not fits(other, totals)


def drawn_jobs(random: Random, number: int, requests: Sequence[tuple[int, ...]]) -> list[list[Option]]:
    """Return jobs with logarithmic utilities, as those of real jobs are."""
    jobs = []
    for _ in range(number):
        speed, weight = random.uniform(0.3, 1), random.uniform(0.1, 2)
        table = {count: round(1e9 * weight * np.log(count**speed)) for count in range(1, 9)}
        jobs.append(counts(table, random.choice(requests)))
    return jobs


def test_with_two_resources_the_total_utility_is_within_a_percent_of_the_best() -> None:
    shares = []
    for seed in range(24):
        jobs = drawn_jobs(Random(seed), 5, [(1, 4), (1, 8), (2, 4), (1, 12)])
        totals = totals_of(jobs, [8, 48])
        shares.append(utility(solved(jobs, totals)) / best(jobs, totals))
    assert min(shares) >= 0.98
    assert sum(shares) / len(shares) >= 0.99


def test_without_an_exact_solution_the_choice_is_within_one_job_of_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(24):
        jobs = drawn_jobs(Random(seed), 40, [(1,)])
        totals = [120]
        exact = utility(solved(jobs, totals))
        with monkeypatch.context() as patched:
            patched.setattr(solver, "MAX_EXACT_WORK", 0)
            found = solved(jobs, totals)
        assert fits(found, totals)
        assert 0.999 * exact <= utility(found) <= exact


@given(st.lists(tables, min_size=1, max_size=5), st.integers(0, 30), st.data())
def test_a_larger_weight_never_lowers_the_count_of_a_job(
    drawn: Sequence[Mapping[int, int]], more: int, data: st.DataObject
) -> None:
    i = data.draw(st.integers(0, len(drawn) - 1))
    heavier = [
        {count: value * (2 if k == i else 1) for count, value in table.items()}
        for k, table in enumerate(drawn)
    ]
    totals = totals_of([counts(table, (1,)) for table in drawn], [more])
    before, after = (solved([counts(table, (1,)) for table in each], totals)[i] for each in (drawn, heavier))
    assert after[0] >= 2 * before[0], "it gets an option that is worth as much to it, or more"


def test_present_options_change_only_for_a_higher_total_utility() -> None:
    jobs = [[(0, (1, 1)), (5, (2, 2))], [(0, (1, 1)), (5, (2, 2))]]
    options = options_of(jobs, [3, 3])
    for present in ([0, 3], [1, 2]):
        assert solve(options, np.array(present)).tolist() == present
