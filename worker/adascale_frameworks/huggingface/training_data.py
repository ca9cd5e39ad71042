"""The training data of the framework, as the trainer delivers it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from adascale_frameworks.samplers import shuffles_all
from adascale_worker.errors import DatasetError
from adascale_worker.trainer import ElasticTrainer

Order = Callable[[int, int], Any]
"""A function of the number of the pass and a seed, see `ElasticTrainer.dataloader`."""

_REMEDY = (
    "the replicas share out the samples, whose order has to follow from the number of the pass: pass "
    "elastic(trainer, order=...), a function of the number of the pass and a seed which returns the indices "
    "of its samples, or use random, sequential or group_by_length sampling"
)


class TrainingData:
    """What the loop of the framework iterates over, once in each epoch.

    An iteration delivers micro-batches until the epoch of the trainer ends, or training.
    """

    def __init__(
        self,
        elastic: ElasticTrainer,
        source: DataLoader[Any],
        order: Order | None,
        batch_size: int,
        *,
        pin_memory: bool,
        begin_batch: Callable[[], None],
    ) -> None:
        dataset: Any = source.dataset
        self.dataset = dataset
        self.steps_per_epoch = float(len(dataset) / batch_size)
        """At the initial batch size; not always an integer."""
        self._elastic = elastic
        self._options = options_of(source, order, pin_memory=pin_memory)
        self._begin_batch = begin_batch
        self._epochs: Iterator[int] | None = None
        self._batches: Iterator[Any] | None = None
        self.is_open = False
        """Whether the loop is inside an epoch."""
        self.has_delivered = False
        """Whether the present epoch, or the last one, has had a batch."""

    def __len__(self) -> int:
        """The steps of an epoch at the initial batch size."""
        return max(1, math.ceil(self.steps_per_epoch))

    def __iter__(self) -> Iterator[Any]:
        self.leave()
        self.has_delivered = False
        if not self.begin_epoch():
            return
        self._batches = iter(self._elastic.dataloader(self.dataset, **self._options))
        self.is_open = True
        for batch in self._batches:
            self._begin_batch()
            self.has_delivered = True
            yield batch
        self.is_open = False

    def begin_epoch(self) -> bool:
        """End the epoch before, and return whether there is another one."""
        if self._epochs is None:
            self._epochs = self._elastic.epochs()
        return next(self._epochs, None) is not None

    def leave(self) -> None:
        """Leave the loop over the batches of an epoch, if the framework has left it. May be called again."""
        batches, self._batches, self.is_open = self._batches, None, False
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def options_of(source: DataLoader[Any], order: Order | None, *, pin_memory: bool) -> dict[str, Any]:
    """Return the arguments for `ElasticTrainer.dataloader` that load what a data loader would."""
    initialize = source.worker_init_fn
    if isinstance(initialize, functools.partial) and initialize.func is seed_worker:
        initialize = None  # The trainer seeds the workers, by the position in the data.
    options: dict[str, Any] = {
        "collate_fn": source.collate_fn,
        "num_workers": source.num_workers,
        "pin_memory": pin_memory and source.pin_memory,
        "worker_init_fn": initialize,
    }
    if source.num_workers:
        options |= {
            "multiprocessing_context": source.multiprocessing_context,
            "persistent_workers": source.persistent_workers,
            "prefetch_factor": source.prefetch_factor,
        }
    if order is not None:
        return options | {"order": order}
    return options | _order_of(source)


def _order_of(source: DataLoader[Any]) -> dict[str, Any]:
    batches = source.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if isinstance(batches, BatchSampler):
        if isinstance(sampler, LengthGroupedSampler):
            return {"lengths": sampler.lengths}
        if isinstance(sampler, SequentialSampler):
            return {"shuffle": False}
        if shuffles_all(sampler, len(source.dataset)):  # type: ignore[arg-type]
            return {}
    found = type(sampler if isinstance(batches, BatchSampler) else batches).__name__
    raise DatasetError(f"the training data has a {found}, but {_REMEDY}")
