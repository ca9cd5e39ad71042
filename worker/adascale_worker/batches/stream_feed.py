"""The micro-batches of a stream that each replica reads as a whole, see `stream_reader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.persistent_loader import PersistentLoader
from adascale_worker.batches.requests import Requests, make_loader
from adascale_worker.batches.stream_reader import StreamPlace, StreamReader


@dataclass(frozen=True)
class StreamOptions:
    """How a stream is read."""

    # is applied to the replica's own records; None if the records are the samples
    transform: Callable[[Any], Any] | None = None
    shuffle_buffer: int = 0  # records of a block that is shuffled; 0 keeps the order of the data set
    # whether each replica reads the same records, and trains its share of them. Otherwise each replica
    # trains all that it reads.
    is_exact: bool = True


class StreamFeed:
    """Loads a replica's micro-batches of a stream, and knows the places after each of them."""

    def __init__(self, place: StreamPlace, consumed: int) -> None:
        self._places = [(consumed, place)]
        """The last place at a step boundary, and those after the micro-batches since then, each after the
        number of samples that all replicas have got before it."""
        self._dataset: Iterable[Any] | None = None
        self._stream = StreamOptions()
        self._options: dict[str, Any] = {}
        self._reader: StreamReader | None = None
        self._loader: PersistentLoader[Requests] | None = None
        self._seed = 0

    def open(
        self, dataset: Iterable[Any], stream: StreamOptions, options: dict[str, Any], *, seed: int
    ) -> None:
        """Use a data set from the next micro-batch on. One that is open already is read on."""
        is_same = dataset is self._dataset and seed == self._seed
        before = self._stream
        if not is_same or (before.shuffle_buffer, before.is_exact) != (
            stream.shuffle_buffer,
            stream.is_exact,
        ):
            self._reader = None
            self.close()
        if stream.transform != before.transform or options != self._options:
            self.close()
        self._dataset, self._stream, self._options, self._seed = dataset, stream, options, seed

    def micro_batches(self, consumed: int, plan: BatchPlan, rank: int) -> Iterator[Any]:
        """Load this replica's micro-batches, without end."""
        place = self.place_at(consumed)
        self._places = [(consumed, place)]
        workers = self._options.get("num_workers", 0)
        if workers and self._loader is not None:
            self._begin(self._loader.sampler, place, consumed, plan, rank)
            loaded: Iterator[Any] = self._loader.begin()
        else:
            loaded = self._new_loader(place, consumed, plan, rank)
        return self._delivered(loaded, consumed, plan.replicas * plan.local_bsz)

    def _begin(
        self, requests: Requests, place: StreamPlace, consumed: int, plan: BatchPlan, rank: int
    ) -> None:
        readers = max(1, self._options.get("num_workers", 0))
        is_exact = self._stream.is_exact
        requests.begin(place, place.position, consumed, plan, rank, is_shared=is_exact, readers=readers)

    def _new_loader(self, place: StreamPlace, consumed: int, plan: BatchPlan, rank: int) -> Iterator[Any]:
        assert self._dataset is not None
        has_workers = self._options.get("num_workers", 0) > 0
        if self._reader is None or has_workers:
            # A copy of a reader that has open files would share their positions with other processes.
            self._reader = StreamReader(
                self._dataset,
                self._seed,
                shuffle_buffer=self._stream.shuffle_buffer,
                is_exact=self._stream.is_exact,
            )
        requests = Requests((self._dataset, self._seed), self._seed, lambda: self._places[0][1].position)
        self._begin(requests, place, consumed, plan, rank)
        transform, seed = self._stream.transform, self._seed + consumed
        loader = make_loader(self._reader, requests, transform, self._options, seed=seed)
        if not has_workers:
            return iter(loader)
        self._reader = None
        self._loader = PersistentLoader(self._dataset, self._options, loader, requests)
        return self._loader.begin()

    def _delivered(self, loaded: Iterator[Any], consumed: int, step: int) -> Iterator[Any]:
        for batch, place in loaded:
            if place is None:
                raise batch
            consumed += step
            self._places.append((consumed, place))
            yield batch

    def place_at(self, consumed: int) -> StreamPlace:
        """Return the place where all replicas together have got `consumed` samples, at a step boundary."""
        return next(
            (place for reached, place in reversed(self._places) if reached <= consumed), self._places[0][1]
        )

    def commit(self, consumed: int) -> StreamPlace:
        """Forget the places before this one, since training never returns to them, and return it."""
        while len(self._places) > 1 and self._places[1][0] <= consumed:
            self._places.pop(0)
        return self._places[0][1]

    def restore(self, place: StreamPlace, consumed: int) -> None:
        """Continue at the place of a saved state."""
        self._places = [(consumed, place)]

    def close(self) -> None:
        """End worker processes. May be called again."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
