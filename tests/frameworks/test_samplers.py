"""Which samplers are that of `shuffle=True`."""

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler, TensorDataset

from adascale_frameworks.samplers import shuffles_all
from adascale_worker.errors import DatasetError

DATA = TensorDataset(torch.arange(8))


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (RandomSampler(DATA), True),
        (RandomSampler(DATA, num_samples=4), False),
        (RandomSampler(DATA, replacement=True), False),
        (RandomSampler(range(4)), False),
        (SequentialSampler(DATA), False),
    ],
)
def test_a_sampler_shuffles_all_samples_once(sampler: Sampler[int], expected: bool) -> None:
    assert shuffles_all(sampler, len(DATA)) is expected


def test_hugging_faces_trainer_with_a_part_of_the_samples_is_refused() -> None:
    from adascale_frameworks.huggingface.training_data import options_of

    loader = DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=4))
    with pytest.raises(DatasetError, match="the training data has a RandomSampler"):
        options_of(loader, None, pin_memory=False)
