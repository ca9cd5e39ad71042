"""The records of a stream: what the workers of a DataLoader read, and the places after each micro-batch.

A DataLoader and its worker processes get requests, where to read to and which records to keep: so several
worker processes take turns, and go on when the replicas change.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.micro_batches import PersistentLoader, Place
from adascale_worker.batches.order import Lengths, OrderFunction, is_stream
from adascale_worker.batches.seeding import Generators, mix, permute, seed_generators
from adascale_worker.errors import DatasetError
from adascale_worker.torch_private.modules import hidden_worker_info

P = TypeVar("P")


@dataclass(frozen=True)
class StreamOptions:
    """How a stream is read."""

    transform: Callable[[Any], Any] | None = None  # applied to the replica's own records
    shuffle_buffer: int = 0  # records of a block that is shuffled; 0 keeps the order of the data set
    # Each replica reads the same records, and trains its share. Otherwise it trains all that it reads.
    is_exact: bool = True
    shuffles_shards: bool = True  # whether each pass has another order of them


def stream_options(
    dataset: object,
    shards: int | None,
    order: OrderFunction | None,
    lengths: Lengths | None,
    stream: StreamOptions,
) -> StreamOptions | None:
    """Return how a stream is read; None if the data set has items by index."""
    kind = type(dataset).__name__
    if shards is not None:
        if type(shards) is not int or shards < 1:
            raise DatasetError(f"dataloader() got shards={shards!r}: it must be an integer of at least 1")
        if not callable(dataset) or not stream.is_exact:
            raise DatasetError(
                f"dataloader() got shards={shards} and "
                + (f"a data set of type {kind}" if stream.is_exact else "exactly_once=False")
                + ": shards= needs a function that gets the index of a shard and returns its records, "
                "the same each time"
            )
    elif not is_stream(dataset):
        given = {
            "map": stream.transform is not None,
            "shuffle_buffer": stream.shuffle_buffer != 0,
            "exactly_once": not stream.is_exact,
        }
        if names := [f"{name}=" for name, is_given in given.items() if is_given]:
            raise DatasetError(
                f"dataloader() got {', '.join(names)}, which is for streams, but the data set (type {kind}) "
                "has items by index: leave it out, and make samples in __getitem__"
            )
        return None
    if order is not None or lengths is not None:
        raise DatasetError(
            f"dataloader() got {'lengths=' if order is None else 'order='}, which needs items by index, but "
            f"the data set (type {kind}) is a stream: leave it out, or shuffle by shuffle_buffer=10_000"
        )
    if stream.transform is not None and not callable(stream.transform):
        raise DatasetError(
            f"dataloader() got map= of type {type(stream.transform).__name__}: it must be a function that "
            "makes a sample of a record"
        )
    if type(stream.shuffle_buffer) is not int or stream.shuffle_buffer < 0:
        raise DatasetError(
            f"dataloader() got shuffle_buffer={stream.shuffle_buffer!r}: it must be an integer of at least "
            "0, the number of records that are shuffled together"
        )
    return stream


@dataclass(frozen=True)
class RecordRequest:
    """What to load a micro-batch from."""

    first: int  # position of the first record
    count: int  # fewer records are returned if they end
    end: int  # position after the micro-batches of all replicas
    keep_from: int  # position of the first record that may be requested again
    start: Any  # where to begin if the reader is elsewhere; None if it is not
    ahead: int  # records after `end` that are read too, if there are so many
    # on these two, random numbers depend
    seed: int
    position: int  # in the samples of all replicas


class RecordReader(ABC):
    """Reads records forward, in this process or a worker process, and keeps those that may be requested."""

    def __init__(self, seed: int, shuffle_buffer: int, *, is_exact: bool = True) -> None:
        self._seed = seed
        self._is_exact = is_exact
        self._block = max(1, shuffle_buffer)
        self._generators = Generators()
        self._iterator: Iterator[Any] | None = None
        """Of the present pass, or shard. None between two."""
        self._window: list[Any] = []
        self._base = 0
        """Position of the first record of the window."""

    def take(self, request: RecordRequest) -> tuple[list[Any], Any]:
        """Return records, and the place after the micro-batches of all replicas that they are a share of."""
        with hidden_worker_info(), self._generators.used() if self._is_exact else nullcontext():
            try:
                if request.start is not None:
                    self._begin_at(request.start)
                self._drop_before(min(request.keep_from, request.first))
                self._read_until(request.end, request.ahead)
            except BaseException:
                self._close()
                raise
        offset = request.first - self._base
        return self._window[offset : offset + request.count], self._place_at(request.end, request.ahead)

    @abstractmethod
    def _begin_at(self, start: Any) -> None:
        """Begin at a place, unless the reader is there."""

    @abstractmethod
    def _read_until(self, end: int, ahead: int) -> None:
        """Read the records before a position, and some more."""

    @abstractmethod
    def _place_at(self, position: int, ahead: int) -> Any:
        """Return what a reader needs to begin at a position, and what follows there."""

    @abstractmethod
    def _close(self) -> None:
        """Read nothing more before the next beginning."""

    @property
    def _next(self) -> int:
        """Position of the next record that is read."""
        return self._base + len(self._window)

    def _next_block(self, seed: int) -> list[Any]:
        """Return the records that follow, shuffled if they are; fewer at the end, where the iterator ends."""
        assert self._iterator is not None
        block = list(itertools.islice(self._iterator, self._block))
        if len(block) < self._block:
            self._iterator = None
        if self._block == 1 or not block:
            return block
        return [block[place] for place in permute(numpy.arange(len(block)), len(block), mix(seed))]

    def _drop_before(self, position: int) -> None:
        """Delete records that are not requested again."""
        count = min(position - self._base, len(self._window))
        if count > 0:
            del self._window[:count]
            self._base += count


class RecordRequests(Sampler[RecordRequest]):
    """The endless sequence of the requests of a replica."""

    def __init__(self, seed: int, kept: Callable[[], int]) -> None:
        self._seed = seed
        self._kept = kept  # returns the position of the next step's first record, among those that are read

    def begin(
        self,
        sequence: tuple[object, ...],
        start: Any,
        position: int,
        consumed: int,
        plan: BatchPlan,
        rank: int,
        *,
        is_shared: bool,  # whether all replicas read the same records, and each trains its share
        readers: int,  # processes that read: the first request of each contains `start`
        ahead: int = 1,
        looks_first: bool = False,  # whether the first request has no samples, to see what follows
    ) -> None:
        """Let the next iteration begin at a place, after `consumed` samples of all replicas."""
        self._start, self._position, self._readers = start, position, readers
        self._sharers, self._share = (plan.replicas, rank) if is_shared else (1, 0)
        self._ahead, self._looks_first = ahead, looks_first
        self.place = Place(sequence, consumed, plan, rank)

    def __iter__(self) -> Iterator[RecordRequest]:
        place, position, readers = self.place, self._position, self._readers
        plan, size = place.plan, place.plan.local_bsz
        step = self._sharers * size
        looks = self._looks_first
        while True:
            yield RecordRequest(
                first=position if looks else position + self._share * size,
                count=0 if looks else size,
                end=position if looks else position + step,
                keep_from=self._kept() - plan.accumulation * step,
                start=self._start if readers > 0 else None,
                ahead=self._ahead,
                seed=self._seed,
                position=place.position + place.rank * size,
            )
            readers -= 1
            if not looks:
                position += step
                place = place.after(place.plan)
            looks = False


class Samples(Dataset[Any]):
    """Loads what is requested. Worker processes have copies."""

    def __init__(self, reader: RecordReader, transform: Callable[[Any], Any] | None) -> None:
        self._reader = reader
        self._transform = transform

    def __getitems__(self, request: RecordRequest) -> tuple[Any, Any]:
        if get_worker_info() is not None:
            # Other numbers than those of a replica, whose training draws from the same seed and position.
            seed_generators(request.seed, request.position, rank=-1)
        try:
            records, place = self._reader.take(request)
        except DatasetError as error:
            # A DataLoader would add a traceback.
            return DatasetError(str(error)), None
        if len(records) < request.count:
            # It was requested ahead, and the records that follow are others.
            return [], place
        return records if self._transform is None else list(map(self._transform, records)), place


class Collation:
    """Collates samples, and leaves what comes with them as it is."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function

    def __call__(self, loaded: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return a batch and its place."""
        samples, place = loaded
        return samples if place is None or not samples else self._function(samples), place


class RecordFeed(ABC, Generic[P]):
    """Loads a replica's micro-batches of a stream, and has the places after each of them."""

    def __init__(self) -> None:
        self._places: list[tuple[int, P]] = []
        """The last place at a step boundary, and those after the micro-batches since then, each with the
        number of samples that all replicas have got before it."""
        self._source: Any = None
        self.how = StreamOptions()
        self._options: dict[str, Any] = {}
        self._seed = 0
        self._reader: RecordReader | None = None
        self._loader: PersistentLoader[RecordRequests] | None = None
        self.exchanges = 0
        """How often the replicas had to exchange what follows."""

    def open(self, source: Any, how: StreamOptions, options: dict[str, Any], *, seed: int) -> None:
        """Use a source from the next micro-batch on; the one that is open already is read on."""
        before = self.how
        is_same = self._is_open(source) and seed == self._seed
        reads_on = is_same and replace(before, transform=None) == replace(how, transform=None)
        if not reads_on:
            self._reader = None
        if not reads_on or how.transform != before.transform or options != self._options:
            self.close()
        self._source, self.how, self._options, self._seed = source, how, options, seed

    @abstractmethod
    def _is_open(self, source: Any) -> bool:
        """Whether a source is the one that is open."""

    @abstractmethod
    def _make_reader(self) -> RecordReader:
        """Return a reader of the source."""

    def _load(
        self,
        sequence: tuple[object, ...],  # what determines the sequence of records
        start: Any,
        position: int,
        consumed: int,
        plan: BatchPlan,
        rank: int,
        **how: Any,
    ) -> Iterator[Any]:
        """Begin at a place, and return what is loaded, each with the place after it."""
        workers = self._options.get("num_workers", 0)
        requests = (
            RecordRequests(self._seed, lambda: self._places[0][1].position)  # type: ignore[attr-defined]
            if self._loader is None
            else self._loader.sampler
        )
        requests.begin(sequence, start, position, consumed, plan, rank, readers=max(1, workers), **how)
        if self._loader is not None:
            return self._loader.begin()
        if self._reader is None or workers:
            # A copy of a reader that has open files would share their positions with other processes.
            self._reader = self._make_reader()
        collate = Collation(self._options.get("collate_fn") or default_collate)
        # It yields batches and places; after an error, a `DatasetError` and None.
        loader: DataLoader[Any] = DataLoader(
            Samples(self._reader, self.how.transform),
            batch_sampler=requests,  # type: ignore[arg-type]
            generator=torch.Generator().manual_seed(self._seed + consumed),
            **{**self._options, "collate_fn": collate, "persistent_workers": workers > 0},
        )
        if not workers:
            return iter(loader)
        self._reader = None
        self._loader = PersistentLoader(self._source, self._options, loader, requests)
        return self._loader.begin()

    def _delivered(self, loaded: Iterator[Any], consumed: int, step: int) -> Iterator[Any]:
        for batch, place in loaded:
            if place is None:
                raise batch
            consumed += step
            self._places.append((consumed, place))
            yield batch

    def finished_step(self, consumed: int) -> None:
        """Delete the places before a step boundary, since training never returns to them."""
        while len(self._places) > 1 and self._places[1][0] <= consumed:
            self._places.pop(0)

    def close(self) -> None:
        """End worker processes. May be called again."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
