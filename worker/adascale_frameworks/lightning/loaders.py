"""The loaders that take the places of the program's `DataLoader`s."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from adascale_frameworks.common import shuffles_all
from adascale_worker.errors import DatasetError

_KEPT_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class _Replaced:
    """Takes the place of a `DataLoader`, and has its other attributes."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class TrainingLoader(_Replaced):
    """Delivers the replica's micro-batches of the present epoch."""

    def __init__(
        self, loader: object, batches: Callable[[], Iterator[Any]], *, has_order: bool = False
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise DatasetError(
                f"Trainer.fit got a train dataloader of type {type(loader).__name__}, but the elastic "
                "trainer divides the samples among the replicas: pass a torch.utils.data.DataLoader"
            )
        super().__init__(loader)
        self._batches = batches
        if isinstance(loader.dataset, IterableDataset):
            raise DatasetError(
                f"the data set (type {type(loader.dataset).__name__}) of the train dataloader has no items "
                "by index: an elastic job needs a data set with __len__ and __getitem__, so that any number "
                "of replicas can share it"
            )
        if loader.batch_size is None:
            raise DatasetError(
                "the train dataloader has a batch_sampler, or no batches, but the trainer chooses the "
                "batches: pass batch_size and shuffle, and for batches of similar length "
                "ElasticStrategy(lengths=...)"
            )
        self.batch_size: int = loader.batch_size
        sampler = loader.sampler
        self.shuffle = shuffles_all(sampler, self.samples)
        if not self.shuffle and type(sampler) is not SequentialSampler and not has_order:
            raise DatasetError(
                f"the train dataloader has sampler={type(sampler).__name__}(...), but the trainer divides "
                "the samples among the replicas, whose number may change in the middle of a pass: pass "
                "ElasticStrategy(order=...), a function of the number of the pass and a seed, which returns "
                "the indices of its samples, and leave the sampler out"
            )

    @property
    def samples(self) -> int:
        """Samples of the data set."""
        return len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def options(self) -> dict[str, Any]:
        """What the loader was made with, besides what determines the batches."""
        return options_of(self.loader)

    def __len__(self) -> int:
        """Return the steps at the initial batch size in an epoch, rounded up."""
        return max(1, math.ceil(self.samples / self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


class EvaluationLoader(_Replaced):
    """Delivers the replica's share of the batches of a data set, or all of them."""

    def __init__(
        self, loader: DataLoader[Any], share: Callable[[DataLoader[Any], int], Iterator[Any] | None]
    ) -> None:
        super().__init__(loader)
        self._share = share  # returns None if each replica gets all batches
        self.limit = math.inf  # batches that are evaluated, at most

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # Not before the first batch is requested: Lightning makes iterators that it does not use.
        count = int(min(self.limit, len(self.loader)))
        share = self._share(self.loader, count)
        yield from islice(self.loader, count) if share is None else share


def is_divisible(loader: object) -> bool:
    """Whether the batches of a loader are those of consecutive samples, which replicas can share."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is not None
        and type(loader.sampler) is SequentialSampler
        and not loader.drop_last
    )


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a DataLoader that do not determine its batches."""
    return {name: getattr(loader, name) for name in _KEPT_OPTIONS}
