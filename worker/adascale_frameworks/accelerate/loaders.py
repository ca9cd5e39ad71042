"""The data loaders that `ElasticAccelerator.prepare` returns.

They have the data set and the options of the program's loader, and get their batches from the trainer. The
next batch is requested when the program requests it: Accelerate's own loader reads one batch ahead, and would
so begin the next step before the present one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from adascale_frameworks.common import ReplacedLoader, options_of, order_of, require_batch_size

_WHAT = "the DataLoader that accelerator.prepare() got"
_WAY = "accelerator.trainer.dataloader(dataset, {}=...)"


class ElasticDataLoader(ReplacedLoader):
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
        super().__init__(loader)
        self.batch_size = require_batch_size(loader, _WHAT, _WAY.format("lengths"))
        self.total_batch_size = self.batch_size
        """The same: Accelerate's loaders have it on one process."""
        self.device = device
        self._begin = begin
        self.order = order_of(loader.sampler, len(loader.dataset), _WHAT, _WAY.format("order"))  # type: ignore[arg-type]
        """Arguments for `trainer.dataloader` that choose the order of samples."""

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self)

    def options(self, *, evaluates: bool = False) -> dict[str, Any]:
        """Return the arguments for `DataLoader`, besides those that choose batches."""
        return options_of(self.loader, evaluates=evaluates)

    def __len__(self) -> int:
        """Return the number of batches of `batch_size` in the data set, at any number of replicas."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the order of samples of each pass follows from the trainer's seed and its number."""
