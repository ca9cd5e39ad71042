"""The core of the adapters: the loaders of training and evaluation, and the run of a framework's loop.

Besides what is refused, and the parts of a program by name.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from adascale_core.names import LAUNCHER_VARIABLES, MAX_METRICS
from adascale_worker.batches.feed import CHOSEN_BY_TRAINER
from adascale_worker.batches.order import OrderFunction, is_stream, permute
from adascale_worker.errors import DatasetError, WorkerError
from adascale_worker.loop.evaluation import Evaluation
from adascale_worker.reporting.reports import as_number
from adascale_worker.trainer import ElasticTrainer


def hide_launcher(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove, and return, the variables from which a framework concludes that it runs in several processes.

    Under `torchrun` or `srun`, call this after `ElasticTrainer` was made, which reads the rank from them.
    """
    return {name: environ.pop(name) for name in LAUNCHER_VARIABLES if name in environ}


_OF_DATALOADER = inspect.signature(ElasticTrainer.dataloader).parameters.keys() - {
    "self", "dataset", "shards", "allow_other_length", "options",
}  # fmt: skip
"""Arguments of `ElasticTrainer.dataloader` that a program gives beside its own loader."""


def take_data_options(options: MutableMapping[str, Any]) -> dict[str, Any]:
    """Remove, and return, the arguments for `ElasticTrainer.dataloader`."""
    names = [name for name in options if name in _OF_DATALOADER]
    return {name: value for name in names if (value := options.pop(name)) is not None}


_OPTIONS = inspect.signature(DataLoader).parameters.keys() - CHOSEN_BY_TRAINER - {"dataset", "shuffle"}
"""Options of `DataLoader` that do not choose samples and batches."""


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a loader that do not choose its batches."""
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    options["pin_memory"] = loader.pin_memory and torch.cuda.is_available()
    return options


def evaluate(
    elastic: ElasticTrainer, loader: DataLoader[Any], model: torch.nn.Module, **arguments: Any
) -> Evaluation:
    """Return an evaluation of the consecutive samples of a loader, whose worker processes end with it."""
    batches: Any = loader.batch_sampler
    options = {"dataset": loader.dataset, "batch_size": batches.batch_size, **options_of(loader)}
    return elastic.evaluation(**{**options, "persistent_workers": False, "model": model, **arguments})


def is_divisible(loader: object, *samplers: type) -> TypeGuard[DataLoader[Any]]:
    """Whether the batches of a loader are those of consecutive samples, or of one of the samplers."""
    batches = getattr(loader, "batch_sampler", None)
    return (
        type(batches) is BatchSampler
        and type(batches.sampler) in (SequentialSampler, *samplers)
        and len(batches.sampler) > 0  # type: ignore[arg-type]
    )


def refuse(where: str, settings: Mapping[str, Any], ways: Mapping[str, str]) -> None:
    """Raise an error for the first setting that is used, with the way in which the program does without it.

    A setting is not used if its value is missing, None, False or 0.
    """
    for name, way in ways.items():
        if value := settings.get(name):
            raise WorkerError(f"{name}={value!r} is not supported {where}: {way}")


def by_optimizer(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Iterable[Any], what: str
) -> tuple[dict[str, torch.optim.Optimizer], dict[str, Any]]:
    """Return optimizers by name, and schedulers by the names of their optimizers.

    For errors, `what` is where they are from.
    """
    names = {id(optimizer): f"optimizer_{number}" for number, optimizer in enumerate(optimizers)}
    found: dict[str, Any] = {}
    for scheduler in schedulers:
        # One without that attribute is of the only optimizer.
        default = optimizers[0] if len(optimizers) == 1 else None
        name = names.get(id(getattr(scheduler, "optimizer", default)), "")
        if not name or name in found:
            which = "a second scheduler of an optimizer" if name else "the scheduler of another optimizer"
            raise WorkerError(
                f"{what} {which} ({type(scheduler).__name__}): pass one scheduler for each optimizer; "
                "SequentialLR and ChainedScheduler combine several"
            )
        found[name] = scheduler
    return {names[id(optimizer)]: optimizer for optimizer in optimizers}, found


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


class TrainingLoader(ReplacedLoader):
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
        given: Mapping[str, Any],  # arguments for `ElasticTrainer.dataloader`
        batch_size: int | None = None,  # that steps are counted in; None for that of the loader
        limit: float = 1.0,  # batches of the loader in a pass: a number, or as a float a share
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise DatasetError(
                f"{what} is of type {type(loader).__name__}, but the trainer divides the samples among the "
                "replicas: pass a torch.utils.data.DataLoader"
            )
        super().__init__(loader)
        self.samples: int | None = None
        """In a pass; None for a stream without a length."""
        with contextlib.suppress(TypeError):
            self.samples = len(loader.dataset)  # type: ignore[arg-type]
        batch_size = batch_size or loader.batch_size
        if batch_size is None:
            raise DatasetError(
                f"{what} has batch_sampler={type(loader.batch_sampler).__name__}(...) or batch_size=None, "
                f"but the trainer chooses the batches: pass batch_size= and shuffle=, or use "
                f"{way.format('lengths')} for batches of similar length"
            )
        self._begin = begin
        self.batch_size = batch_size
        order: dict[str, Any] = {}
        if is_stream(loader.dataset):
            order = {"shuffle": False}  # Its own order, also that of its shards.
        elif not given.keys() & {"order", "lengths"}:
            sampler = getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
            order = order_of(sampler, self.samples or 0, what, way.format("order"))
            if isinstance(sampler, WeightedRandomSampler):
                self.samples = sampler.num_samples
        self.options = {**options_of(loader), **order, **given}
        """Arguments for `ElasticTrainer.dataloader`."""
        if limit != 1.0 or type(limit) is int:
            self._limit(limit, what)

    def _limit(self, limit: float, what: str) -> None:
        """Let each pass have so many batches of the loader, the first ones of its order."""
        if self.samples is None or is_stream(self.loader.dataset) or "lengths" in self.options:
            raise DatasetError(
                f"{what} has a stream, or lengths=, and limit_train_batches={limit}: pass max_steps in place "
                "of limit_train_batches"
            )
        batches = limit if isinstance(limit, int) else int(limit * math.ceil(self.steps_per_epoch))
        whole, self.samples = self.samples, min(self.samples, batches * self.batch_size)
        if self.samples == 0:
            raise DatasetError(f"{what} has no batches with limit_train_batches={limit}: it must be larger")
        count, shuffle = self.samples, self.options.pop("shuffle", False)
        given: OrderFunction | None = self.options.pop("order", None)

        def order(number: int, seed: int) -> Any:
            if given is not None:
                return given(number, seed)[:count]
            positions = numpy.arange(count)
            return permute(positions, whole, seed) if shuffle else positions

        self.options["order"] = order

    @property
    def steps_per_epoch(self) -> float:
        """Batches of `batch_size` in a pass, not always an integer. Raises TypeError for a stream."""
        if self.samples is None:
            raise TypeError("the data set has no length")
        return self.samples / self.batch_size

    def __len__(self) -> int:
        """Return the batches of `batch_size` in a pass, rounded up."""
        return max(1, math.ceil(self.steps_per_epoch))

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the order of samples of each pass follows from the trainer's seed and its number."""


class ElasticRun:
    """The training of a framework that has the loop: its epochs, what it logs, and its end."""

    def __init__(self, elastic: ElasticTrainer) -> None:
        self.elastic = elastic
        self.batches: Any = None
        """Of the epoch that the framework has begun and not left."""
        self.has_requested_end = False
        self._reported = {"loss"}  # which adapters report themselves

    def deliver(self, loader: TrainingLoader, begin_batch: Callable[[], None]) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the present epoch."""
        self.leave()
        self.batches = batches = iter(self.elastic.dataloader(loader.dataset, **loader.options))
        for batch in batches:
            begin_batch()
            yield batch

    def leave(self) -> None:
        """Leave the loop over the batches of an epoch. May be called again."""
        batches, self.batches = self.batches, None
        if batches is not None:
            batches.close()

    def request_end(self, reason: str) -> bool:
        """Request that training ends on all replicas, once, and return whether it has."""
        if not self.has_requested_end and not self.elastic.finished:
            self.has_requested_end = True
            self.elastic.finish(reason)
        return self.elastic.finished

    def report(self, values: Mapping[str, Any]) -> None:
        """Send logged numbers to the metrics service, as far as a job may report them."""
        for name, value in values.items():
            name = re.sub(r"\W", "_", name)
            number = value if isinstance(value, torch.Tensor) and value.numel() == 1 else as_number(value)
            fits = name in self._reported or (len(self._reported) < MAX_METRICS and name.isidentifier())
            if number is not None and name != "loss" and fits:
                self._reported.add(name)
                self.elastic.log(**{name: number})
