"""The training data of one replica: micro-batches of the job's sample stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sized
from dataclasses import astuple
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_worker.batches.order import (
    GroupedOrder,
    Lengths,
    Order,
    OrderFunction,
    ProgramOrder,
    SequentialOrder,
    ShuffledOrder,
)
from adascale_worker.batches.persistent_loader import PersistentLoader
from adascale_worker.batches.stream import MicroBatches, Origin, SampleStream
from adascale_worker.errors import DatasetError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.reporting.progress import TrainingProgress

_CHOSEN_BY_TRAINER = frozenset({"batch_size", "sampler", "batch_sampler", "drop_last", "generator"})
"""Arguments of DataLoader that choose the batches."""

_RANDOM_ORDER = (
    "trainer.dataloader(dataset, order=lambda number, seed: torch.multinomial(weights, len(dataset), "
    "replacement=True, generator=torch.Generator().manual_seed(seed)))"
)


class DataFeed:
    """Checks data sets, and loads micro-batches from the position in the stream.

    Args:
        bounds: the job's batch size and bounds.
        group: the replicas.
        seed: determines the order of samples.
    """

    def __init__(self, bounds: BatchBounds, group: ReplicaGroup, seed: int) -> None:
        self._bounds = bounds
        self._group = group
        self._seed = seed
        self._length: int | None = None
        """Number of samples of a pass. None before the data set is opened."""
        self._kind: str | None = None
        self._origin = Origin()
        self._is_open = False
        """Whether this process, or that which has sent the state, has opened the data set of `_length`."""
        self._kept: PersistentLoader | None = None

    @property
    def seed(self) -> int:
        """Determines the order of samples, and the random numbers of each step."""
        return self._seed

    def change_bounds(self, bounds: BatchBounds) -> None:
        """Use other bounds from the next call of `open` on."""
        self._bounds = bounds

    def open(
        self,
        dataset: Sized,
        *,
        shuffle: bool,
        options: dict[str, Any],
        order: OrderFunction | None = None,
        lengths: Lengths | None = None,
        allow_other_length: bool = False,
        progress: TrainingProgress | None = None,
    ) -> SampleStream:
        """Return the sample stream of a data set.

        Args:
            dataset: has a length and items by index.
            shuffle: whether each pass has its own order.
            options: arguments for DataLoader.
            order: the program's order.
            lengths: of the samples, which are grouped by them.
            allow_other_length: whether the first data set after a checkpoint was restored may have another
                length than the one before.
            progress: of training. Default: none has been made.

        Raises:
            DatasetError: the data set has no length or no items by index, fewer samples than `max_batch_size`
                (or `batch_size`, if that is not set), or another length than before; or an option would
                choose the batches; or the arguments contradict each other.
        """
        if conflicting := _CHOSEN_BY_TRAINER & set(options):
            raise DatasetError(_refusal(conflicting, options))
        progress = progress or TrainingProgress()
        made = self._order(dataset, shuffle, order, lengths, progress)
        self._require_enough(made.length, "the data set" if order is None else "a pass of order=")
        self._begin_order(made, progress, allow_other_length=allow_other_length)
        if not options.get("persistent_workers"):
            self.close()
        else:
            self._kept_loader(dataset, options)
        return SampleStream(made.length, self._seed, order=made, origin=self._origin)

    def progress_at(self, epoch: int) -> float:
        """Return the progress at which an epoch begins, counted from 0, with the data set that is open."""
        assert self._length is not None
        origin = self._origin
        return origin.progress + (epoch - origin.epoch) * self._length / self._bounds.batch_size

    def _order(
        self,
        dataset: Sized,
        shuffle: bool,
        order: OrderFunction | None,
        lengths: Lengths | None,
        progress: TrainingProgress,
    ) -> Order:
        samples = _indexed_length(dataset)
        if samples == 0:
            raise DatasetError(
                f"the data set (type {type(dataset).__name__}) has 0 samples: check the path of the data, "
                "and what filters it"
            )
        if (order is not None) + (lengths is not None) + (not shuffle) > 1:
            raise DatasetError(
                "dataloader() got more than one of order=, lengths= and shuffle=False, each of which "
                "determines the order of the samples: pass only one of them"
            )
        if order is not None:
            if not callable(order):
                raise DatasetError(
                    f"dataloader() got order= of type {type(order).__name__}: it must be a function of the "
                    "number of the pass and a seed that returns indices of samples, such as\n"
                    f"    {_RANDOM_ORDER}"
                )
            consumed = progress.consumed - self._origin.consumed
            number = self._origin.number + (consumed // self._length if self._length else 0)
            return ProgramOrder(order, samples, self._seed, number)
        if lengths is not None:
            if len(lengths) != samples:
                raise DatasetError(
                    f"dataloader() got {len(lengths)} lengths=, but the data set has {samples} samples: pass "
                    "the length of each sample"
                )
            return GroupedOrder(lengths, self._seed, self._bounds.batch_size)
        return ShuffledOrder(samples, self._seed) if shuffle else SequentialOrder(samples)

    def _require_enough(self, length: int, what: str) -> None:
        # Without max_batch_size nothing bounds the global batch, and a step may take more than a pass.
        name = "max_batch_size" if self._bounds.max_batch_size else "batch_size"
        smallest = self._bounds.max_batch_size or self._bounds.batch_size
        if length < smallest:
            samples = "1 sample" if length == 1 else f"{length} samples"
            both = f"batch_size and {name}" if length < self._bounds.batch_size < smallest else name
            raise DatasetError(
                f"{what} has {samples}, fewer than {name} ({smallest}): "
                f"set {both} to at most {length}, in the job file if there is one, or use more data"
            )

    def _begin_order(self, order: Order, progress: TrainingProgress, *, allow_other_length: bool) -> None:
        """Continue with an order of samples, or begin with another one where that is allowed."""
        before, consumed = self._length, progress.consumed - self._origin.consumed
        if before is not None and before != order.length:
            number, seen = divmod(consumed, before)
            number += self._origin.number
            if self._is_open:
                raise DatasetError(
                    f"the data set has {order.length} samples, but had {before} before: a job trains on one "
                    "data set. For evaluation, use a DataLoader of your own"
                )
            place = f"{seen} of the {before} samples of pass {number} (counted from 0) have been seen"
            if not allow_other_length:
                raise DatasetError(
                    f"the data set has {order.length} samples, but had {before} when the checkpoint was "
                    f"saved; {place}. To continue with the present data set, at the beginning of the next "
                    "pass, call trainer.dataloader(dataset, allow_other_length=True). To continue exactly, "
                    "use the data set from before"
                )
            self._origin = Origin(progress.consumed, number + bool(seen), progress.epoch, progress.progress)
            self._print(
                f"the data set has {order.length} samples, and had {before} before: {place}. Pass "
                f"{self._origin.number} and epoch {progress.epoch} begin now with the present data set"
            )
        elif not self._is_open and self._kind not in (None, order.kind) and consumed % order.length:
            self._print(
                f"the order of samples was {self._kind}, and is now {order.kind}: in the rest of this pass, "
                "samples may be repeated or left out"
            )
        self._length, self._kind, self._is_open = order.length, order.kind, True

    def _print(self, text: str) -> None:
        if self._group.is_main:
            print(f"adascale: {text}", file=sys.stderr, flush=True)

    def micro_batches(
        self, dataset: Sized, stream: SampleStream, consumed: int, plan: BatchPlan, options: dict[str, Any]
    ) -> Iterator[Any]:
        """Load this replica's micro-batches, without end.

        Args:
            dataset: a data set whose stream `open` has returned.
            stream: the sample stream.
            consumed: position in the stream of the first step's first sample.
            plan: replicas, local batch size and accumulation.
            options: arguments for DataLoader. With persistent_workers=True, the worker processes go on
                until `close`, and so do the batches that they have loaded ahead, if this is the next place.

        Raises:
            DatasetError: persistent workers go on that have another data set or other options.
        """
        kept = self._kept_loader(dataset, options)
        if kept is not None:
            kept.sampler.begin(stream, consumed, plan, self._group.rank)
            return kept.begin()
        sampler = MicroBatches(stream, consumed, plan, self._group.rank)
        loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=sampler,
            # The loader draws the seeds of its workers from this, not from the program's random state.
            generator=torch.Generator().manual_seed(self._seed + consumed),
            **options,
        )
        if not options.get("persistent_workers"):
            return iter(loader)
        self._kept = PersistentLoader(dataset, options, loader, sampler)
        return self._kept.begin()

    def close(self) -> None:
        """End worker processes that go on. May be called again."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _kept_loader(self, dataset: Sized, options: dict[str, Any]) -> PersistentLoader | None:
        """Return the loader whose worker processes go on, if these arguments are for it."""
        if self._kept is None or not options.get("persistent_workers"):
            return None
        if difference := self._kept.difference(dataset, options):
            raise DatasetError(
                f"dataloader() got persistent_workers=True, and {difference} than before, so the worker "
                "processes cannot go on: make the data set, and functions such as collate_fn, once before "
                "the loop over epochs, or leave out persistent_workers"
            )
        return self._kept

    def state_dict(self) -> dict[str, Any]:
        """Return the length and order of the data set (None before it is opened), and the seed."""
        return {
            "samples": self._length,
            "seed": self._seed,
            "order": self._kind,
            "origin": list(astuple(self._origin)),
            "is_open": self._is_open,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        if state["samples"] is not None:
            self._length, self._kind = state["samples"], state["order"]
        if state["seed"] is not None:
            self._seed = state["seed"]
        self._origin = Origin(*state["origin"])
        self._is_open = state["is_open"]

    def begin_from_checkpoint(self) -> None:
        """Allow that the next data set has another length: no replica has opened one yet."""
        self._is_open = False


def require_evaluable(dataset: Sized, options: dict[str, Any]) -> None:
    """Check a data set for evaluation, and the arguments for DataLoader.

    Raises:
        DatasetError: the data set has no length, no items by index, or no items; or an option would choose
            the batches.
    """
    if conflicting := _CHOSEN_BY_TRAINER & set(options):
        raise DatasetError(
            f"evaluation() got {', '.join(sorted(conflicting))}, but the trainer chooses the batches: pass "
            "batch_size alone, or use a DataLoader of your own on each replica"
        )
    if options.get("persistent_workers"):
        raise DatasetError(
            "evaluation() got persistent_workers=True, but its worker processes end with it: leave it out"
        )
    if _indexed_length(dataset) == 0:
        raise DatasetError(f"the data set (type {type(dataset).__name__}) has 0 samples")


def _refusal(conflicting: set[str] | frozenset[str], options: dict[str, Any]) -> str:
    """Return the message for arguments of DataLoader that choose the batches."""
    samplers = [name for name in ("sampler", "batch_sampler") if options.get(name) is not None]
    if not samplers:
        return (
            f"dataloader() got {', '.join(sorted(conflicting))}, but the trainer chooses the batches: "
            "pass bounds to ElasticTrainer instead, or use a DataLoader of your own for other data"
        )
    named = " and ".join(f"{name}={type(options[name]).__name__}(...)" for name in samplers)
    return (
        f"dataloader() got {named}, but the trainer divides the samples among the replicas, whose number may "
        "change in the middle of a pass: pass a function of the number of the pass and a seed, which returns "
        f"the indices of its samples, such as\n    {_RANDOM_ORDER}\nFor batches of similar length, pass the "
        "length of each sample:\n    trainer.dataloader(dataset, lengths=lengths)"
    )


def _indexed_length(dataset: Sized) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DatasetError(
            "got a DataLoader in place of a data set, but the trainer makes the DataLoader itself: pass "
            "loader.dataset, and options such as num_workers and collate_fn"
        )
    if not hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        raise DatasetError(
            f"the data set (type {kind}) has no items by index: an elastic job needs a data set with __len__ "
            "and __getitem__, so that any number of replicas can share it"
        )
    if isinstance(dataset, IterableDataset):
        raise DatasetError(
            f"the data set (type {kind}) has no items by index: an elastic job needs a data set with __len__ "
            "and __getitem__, so that any number of replicas can share it"
        )
    try:
        return len(dataset)
    except TypeError:
        raise DatasetError(
            f"the data set (type {kind}) has no length: an elastic job needs a data set with __len__ "
            "and __getitem__, so that any number of replicas can share it"
        ) from None
