"""Tests of what the adapters share: launchers' variables, multiples that a step crosses, samplers."""

import math
from collections.abc import Collection
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, TensorDataset

from adascale_core.names import LAUNCHER_VARIABLES
from adascale_frameworks.common import crossed, hide_launcher, order_of
from adascale_worker.errors import DatasetError

OTHERS = {"PATH": "/bin", "SLURM_JOB_ID": "7", "ADASCALE_RANK": "1", "OMP_NUM_THREADS": "1"}
DATA = TensorDataset(torch.arange(8))


@pytest.mark.parametrize("variables", [LAUNCHER_VARIABLES, ("RANK", "LOCAL_RANK", "PMI_SIZE"), ()])
def test_the_variables_of_launchers_are_removed_and_returned_and_others_stay(
    variables: Collection[str],
) -> None:
    environ = dict.fromkeys(variables, "3") | OTHERS
    assert hide_launcher(environ) == dict.fromkeys(variables, "3")
    assert environ == OTHERS


@pytest.mark.parametrize(
    ("interval", "before", "after", "expected"),
    [
        (10, 0.0, 9.99, []),
        (10, 9.0, 10.0, [10]),
        (10, 9.2, 10.1, [10]),
        (10, 10.0, 10.9, []),
        (10, 9.0, 31.5, [10, 20, 30]),
        (10, 10.0, 20.0, [20]),
        (1, 0.0, 1.0, [1]),
        (1, 2.7, 5.9, [3, 4, 5]),
        (1, 2.7, 2.9, []),
        (7, 0.0, 0.0, []),
        # 0.1 added 30 times is a little more than 3, and 3 - 2**-51 a little less.
        (3, 2.9, 3 - 2**-51, []),
        (3, 3 - 2**-51, 3.1, [3]),
    ],
)
def test_the_multiples_between_two_values_of_progress(
    interval: int, before: float, after: float, expected: list[int]
) -> None:
    assert [*crossed(interval, before, after)] == expected


@given(
    st.integers(1, 1000),
    st.lists(st.floats(0, 300), min_size=1, max_size=50),
)
def test_each_multiple_is_crossed_by_exactly_one_step(interval: int, gains: list[float]) -> None:
    progress = [0.0]
    for gain in gains:
        progress.append(progress[-1] + gain)
    found = [multiple for pair in pairwise(progress) for multiple in crossed(interval, *pair)]
    assert found == [*range(interval, math.floor(progress[-1]) + 1, interval)]


@pytest.mark.parametrize(
    ("interval", "before", "after", "message"),
    [
        (0, 1.0, 2.0, "interval is 0: it must be at least 1"),
        (5, 2.0, 1.0, "progress went from 2.0 to 1.0"),
        (5, -1.0, 1.0, "progress went from -1.0"),
        (5, 0.0, math.inf, "to inf"),
        (5, 0.0, math.nan, "to nan"),
    ],
)
def test_what_is_no_interval_or_no_progress_is_refused(
    interval: int, before: float, after: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        crossed(interval, before, after)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (RandomSampler(DATA), True),
        (RandomSampler(DATA, num_samples=4), None),
        (RandomSampler(DATA, replacement=True), None),
        (RandomSampler(range(4)), None),
        (SequentialSampler(DATA), False),
    ],
)
def test_the_order_of_a_sampler_is_shuffled_or_sequential(
    sampler: Sampler[int], expected: bool | None
) -> None:
    if expected is not None:
        assert order_of(sampler, len(DATA), "the loader", "order=...") == {"shuffle": expected}
        return
    with pytest.raises(DatasetError, match=r"sampler=RandomSampler.*, use order=\.\.\., a function"):
        order_of(sampler, len(DATA), "the loader", "order=...")
