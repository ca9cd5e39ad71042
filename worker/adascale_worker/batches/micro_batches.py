"""The micro-batches of a replica: the indices that a DataLoader and its workers get, and what they load."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

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
    """The sample indices of a micro-batch, or of a probe: a sample of which a worker loads the summary.

    A worker process seeds its random number generators when it receives them, just before it loads the
    samples. Without worker processes, the trainer seeds.
    """

    def __init__(self, indices: list[int], seed: int, position: int, *, is_probe: bool = False) -> None:
        super().__init__(indices)
        self._how = seed, position, is_probe

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_batch, (list(self), *self._how)


_received = {"is_probe": False}
"""What a worker process has received last."""


def _receive_batch(indices: list[int], seed: int, position: int, is_probe: bool) -> list[int]:
    # Other numbers than those of a replica, whose training draws from the same seed and position.
    seed_generators(seed, position, PROBE_RANK)
    _received["is_probe"] = is_probe
    return indices


def _probes(indices: Sequence[int], seed: int) -> list[Batch]:
    return [Batch([index], seed, index, is_probe=True) for index in indices]


def _collate(function: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Collate samples in a worker process, or return the summary of a probe."""
    return summary(samples) if _received["is_probe"] else function(samples)


def make_loader(dataset: Any, batches: Any, seed: int, options: dict[str, Any]) -> DataLoader[Any]:
    """Return a loader of batches, whose worker processes load probes too."""
    if options.get("num_workers", 0):
        collate = partial(_collate, options.get("collate_fn") or default_collate)
        options = {**options, "collate_fn": collate}
    # It draws the seeds of its workers from the generator, not from the program's random state.
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_sampler=batches, generator=generator, **options)


def fetch(dataset: Any, indices: Sequence[int], seed: int, options: dict[str, Any]) -> Found:
    """Return summaries of samples, fetched where batches are, under seeds that follow from the indices."""
    if options.get("num_workers", 0):
        once = {**options, "persistent_workers": False}
        return take_probes(iter(make_loader(dataset, _probes(indices, seed), seed, once)), indices)
    generators, found = Generators(), []
    has_items = getattr(dataset, "__getitems__", None)
    for index in indices:
        with generators.used(), suppress(Exception):
            # A sample that cannot be fetched ends training when it is trained.
            generators.seed(mixed_seed(seed, index, PROBE_RANK))
            found.append((index, summary(dataset.__getitems__([index]) if has_items else [dataset[index]])))
    return found


def take_probes(loaded: Iterator[Any], indices: Sequence[int]) -> Found:
    """Return what worker processes load for probes."""
    found: Found = []
    for index in indices:
        with suppress(Exception):
            found.append((index, next(loaded)))
    return found


class MicroBatches(Sampler[list[int]]):
    """The endless sequence of a replica's micro-batches, as lists of sample indices, after some probes."""

    def __init__(
        self,
        samples: SampleSequence,
        start: int,
        plan: BatchPlan,
        rank: int,
        division: StepDivision | None = None,
    ) -> None:
        self._division = division
        self.drawn: deque[tuple[StepPlan, int]] | None = None if division is None else deque()
        """How the step of each micro-batch that was drawn is delivered, and the index of the micro-batch in a
        divided step, else 0. `LoadedBatches` takes them from here. None if no step is divided."""
        self.begin(samples, start, plan, rank)

    def begin(
        self, samples: SampleSequence, start: int, plan: BatchPlan, rank: int, probes: Sequence[int] = ()
    ) -> None:
        """Let the next iteration begin at another place."""
        self._samples, self._plan, self._rank = samples, plan, rank
        self._start = start  # of the next step of all replicas, or micro-batch
        self._probes = _probes(probes, samples.seed)

    def __iter__(self) -> Iterator[list[int]]:
        samples, plan, start, division = self._samples, self._plan, self._start, self._division
        drawn = self.drawn
        if drawn is not None:
            drawn.clear()
        first = self._rank * plan.local_bsz
        together = plan.replicas * plan.local_bsz
        count = max(1, min(READ_AHEAD // plan.local_bsz, samples.length // together))
        offsets = numpy.arange(count)[:, None] * together + numpy.arange(plan.local_bsz)
        yield from self._probes
        while True:
            for indices in samples.indices(start + first + offsets).tolist():
                step = StepPlan(plan) if division is None else division.step_at(start, plan)
                size = step.plan.local_bsz
                for index in range(plan.local_bsz // size):
                    part = slice(index * size, (index + 1) * size)
                    if drawn is not None:
                        drawn.append((step, index))
                    yield Batch(indices[part], samples.seed, start + first + part.start)
                start += together

    def __len__(self) -> int:
        raise TypeError("an epoch of an elastic trainer has no fixed number of batches")


class LoadedBatches(Iterator[Any]):
    """A replica's micro-batches as they are loaded, without end.

    `step` and `index` are those of the last one, see `MicroBatches.drawn`; None if no step is divided.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        plan: BatchPlan,
        drawn: deque[tuple[StepPlan, int]] | None = None,
        position: int = 0,
    ) -> None:
        self._loaded = batches
        self._drawn = drawn
        self.step = StepPlan(plan)
        self.index = 0
        self.position: int | None = position
        """Of the next micro-batch of all replicas. None if it is unknown, after an error."""

    def take_probes(self, indices: Sequence[int]) -> Found:
        """Return what worker processes have loaded for probes, before the first batch."""
        return take_probes(self._loaded, indices)

    def __next__(self) -> Any:
        position, self.position = self.position, None
        batch = next(self._loaded)
        if self._drawn is not None:
            self.step, self.index = self._drawn.popleft()
        assert position is not None
        self.position = position + self.step.plan.replicas * self.step.plan.local_bsz
        return batch

    def close(self) -> None:
        """Let the worker processes end, with the last reference to their DataLoader."""
        self._loaded = iter(())
