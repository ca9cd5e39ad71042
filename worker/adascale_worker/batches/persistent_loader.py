"""Worker processes that load data as long as training goes on, with `persistent_workers=True`."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import DataLoader

from adascale_worker.batches.stream import LoadedBatches, Place
from adascale_worker.gradients.step_division import StepPlan


class PlacedSampler(Protocol):
    """Yields what a worker process loads a micro-batch from, beginning at a place."""

    place: Place


S = TypeVar("S", bound=PlacedSampler)


class PersistentLoader(LoadedBatches, Generic[S]):
    """Loads micro-batches without end, in the same worker processes also from another place."""

    def __init__(
        self,
        dataset: object,
        options: dict[str, Any],
        loader: DataLoader[Any],
        sampler: S,
        drawn: deque[tuple[StepPlan, int]] | None = None,
    ) -> None:
        super().__init__(iter(()), sampler.place.plan, drawn)
        self.sampler = sampler
        self._dataset = dataset
        self._options = options
        self._loader: DataLoader[Any] | None = loader
        self._next: Place | None = None
        """The place of the next batch that the worker processes deliver. None if it is unknown."""

    def difference(self, dataset: object, options: dict[str, Any]) -> str | None:
        """Return what differs from what the worker processes were started with; None if nothing does."""
        if dataset is not self._dataset:
            return "another data set"
        before = self._options
        names = [name for name in sorted({*options, *before}) if options.get(name) != before.get(name)]
        return f"another {' and another '.join(names)}" if names else None

    def begin(self) -> PersistentLoader[S]:
        """Continue at the place of `sampler`: with the batches that are loaded already, if they follow."""
        if self._next != self.sampler.place:
            assert self._loader is not None
            self._loaded = iter(self._loader)
            self._next = self.sampler.place
            self.step = StepPlan(self.sampler.place.plan)
        return self

    def __next__(self) -> Any:
        assert self._next is not None
        place, self._next = self._next, None
        batch = super().__next__()
        self._next = place.after(self.step.plan)
        return batch

    def close(self) -> None:
        """End the worker processes. The processes of a DataLoader end with the last reference to it."""
        self._loader = self._next = None
        self._loaded = iter(())
