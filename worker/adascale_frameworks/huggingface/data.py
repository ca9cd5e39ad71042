"""The data of the framework for training, as the trainer delivers it, and for evaluation.

An evaluation is divided among the replicas: each makes the prediction steps of its batches. The framework's
own loop then runs on all replicas, over the results of all batches, so its metrics are the same on all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from adascale_frameworks.common import options_of, order_of
from adascale_worker.batches.order import OrderFunction
from adascale_worker.trainer import ElasticTrainer


class TrainingData:
    """What the loop of the framework iterates over, once in each epoch.

    An iteration delivers micro-batches until the epoch of the trainer ends, or training.
    """

    def __init__(
        self,
        elastic: ElasticTrainer,
        source: DataLoader[Any],
        order: OrderFunction | None,
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
        self._options = options_for_training(source, order, pin_memory=pin_memory)
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


def options_for_training(
    source: DataLoader[Any], order: OrderFunction | None, *, pin_memory: bool
) -> dict[str, Any]:
    """Return the arguments for `ElasticTrainer.dataloader` that load what a data loader would."""
    options = options_of(source)
    initialize = source.worker_init_fn
    if isinstance(initialize, functools.partial) and initialize.func is seed_worker:
        del options["worker_init_fn"]  # The trainer seeds the workers, by the position in the data.
    if not pin_memory:
        options.pop("pin_memory", None)
    if order is not None:
        return options | {"order": order}
    batches = source.batch_sampler
    sampler = batches.sampler if isinstance(batches, BatchSampler) else batches
    if isinstance(sampler, LengthGroupedSampler):
        return options | {"lengths": sampler.lengths}
    samples = len(source.dataset)  # type: ignore[arg-type]
    return options | order_of(sampler, samples, "the training data", "elastic(trainer, order=...)")


SAMPLES = "adascale_samples"
"""The name of the tensor of sample numbers in a batch."""


class DividedEvaluation:
    """An evaluation of consecutive samples, and the results of its prediction steps on all replicas."""

    def __init__(self, arguments: dict[str, Any], *, drop_last: bool) -> None:
        self.arguments = arguments
        """Of `ElasticTrainer.evaluation`."""
        self.results: list[Any] = []
        """Of each batch: loss, logits and labels, and what the framework's loop reads of it besides."""
        self._drop_last = drop_last

    @classmethod
    def of(cls, source: DataLoader[Any]) -> DividedEvaluation | None:
        """Return the evaluation of a loader, or None if its batches are not those of consecutive samples."""
        batches = getattr(source, "batch_sampler", None)
        if not isinstance(batches, BatchSampler) or not isinstance(
            batches.sampler, (SequentialSampler, LengthGroupedSampler)
        ):
            return None
        dataset = source.dataset
        if not len(dataset):  # type: ignore[arg-type]
            return None
        options = options_of(source, evaluates=True)
        if not torch.cuda.is_available():
            options.pop("pin_memory", None)
        arguments = {"dataset": dataset, "batch_size": batches.batch_size, **options}
        return cls(arguments, drop_last=batches.drop_last)

    def loader(self) -> DataLoader[Any]:
        """Return a loader of batches for the framework's loop, which have the sizes of the real ones."""
        return DataLoader(
            range(len(self.arguments["dataset"])),  # type: ignore[arg-type]
            batch_size=self.arguments["batch_size"],
            drop_last=self._drop_last,
            collate_fn=lambda samples: {SAMPLES: torch.tensor(samples), **self._recorded(samples[0])[1]},
        )

    def of_batch(self, batch: dict[str, Any], device: torch.device) -> Any:
        """Return the result of a prediction step, on the device."""
        return send_to_device(self._recorded(int(batch[SAMPLES][0]))[0], device)

    def _recorded(self, sample: int) -> Any:
        return self.results[sample // self.arguments["batch_size"]]
