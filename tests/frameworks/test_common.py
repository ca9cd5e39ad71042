"""Tests of what the adapters share: launchers' variables, samplers."""

from collections.abc import Collection

import pytest
import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, TensorDataset

from adascale_core.names import LAUNCHER_VARIABLES
from adascale_frameworks.common import hide_launcher, order_of
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
