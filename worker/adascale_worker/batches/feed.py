"""The training data of one replica: its data set is checked, and its micro-batches are loaded.

A DataLoader and its worker processes get the indices of the micro-batches, without end, from a position on.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_worker.batches.comparison import CAUSES, DataComparison, Found, summary
from adascale_worker.batches.order import (
    RANDOM_ORDER,
    READ_AHEAD,
    Generators,
    Lengths,
    OrderFunction,
    Origin,
    SampleSequence,
    indexed_length,
    mixed_seed,
    order_of,
    seed_generators,
)
from adascale_worker.batches.stream import Stream, StreamFeed
from adascale_worker.errors import FROM_SCRATCH, DatasetError
from adascale_worker.gradients.step_division import StepDivision, StepPlan
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.reporting.progress import TrainingProgress

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


STREAM, SHARDS = "that of a stream", "that of shards"
"""The kinds of order of an iterable data set: read as a whole by each replica, or by shards."""
_IN_WORDS = {STREAM: "is a stream", SHARDS: "is a stream of shards"}

Load = Callable[[int, BatchPlan], LoadedBatches]
"""Loads micro-batches, from a position in the samples of all replicas on, by a batch plan."""

CHOSEN_BY_TRAINER = frozenset({"batch_size", "sampler", "batch_sampler", "drop_last", "generator"})
"""Arguments of DataLoader that choose the batches."""

ONE_DATA_SET = (
    "a job trains on one data set. To train on several, pass them as one, such as "
    "torch.utils.data.ConcatDataset([first, second]). For evaluation, use trainer.evaluation, or a "
    "DataLoader of your own"
)


class DataFeed:
    """Checks data sets, and loads micro-batches from the position in the data."""

    def __init__(
        self,
        bounds: BatchBounds,
        group: ReplicaGroup,
        seed: int,
        progress: TrainingProgress,
        division: StepDivision,
        *,
        is_saved: bool = False,  # whether there are checkpoints, or replicas that join
    ) -> None:
        self._division = division
        self.bounds = bounds
        """Those of the next call of `open`."""
        self._group = group
        self.seed = seed
        """Determines the order of samples, and the random numbers of each step."""
        self._progress = progress
        self._comparison = DataComparison(group, self._progress, is_saved=is_saved)
        self._compare: Callable[[], None] | None = None
        """Of what has begun to load."""
        self._has_opened = False
        """Whether this process has opened a data set."""
        self._stream: StreamFeed | None = None
        """The stream that is trained."""
        self._length: int | None = None
        """Number of samples of a pass; of a stream, of the first one. None before it is known."""
        self._kind: str | None = None
        self._origin = Origin()
        self._is_open = False
        """Whether this process, or that which has sent the state, has opened the data set of `_length`."""
        self._kept: tuple[Any, dict[str, Any], DataLoader[Any], MicroBatches] | None = None
        """With `persistent_workers=True`: what worker processes load, and how."""
        self._loaded: tuple[LoadedBatches, SampleSequence, BatchPlan, int] | None = None
        """What they have loaded last, of a sequence, by a plan and for a rank."""

    @property
    def rank(self) -> int:
        """The index of this process among those of all replicas."""
        return self._group.rank * self._group.processes + self._group.process

    def open(
        self,
        dataset: Any,
        *,
        shards: int | None = None,
        shuffle: bool = True,
        order: OrderFunction | None = None,
        lengths: Lengths | None = None,
        allow_other_length: bool = False,
        map: Callable[[Any], Any] | None = None,  # noqa: A002
        shuffle_buffer: int = 0,
        exactly_once: bool = True,
        **options: Any,
    ) -> Load:
        """Use a data set, and return a function that loads this replica's micro-batches of it, without end.

        Calls of that are collective, and each is followed by `compare`. See `ElasticTrainer.dataloader`.
        """
        if conflicting := CHOSEN_BY_TRAINER & set(options):
            raise DatasetError(_refusal(conflicting, options))
        how = {"transform": map, "shuffle_buffer": shuffle_buffer, "is_exact": exactly_once}
        stream = Stream.of(dataset, shards, order, lengths, **how, shuffles_shards=shuffle, seed=self.seed)
        if stream is not None:
            return self._open_stream(stream, options)
        if self._group.processes > 1 and options.get("persistent_workers"):
            raise DatasetError(
                "dataloader() got persistent_workers=True, which is not supported with processesPerReplica: "
                "leave it out"
            )
        # Batches that are not loaded in their order cannot be parts of a step.
        self._division.loads_parts = options.get("in_order", True)
        consumed = self._progress.consumed - self._origin.consumed
        number = self._origin.number + (consumed // self._length if self._length else 0)
        made = order_of(
            dataset, shuffle, order, lengths, seed=self.seed, group=self.bounds.batch_size, number=number
        )
        self._require_enough(made.length, "the data set" if order is None else "a pass of order=")
        self._begin_order(made, allow_other_length=allow_other_length)
        self._has_opened = True
        if not options.get("persistent_workers"):
            self.close()
        samples = replace(made, origin=self._origin)
        return partial(self._load, dataset, samples, options, allow_other_length)

    def progress_at(self, epoch: int) -> float:
        """Return the progress at which an epoch begins, counted from 0, with the data set that is open.

        Infinite for a stream whose first pass has not ended: no epoch ends before, because the gain of a step
        is at most its scale.
        """
        if self._length is None:
            return math.inf
        origin = self._origin
        return origin.progress + (epoch - origin.epoch) * self._length / self.bounds.batch_size

    def _require_enough(self, length: int, what: str) -> None:
        # Without max_batch_size nothing bounds the global batch, and a step may take more than a pass.
        name = "max_batch_size" if self.bounds.max_batch_size else "batch_size"
        smallest = self.bounds.max_batch_size or self.bounds.batch_size
        if length < smallest:
            samples = "1 sample" if length == 1 else f"{length} samples"
            both = f"batch_size and {name}" if length < self.bounds.batch_size < smallest else name
            raise DatasetError(
                f"{what} has {samples}, fewer than {name} ({smallest}): "
                f"set {both} to at most {length}, in the job file if there is one, or use more data"
            )

    def _begin_order(self, order: SampleSequence, *, allow_other_length: bool) -> None:
        """Continue with an order of samples, or begin with another one where that is allowed."""
        if self._kind in _IN_WORDS:
            raise self._other_kind(f"has {order.length} samples by index")
        progress = self._progress
        before, consumed = self._length, progress.consumed - self._origin.consumed
        if before is not None and before != order.length:
            number, seen = divmod(consumed, before)
            number += self._origin.number
            if self._is_open and not self._has_opened:
                raise DatasetError(
                    f"the data set has {order.length} samples on rank {self._group.rank}, but {before} on "
                    f"the replicas that train: each replica needs the same data. {CAUSES}"
                )
            if self._is_open:
                raise DatasetError(
                    f"the data set has {order.length} samples, but had {before} before: {ONE_DATA_SET}"
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
            self._comparison.forget()
            self._print(
                f"the data set has {order.length} samples, and had {before} before: {place}. Pass "
                f"{self._origin.number} and epoch {progress.epoch} begin now with the present data set"
            )
        elif not self._is_open and self._kind not in (None, order.kind) and consumed % order.length:
            self._comparison.forget()
            self._print(
                f"the order of samples was {self._kind}, and is now {order.kind}: in the rest of this pass, "
                "samples may be repeated or left out"
            )
        self._length, self._kind, self._is_open = order.length, order.kind, True

    def _other_kind(self, present: str) -> DatasetError:
        """Return the error for a data set with items by index in place of a stream, or the reverse."""
        words = _IN_WORDS.get(self._kind or "")
        before = words.replace("is", "was", 1) if words else f"had {self._length} samples by index"
        if self._is_open:
            return DatasetError(f"the data set {present}, but {before} before: {ONE_DATA_SET}")
        return DatasetError(
            f"the data set {present}, but {before} when the checkpoint was saved. Use the data set from "
            f"before, or {FROM_SCRATCH}"
        )

    def _print(self, text: str) -> None:
        if self._group.is_main:
            print(f"adascale: {text}", file=sys.stderr, flush=True)

    def _load(
        self,
        dataset: Sized,
        samples: SampleSequence,
        options: dict[str, Any],
        allow_others: bool,  # whether the data may differ from those of the checkpoint
        consumed: int,
        plan: BatchPlan,
    ) -> LoadedBatches:
        """Load this replica's micro-batches from a position on: what this process has of each."""
        comparison, processes = self._comparison, self._group.processes
        has_workers = options.get("num_workers", 0) > 0
        # Where batches may overtake each other, so may what is fetched for the comparison.
        indices = comparison.requests(samples, consumed) if options.get("in_order", True) else []
        fetch_again = partial(fetch, dataset, seed=self.seed, options=options)
        found = [] if has_workers else fetch_again(indices)
        place, loaded = (samples, plan.per_process(processes), self.rank), None
        keeps = options.get("persistent_workers", False)
        if keeps and self._kept is not None and self._kept[0] is dataset and self._kept[1] == options:
            _, _, loader, sampler = self._kept
            if self._loaded is not None and self._loaded[1:] == place:
                loaded = self._loaded[0] if self._loaded[0].position == consumed else None
        else:
            division = self._division if processes == 1 else None
            sampler = MicroBatches(samples, consumed, *place[1:], division)
            loader = make_loader(dataset, sampler, self.seed + consumed, options)
            if keeps:
                self.close()
                self._kept = dataset, options, loader, sampler
        if loaded is None:  # Otherwise worker processes go on.
            sampler.begin(samples, consumed, *place[1:], indices if has_workers else [])
            batches = iter(loader)
            if has_workers:
                found = take_probes(batches, indices)
            loaded = LoadedBatches(batches, plan, sampler.drawn, consumed)
        if keeps:
            self._loaded = loaded, *place
        self._compare = partial(
            comparison.compare, samples, consumed, found, fetch_again, allow_others=allow_others
        )
        return loaded

    def compare(self) -> None:
        """Compare the data with those of the other replicas, after batches have begun to load. Collective."""
        if self._compare is not None:
            self._compare()
        self._compare = None

    def close(self) -> None:
        """End persistent worker processes. May be called again."""
        if self._stream is not None:
            self._stream.close()
        if self._loaded is not None:
            self._loaded[0].close()
        self._kept = self._loaded = None

    # -- streams ------------------------------------------------------------------------------------------

    def _open_stream(self, stream: Stream, options: dict[str, Any]) -> Load:
        if self._group.processes > 1:
            raise DatasetError(
                "dataloader() got a stream, which is not supported with processesPerReplica: use a data set "
                "with a length and items by index"
            )
        if options.get("in_order") is False:
            raise DatasetError(
                "dataloader() got in_order=False, which changes the order of samples: leave it out"
            )
        kind = SHARDS if stream.count else STREAM
        if self._kind not in (None, kind):
            raise self._other_kind(_IN_WORDS[kind])
        self._division.loads_parts = False
        self._kind, self._is_open = kind, True
        if self._stream is None:
            # Of a job that has begun where another run has ended, too.
            progress = self._progress
            self._origin = Origin(progress.consumed, 0, progress.epoch, progress.progress)
            self._stream = self._make_stream()
        feed = self._stream
        feed.open(stream, options)
        return lambda consumed, plan: LoadedBatches(
            feed.micro_batches(consumed, plan, self._group.rank), plan
        )

    def _make_stream(self) -> StreamFeed:
        return StreamFeed(self._progress.consumed, self._origin.number, self._group)

    @property
    def exchanges(self) -> int:
        """How often the replicas had to exchange what follows, and to load their batches again."""
        return 0 if self._stream is None else self._stream.exchanges

    @property
    def is_stream(self) -> bool:
        """Whether the data set is a stream, whose epochs may be long or have no end."""
        return self._kind in _IN_WORDS

    def finished_step(self, *, ends_by_epochs: bool) -> None:
        """Record that training is at a step boundary, and how long a stream is whose pass has ended.

        `ends_by_epochs`: the replicas have to agree where an epoch ends.
        """
        consumed = self._progress.consumed
        if self._stream is None:
            return
        self._stream.finished_step(consumed)
        if self._length is not None:
            return
        length, stream = self._stream.length_at(consumed), self._stream.stream
        if stream is None or stream.is_exact:
            self._length = length
        elif ends_by_epochs and self._group.broadcast(length is not None):
            # Each replica reads a pass of its own. That of rank 0 counts.
            self._length = consumed - self._origin.consumed

    def compare_records(self) -> None:
        """Check that all replicas read the same stream. A collective call, at a step boundary."""
        feed, consumed = self._stream, self._progress.consumed
        if feed is None or self._kind != STREAM or self._group.replicas == 1:
            return
        if feed.stream is None or not feed.stream.is_exact:
            return
        place = feed.place_at(consumed)
        rows = self._group.gather([place.number, place.begin, place.fingerprint or 0])
        other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
        if other is not None:
            raise DatasetError(
                f"rank 0 and rank {other} read different records of the stream: after {consumed} "
                f"samples, rank 0 is in pass {rows[0][0]} since {rows[0][1]} samples, rank {other} in pass "
                f"{rows[other][0]} since {rows[other][1]}"
                + (", and their next records differ" if rows[0][:2] == rows[other][:2] else "")
                + ". Each replica has to read the same records in the same order, and the trainer shares "
                "them out: do not divide the data set by the rank, and seed what is shuffled by the number "
                "that set_epoch(number) gets, not by the process. For a stream that differs between the "
                "replicas, pass exactly_once=False"
            )

    # -- the state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the length and order of the data set (None before it is opened), and the seed."""
        consumed = self._progress.consumed
        place = None if self._stream is None else self._stream.place_at(consumed)
        described = None if place is None else {"consumed": consumed, **place.state_dict()}
        return {
            "stream": described,
            "samples": self._length,
            "seed": self.seed,
            "order": self._kind,
            "origin": list(astuple(self._origin)),
            "is_open": self._is_open,
            "compared": self._comparison.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        if state["order"] is not None:
            self._length, self._kind = state["samples"], state["order"]
        if state["seed"] is not None:
            self.seed = state["seed"]
        self._origin = Origin(*state["origin"])
        self._is_open = state["is_open"]
        self._comparison.load_state_dict(state["compared"])
        if state["stream"] is not None:
            place = dict(state["stream"])
            self._stream = self._stream or self._make_stream()
            self._stream.restore(consumed=place.pop("consumed"), state=place)

    def begin_from_checkpoint(self) -> None:
        """Record that no replica has opened a data set yet, so the next one may have another length."""
        self._is_open = False
        self._comparison.begin_from_checkpoint()


def require_evaluable(dataset: Sized, options: dict[str, Any]) -> None:
    """Check a data set for evaluation, and the arguments for DataLoader."""
    if conflicting := CHOSEN_BY_TRAINER & set(options):
        raise DatasetError(
            f"evaluation() got {', '.join(sorted(conflicting))}, but the trainer chooses the batches: pass "
            "batch_size alone, or use a DataLoader of your own on each replica"
        )
    if options.get("persistent_workers"):
        raise DatasetError(
            "evaluation() got persistent_workers=True, but its worker processes end with it: leave it out"
        )
    if indexed_length(dataset) == 0:
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
        f"the indices of its samples, such as\n    {RANDOM_ORDER}\nFor batches of similar length, pass the "
        "length of each sample:\n    trainer.dataloader(dataset, lengths=lengths)"
    )
