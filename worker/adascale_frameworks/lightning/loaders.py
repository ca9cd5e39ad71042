"""The loaders that take the places of the program's `DataLoader`s."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeGuard

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from adascale_frameworks.common import ReplacedLoader, order_of, require_batch_size
from adascale_worker.errors import DatasetError

_WHAT = "the train dataloader of Trainer.fit"


class TrainingLoader(ReplacedLoader):
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
        self.batch_size = require_batch_size(loader, _WHAT, "ElasticStrategy(lengths=...)")
        way = "ElasticStrategy(order=...)"
        self.order = {} if has_order else order_of(loader.sampler, self.samples, _WHAT, way)
        """Arguments for `ElasticTrainer.dataloader` that choose the order of samples."""

    @property
    def samples(self) -> int:
        """Samples of the data set."""
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Return the steps at the initial batch size in an epoch, rounded up."""
        return max(1, math.ceil(self.samples / self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


class EvaluationLoader(ReplacedLoader):
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


def is_divisible(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether the batches of a loader are those of consecutive samples, which replicas can share."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is not None
        and type(loader.sampler) is SequentialSampler
        and not loader.drop_last
    )
