"""What the adapters share: launchers' variables, multiples that a step crosses, loaders, logged values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from adascale_core.names import LAUNCHER_VARIABLES, MAX_METRICS
from adascale_worker.errors import DatasetError
from adascale_worker.reporting.reports import as_number
from adascale_worker.trainer import ElasticTrainer


class TrainerOptions(TypedDict, total=False):
    """Arguments that the adapters pass on to `ElasticTrainer`."""

    max_batch_size: int | None
    local_bsz_bounds: Sequence[int | Literal["auto"]] | None
    train_samples: int | None
    efficiency_target: float | None
    checkpoint_dir: str | Path | None
    checkpoint_interval: float | None
    max_nonfinite_steps: int | None
    single_replica_gain: Literal["divided", "consecutive"]
    max_gain: float | None


def hide_launcher(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove, and return, the variables from which a framework concludes that it runs in several processes.

    Under `torchrun` or `srun`, call this after `ElasticTrainer` was made, which reads the rank from them.
    """
    return {name: environ.pop(name) for name in LAUNCHER_VARIABLES if name in environ}


def crossed(interval: int, before: float, after: float) -> range:
    """Return the multiples of an interval that an optimizer step has crossed, in ascending order.

    A step at a larger batch is worth several steps at the initial batch size, so it can cross a multiple
    without ending at it, and several multiples at once. Each multiple is crossed by exactly one step.
    """
    if interval < 1:
        raise ValueError(f"interval is {interval}: it must be at least 1")
    if not 0 <= before <= after < math.inf:
        raise ValueError(f"progress went from {before} to {after}: it starts at 0 and only rises")
    # Integers, because a quotient of floats may be rounded up to the next multiple.
    first, last = int(before) // interval + 1, int(after) // interval
    return range(first * interval, last * interval + 1, interval)


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


def options_of(loader: DataLoader[Any], *, evaluates: bool = False) -> dict[str, Any]:
    """Return the options of a loader that do not choose its batches; for an evaluation, once.

    The worker processes of an evaluation end with it.
    """
    found = {name: getattr(loader, name, default) for name, default in _OPTIONS.items()}
    options = {name: value for name, value in found.items() if value != _OPTIONS[name]}
    if evaluates:
        options.pop("persistent_workers", None)
    return {"collate_fn": loader.collate_fn, **options}


def order_of(sampler: object, samples: int, what: str, way: str) -> dict[str, Any]:
    """Return the arguments for `ElasticTrainer.dataloader` that give the order of a loader's sampler.

    For errors, `what` is where the loader is from, and `way` how the program gives another order.
    """
    if isinstance(sampler, SequentialSampler):
        return {"shuffle": False}
    if _shuffles_all(sampler, samples):
        return {"shuffle": True}
    if isinstance(sampler, WeightedRandomSampler):
        weights, count, replacement = sampler.weights, sampler.num_samples, sampler.replacement

        def order(_: int, seed: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            return torch.multinomial(weights, count, replacement, generator=generator)

        return {"order": order}
    raise DatasetError(
        f"{what} has sampler={type(sampler).__name__}(...), but the trainer divides the samples among the "
        "replicas, whose number may change in the middle of a pass: pass shuffle=True or shuffle=False, with "
        "torch.utils.data.Subset for a part of the data, or a WeightedRandomSampler; no DistributedSampler "
        f"is needed. For another order, use {way}, a function of the number of the pass and a seed, which "
        "returns the indices of its samples"
    )


def _require_batch_size(loader: DataLoader[Any], what: str, way: str) -> int:
    """Return the batch size of a loader of a data set with items by index.

    For errors, `what` is where the loader is from, and `way` how the program gets batches of similar length.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise DatasetError(
            f"{what} has a {type(loader.dataset).__name__}, an IterableDataset: an elastic job needs a data "
            "set with __len__ and __getitem__, so that any number of replicas can share it"
        )
    if loader.batch_size is None:
        raise DatasetError(
            f"{what} has batch_sampler={type(loader.batch_sampler).__name__}(...) or batch_size=None, but "
            f"the trainer chooses the batches: pass batch_size= and shuffle=, or use {way} for batches of "
            "similar length"
        )
    return loader.batch_size


def _shuffles_all(sampler: object, samples: int) -> bool:
    """Whether a sampler is that of `shuffle=True`: each sample of the data set once, in a random order."""
    return (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source) == samples
    )


class ReplacedLoader:
    """Takes the place of a `DataLoader`, and has its other attributes."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class ElasticLoader(ReplacedLoader):
    """Takes the place of a `DataLoader` for training, whose batches the trainer delivers.

    For errors, `what` is where the loader is from, and `way` how the program gives `{}=` in its place.
    """

    def __init__(
        self,
        loader: object,
        what: str,
        way: str,
        begin: Callable[[Any], Iterator[Any]],  # gets this object; iterates over the batches of an epoch
        *,
        has_order: bool = False,  # whether the program gives it in another way
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise DatasetError(
                f"{what} is of type {type(loader).__name__}, but the trainer divides the samples among the "
                "replicas: pass a torch.utils.data.DataLoader"
            )
        super().__init__(loader)
        self._begin = begin
        self.batch_size = _require_batch_size(loader, what, way.format("lengths"))
        self.samples = len(loader.dataset)  # type: ignore[arg-type]
        sampler, way = loader.sampler, way.format("order")
        self.order = {} if has_order else order_of(sampler, self.samples, what, way)
        """Arguments for `ElasticTrainer.dataloader` that choose the order of samples."""

    def __len__(self) -> int:
        """Return the steps at the initial batch size in an epoch, rounded up."""
        return max(1, math.ceil(self.samples / self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self)


class ReportedValues:
    """The values that a framework logs, as far as a job may report them; adapters report the loss itself."""

    def __init__(self, elastic: ElasticTrainer) -> None:
        self._elastic = elastic
        self._names = {"loss"}

    def report(self, values: Mapping[str, Any]) -> None:
        """Send the numbers to the metrics service."""
        for name, value in values.items():
            name = re.sub(r"\W", "_", name)
            number = value if isinstance(value, torch.Tensor) and value.numel() == 1 else as_number(value)
            fits = name in self._names or (len(self._names) < MAX_METRICS and name.isidentifier())
            if number is not None and name != "loss" and fits:
                self._names.add(name)
                self._elastic.log(**{name: number})
