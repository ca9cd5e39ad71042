"""The training data of one replica: micro-batches of the job's sample stream."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_worker.batches.persistent_loader import PersistentLoader
from adascale_worker.batches.stream import MicroBatches, SampleStream
from adascale_worker.errors import DatasetError
from adascale_worker.membership.process_group import ReplicaGroup

_CHOSEN_BY_TRAINER = frozenset({"batch_size", "sampler", "batch_sampler", "drop_last", "generator"})
"""Arguments of DataLoader that choose the batches."""


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
        self._kept: PersistentLoader | None = None

    @property
    def seed(self) -> int:
        """Determines the order of samples, and the random numbers of each step."""
        return self._seed

    def change_bounds(self, bounds: BatchBounds) -> None:
        """Use other bounds from the next call of `open` on."""
        self._bounds = bounds

    def open(self, dataset: Sized, *, shuffle: bool, options: dict[str, Any]) -> SampleStream:
        """Return the sample stream of a data set.

        Args:
            dataset: has a length and items by index.
            shuffle: whether each pass has its own order.
            options: arguments for DataLoader.

        Raises:
            DatasetError: the data set has no length or no items by index, fewer samples than `max_batch_size`
                (or `batch_size`, if that is not set), or another length than before; or an option would
                choose the batches.
        """
        if conflicting := _CHOSEN_BY_TRAINER & set(options):
            raise DatasetError(
                f"dataloader() got {', '.join(sorted(conflicting))}, but the trainer chooses the batches: "
                "pass bounds to ElasticTrainer instead, or use a DataLoader of your own for other data"
            )
        length = _indexed_length(dataset)
        if length == 0:
            raise DatasetError(
                f"the data set (type {type(dataset).__name__}) has 0 samples: check the path of the data, "
                "and what filters it"
            )
        # Without max_batch_size nothing bounds the global batch, and a step may take more than a pass.
        name = "max_batch_size" if self._bounds.max_batch_size else "batch_size"
        smallest = self._bounds.max_batch_size or self._bounds.batch_size
        if length < smallest:
            samples = "1 sample" if length == 1 else f"{length} samples"
            both = f"batch_size and {name}" if length < self._bounds.batch_size < smallest else name
            raise DatasetError(
                f"the data set has {samples}, fewer than {name} ({smallest}): "
                f"set {both} to at most {length}, in the job file if there is one, or use more data"
            )
        if self._length is not None and self._length != length:
            raise DatasetError(
                f"the data set has {length} samples, but had {self._length} before: a job trains on one data "
                "set. For evaluation, use a DataLoader of your own"
            )
        self._length = length
        if not options.get("persistent_workers"):
            self.close()
        else:
            self._kept_loader(dataset, options)
        return SampleStream(length, self._seed, shuffle=shuffle)

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

    def state_dict(self) -> dict[str, int | None]:
        """Return the length of the data set (None before it is opened) and the seed."""
        return {"samples": self._length, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Restore a saved state."""
        if state["samples"] is not None:
            self._length = state["samples"]
        if state["seed"] is not None:
            self._seed = state["seed"]


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
