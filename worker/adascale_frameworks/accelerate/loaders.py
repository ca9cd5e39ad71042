"""The data loaders that `ElasticAccelerator.prepare` returns.

They have the data set and the options of the program's loader, and get their batches from the trainer. The
next batch is requested when the program requests it: Accelerate's own loader reads one batch ahead, and would
so begin the next step before the present one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from adascale_frameworks.common import shuffles_all
from adascale_worker.errors import DatasetError

_OPTIONS = {
    "num_workers": 0,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}
"""Options of `DataLoader` that do not choose batches, with their defaults."""


class ElasticDataLoader:
    """Iterates over the batches that the trainer delivers to this replica.

    With the model in training mode, these are the rest of the present epoch of `accelerator.epochs(n)`. In
    evaluation mode, they are this replica's share of the data set.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        begin: Callable[[ElasticDataLoader], Iterator[Any]],
        device: torch.device | None,  # of the batches. None if they stay where the loader makes them
    ) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise DatasetError(
                f"accelerator.prepare() got a DataLoader of a {type(loader.dataset).__name__}, an "
                "IterableDataset: an elastic job needs a data set with __len__ and __getitem__, so that any "
                "number of replicas can share it"
            )
        if loader.batch_size is None:
            raise DatasetError(
                "accelerator.prepare() got a DataLoader with "
                f"batch_sampler={type(loader.batch_sampler).__name__}(...) or batch_size=None, but the "
                "trainer chooses the batches: pass batch_size= and shuffle=, or use "
                "accelerator.trainer.dataloader(dataset, lengths=...) for batches of similar length"
            )
        self.device = device
        self._loader = loader
        self._begin = begin
        self._batch_size: int = loader.batch_size
        self.options: dict[str, Any] = {"collate_fn": loader.collate_fn}
        """Arguments for `DataLoader`, besides those that choose batches."""
        for name, default in _OPTIONS.items():
            value = getattr(loader, name, default)
            if value != default:
                self.options[name] = value
        self.order = order_of(loader)
        """Arguments for `trainer.dataloader` that choose the order of samples."""

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self)

    def __len__(self) -> int:
        """Return the number of batches of `batch_size` in the data set, at any number of replicas."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the order of samples of each pass follows from the trainer's seed and its number."""

    @property
    def dataset(self) -> Dataset[Any]:
        """The data set."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """The batch size of the program's loader."""
        return self._batch_size

    @property
    def total_batch_size(self) -> int:
        """The batch size of the program's loader, as Accelerate's loaders have it on one process."""
        return self._batch_size

    @property
    def sampler(self) -> Any:
        """The sampler of the program's loader, whose kind gives the order of samples."""
        return self._loader.sampler


def order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments for `trainer.dataloader` that give the order of a loader's sampler."""
    sampler = loader.sampler
    if isinstance(sampler, SequentialSampler):
        return {"shuffle": False}
    if shuffles_all(sampler, len(loader.dataset)):  # type: ignore[arg-type]
        return {"shuffle": True}
    if isinstance(sampler, WeightedRandomSampler):
        weights, count, replacement = sampler.weights, sampler.num_samples, sampler.replacement

        def order(_: int, seed: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            return torch.multinomial(weights, count, replacement, generator=generator)

        return {"order": order}
    raise DatasetError(
        f"accelerator.prepare() got a DataLoader with sampler={type(sampler).__name__}(...), but the trainer "
        "divides the samples among the replicas, whose number may change in the middle of a pass: pass "
        "shuffle=True or shuffle=False, with torch.utils.data.Subset for a part of the data, or a "
        "WeightedRandomSampler; no DistributedSampler is needed. For another order, use "
        "accelerator.trainer.dataloader(dataset, order=...)"
    )
