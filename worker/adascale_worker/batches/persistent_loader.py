"""Worker processes that load data as long as training goes on, with `persistent_workers=True`."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader

from adascale_worker.batches.stream import MicroBatches, Place


class PersistentLoader(Iterator[Any]):
    """Loads micro-batches without end, in the same worker processes also from another place.

    Args:
        dataset: the data set, of which each worker process has a copy.
        options: arguments for DataLoader.
        loader: made from both.
        sampler: its batch sampler.
    """

    def __init__(
        self, dataset: Sized, options: dict[str, Any], loader: DataLoader[Any], sampler: MicroBatches
    ) -> None:
        self._dataset = dataset
        self._options = options
        self._loader: DataLoader[Any] | None = loader
        self.sampler = sampler
        self._batches: Iterator[Any] | None = None
        self._next: Place | None = None
        """The place of the next batch that the worker processes deliver. None if it is unknown."""

    def difference(self, dataset: Sized, options: dict[str, Any]) -> str | None:
        """Return what differs from what the worker processes were started with; None if nothing does."""
        if dataset is not self._dataset:
            return "another data set"
        before = self._options
        names = [name for name in sorted({*options, *before}) if options.get(name) != before.get(name)]
        return f"another {' and another '.join(names)}" if names else None

    def begin(self) -> PersistentLoader:
        """Continue at the place of `sampler`: with the batches that are loaded already, if they follow."""
        if self._next != self.sampler.place:
            assert self._loader is not None
            self._batches = iter(self._loader)
            self._next = self.sampler.place
        return self

    def __next__(self) -> Any:
        assert self._batches is not None
        assert self._next is not None
        place, self._next = self._next, None
        batch = next(self._batches)
        self._next = place.after_micro_batch()
        return batch

    def close(self) -> None:
        """End the worker processes. The processes of a DataLoader end with the last reference to it."""
        self._loader = self._batches = self._next = None
