"""The micro-batches of a replica: the indices that a DataLoader and its workers get, and what they load."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy
import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.fingerprint import Found, summary
from adascale_worker.batches.order import READ_AHEAD, SampleSequence
from adascale_worker.batches.seeding import Generators, mixed_seed, seed_generators
from adascale_worker.gradients.step_division import StepDivision, StepPlan

PROBE_RANK = -1
"""The rank by which the generators are seeded in worker processes, and for samples that are compared."""


class Batch(list[int]):
    """The sample indices of a micro-batch.

    A worker process seeds its random number generators when it receives them, just before it loads the
    samples. Without worker processes, the trainer seeds.
    """

    def __init__(self, indices: list[int], seed: int, position: int) -> None:
        super().__init__(indices)
        self._seed = seed
        self._position = position

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_batch, (list(self), self._seed, self._position)


class Probe(Batch):
    """The index of a sample, of which a worker process loads the summary."""

    def __init__(self, index: int, seed: int) -> None:
        super().__init__([index], seed, index)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_batch, (list(self), self._seed, self._position, True)


_received = {"is_probe": False}
"""What a worker process has received last."""


def _receive_batch(indices: list[int], seed: int, position: int, is_probe: bool = False) -> list[int]:
    # Other numbers than those of a replica, whose training draws from the same seed and position.
    seed_generators(seed, position, PROBE_RANK)
    _received["is_probe"] = is_probe
    return indices


class ProbedCollation:
    """Collates samples in a worker process, and returns the summary of a probe."""

    def __init__(self, function: Callable[[list[Any]], Any] | None) -> None:
        self._function = function or default_collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch, or the summary of a probe."""
        return summary(samples) if _received["is_probe"] else self._function(samples)


def fetch(dataset: Any, indices: Sequence[int], seed: int, options: dict[str, Any]) -> Found:
    """Return summaries of samples, fetched where batches are, under seeds that follow from the indices."""
    if options.get("num_workers", 0):
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=[Probe(index, seed) for index in indices],
            generator=torch.Generator().manual_seed(seed),
            **{**probing(options), "persistent_workers": False},
        )
        return take_probes(iter(loader), indices)
    generators, found = Generators(), []
    has_items = getattr(dataset, "__getitems__", None)
    for index in indices:
        with generators.used(), suppress(Exception):
            # A sample that cannot be fetched ends training when it is trained.
            generators.seed(mixed_seed(seed, index, PROBE_RANK))
            found.append((index, summary(dataset.__getitems__([index]) if has_items else [dataset[index]])))
    return found


def probing(options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of DataLoader with which worker processes load probes too."""
    if not options.get("num_workers", 0):
        return options
    return {**options, "collate_fn": ProbedCollation(options.get("collate_fn"))}


def take_probes(loaded: Iterator[Any], indices: Sequence[int]) -> Found:
    """Return what worker processes load for probes."""
    found: Found = []
    for index in indices:
        with suppress(Exception):
            found.append((index, next(loaded)))
    return found


@dataclass(frozen=True)
class Place:
    """A place in the micro-batches of a replica."""

    sequence: tuple[object, ...]  # what determines the sequence of samples
    position: int  # in the sequence: of the first sample of all replicas' next step, or micro-batch
    plan: BatchPlan
    rank: int

    def after(self, micro_batch: BatchPlan) -> Place:
        """Return the place after a micro-batch of a plan."""
        return replace(self, position=self.position + micro_batch.replicas * micro_batch.local_bsz)


class MicroBatches(Sampler[list[int]]):
    """The endless sequence of a replica's micro-batches, as lists of sample indices."""

    def __init__(
        self,
        samples: SampleSequence,
        start: int,
        plan: BatchPlan,
        rank: int,
        division: StepDivision | None = None,
        probes: Sequence[int] = (),
    ) -> None:
        self._division = division
        self.drawn: deque[tuple[StepPlan, int]] | None = None if division is None else deque()
        """How the step of each micro-batch that was drawn is delivered, and the index of the micro-batch in a
        divided step, else 0. `LoadedBatches` takes them from here. None if no step is divided."""
        self.begin(samples, start, plan, rank, probes)

    def begin(
        self, samples: SampleSequence, start: int, plan: BatchPlan, rank: int, probes: Sequence[int] = ()
    ) -> None:
        """Let the next iteration begin at another place, after probes of samples."""
        self._samples = samples
        self._probes = [Probe(index, samples.seed) for index in probes]
        self.place = Place(samples.sequence, start, plan, rank)

    def __iter__(self) -> Iterator[list[int]]:
        samples, place, division = self._samples, self.place, self._division
        plan = place.plan
        drawn = self.drawn
        if drawn is not None:
            drawn.clear()
        yield from self._probes
        together = plan.replicas * plan.local_bsz
        count = max(1, min(READ_AHEAD // plan.local_bsz, samples.length // together))
        offsets = numpy.arange(count)[:, None] * together + numpy.arange(plan.local_bsz)
        while True:
            positions = place.position + place.rank * plan.local_bsz + offsets
            for first, indices in zip(
                positions[:, 0].tolist(), samples.indices(positions).tolist(), strict=True
            ):
                step = StepPlan(plan) if division is None else division.step_at(place.position, plan)
                size = step.plan.local_bsz
                for index in range(plan.local_bsz // size):
                    part = slice(index * size, (index + 1) * size)
                    if drawn is not None:
                        drawn.append((step, index))
                    yield Batch(indices[part], samples.seed, first + part.start)
                place = place.after(plan)

    def __len__(self) -> int:
        raise TypeError("an epoch of an elastic trainer has no fixed number of batches")


class LoadedBatches(Iterator[Any]):
    """A replica's micro-batches as they are loaded, without end.

    `step` and `index` are those of the last one, see `MicroBatches.drawn`; None if no step is divided.
    """

    def __init__(
        self, batches: Iterator[Any], plan: BatchPlan, drawn: deque[tuple[StepPlan, int]] | None = None
    ) -> None:
        self._loaded = batches
        self._drawn = drawn
        self.step = StepPlan(plan)
        self.index = 0

    def take_probes(self, indices: Sequence[int]) -> Found:
        """Return what worker processes have loaded for probes, before the first batch."""
        return take_probes(self._loaded, indices)

    def __next__(self) -> Any:
        batch = next(self._loaded)
        if self._drawn is not None:
            self.step, self.index = self._drawn.popleft()
        return batch


class PlacedSampler(Protocol):
    """Yields what a worker process loads a micro-batch from, beginning at a place."""

    place: Place


S = TypeVar("S", bound=PlacedSampler)


class PersistentLoader(LoadedBatches, Generic[S]):
    """Loads micro-batches without end, from another place in the same worker processes."""

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

    @property
    def continues(self) -> bool:
        """Whether the batches that are loaded already are those at the place of `sampler`."""
        return self._next == self.sampler.place

    def begin(self) -> PersistentLoader[S]:
        """Continue at the place of `sampler`: with the batches that are loaded already, if they follow."""
        if not self.continues:
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
