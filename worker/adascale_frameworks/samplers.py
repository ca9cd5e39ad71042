"""What the samplers of a program's `DataLoader`s mean for the trainer, which chooses the batches."""

from __future__ import annotations

from torch.utils.data import RandomSampler


def shuffles_all(sampler: object, samples: int) -> bool:
    """Whether a sampler is that of `shuffle=True`: each sample of the data set once, in a random order."""
    return (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source) == samples
    )
