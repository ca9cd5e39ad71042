"""What worker processes of a DataLoader get in place of indices: where to read to, and which records to keep.

So several worker processes take turns, go on when the replicas change, and may be those of any data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.seeding import seed_generators
from adascale_worker.batches.stream import Place
from adascale_worker.errors import DatasetError


@dataclass(frozen=True)
class Request:
    """What to load a micro-batch from."""

    first: int
    count: int
    end: int
    keep_from: int
    start: Any
    ahead: int
    seed: int  # determines the random numbers that are drawn for these samples, together with `position`
    position: int  # in the samples of all replicas


class Reader(Protocol):
    """Reads forward, in this process or a worker process."""

    def take(
        self, first: int, count: int, end: int, keep_from: int, start: Any, ahead: int
    ) -> tuple[list[Any], Any]:
        """Return records, and the place after the micro-batches of all that they are a share of."""


class Requests(Sampler[Request]):
    """The endless sequence of the requests of a replica."""

    def __init__(self, sequence: tuple[object, ...], seed: int, kept: Callable[[], int]) -> None:
        self.sequence = sequence
        self._seed = seed
        self._kept = kept

    def begin(
        self,
        start: Any,
        position: int,
        consumed: int,
        plan: BatchPlan,
        rank: int,
        *,
        is_shared: bool,
        readers: int,
        ahead: int = 1,
        looks_first: bool = False,
    ) -> None:
        """Let the next iteration begin at a place."""
        self._start, self._position, self._readers = start, position, readers
        self._sharers, self._share = (plan.replicas, rank) if is_shared else (1, 0)
        self._ahead, self._looks_first = ahead, looks_first
        self.place = Place(self.sequence, consumed, plan, rank)

    def __iter__(self) -> Iterator[Request]:
        place, position, readers = self.place, self._position, self._readers
        plan, size = place.plan, place.plan.local_bsz
        step = self._sharers * size
        looks = self._looks_first
        while True:
            yield Request(
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

    def __init__(self, reader: Reader, transform: Callable[[Any], Any] | None) -> None:
        self._reader = reader
        self._transform = transform

    def __getitems__(self, request: Request) -> tuple[Any, Any]:
        if get_worker_info() is not None:
            # Other numbers than those of a replica, whose training draws from the same seed and position.
            seed_generators(request.seed, request.position, rank=-1)
        try:
            records, place = self._reader.take(
                request.first,
                request.count,
                request.end,
                request.keep_from,
                request.start,
                request.ahead,
            )
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


def make_loader(
    reader: Reader,
    requests: Requests,
    transform: Callable[[Any], Any] | None,
    options: dict[str, Any],
    *,
    seed: int,
) -> DataLoader[Any]:
    """Return a loader of what is requested, whose worker processes go on.

    It yields batches and places; in place of both, a `DatasetError` and None.
    """
    return DataLoader(
        Samples(reader, transform),
        batch_sampler=requests,  # type: ignore[arg-type]
        generator=torch.Generator().manual_seed(seed),
        **{
            **options,
            "collate_fn": Collation(options.get("collate_fn") or default_collate),
            "persistent_workers": options.get("num_workers", 0) > 0,
        },
    )
