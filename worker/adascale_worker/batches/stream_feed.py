"""The micro-batches of a replica of a stream, and what of the stream is left after each step.

All replicas read the same list of shards and take their share of each micro-batch: of a stream that is read
as a whole, which is one shard, and where fewer shards than replicas are left whose end is unknown.

Otherwise each replica reads a list of shards of its own, one after the other, so that reading costs 1/K. How
long a shard is turns out when it ends. So each replica reads ahead, and they exchange what they have found: a
path, the records that follow and the shards that end there. As long as each path has enough records for a
step, what is left of each shard is a function of the paths and the number of steps, also for the shards of a
replica that is lost. When a path is too short, the shards that are left are dealt again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.stream_reader import (
    Path,
    Request,
    Shard,
    Start,
    Stream,
    StreamPlace,
    StreamReader,
    Stretch,
)
from adascale_worker.errors import DatasetError
from adascale_worker.membership.process_group import ReplicaGroup

STEPS_AHEAD = 4
"""Steps whose records each replica reads ahead, after which the replicas exchange what they have found."""

Lists = tuple[tuple[Shard, ...], ...]
"""The shards that each rank reads, in its order; one list if all ranks read the same."""


def deal(place: StreamPlace, replicas: int) -> Lists:
    """Deal the shards that are left to replicas.

    Each gets a shard whose end is unknown, so it finds the end of another one if it has too few records. A
    shard that was begun stays with the rank that reads it.
    """
    unknown = [shard for shard in place.rest if shard.end is None]
    if replicas == 1 or len(unknown) < replicas:
        return (tuple(sorted(place.rest, key=lambda shard: shard.offset == 0)),)
    lists: list[list[Shard]] = [[] for _ in range(replicas)]
    others = []
    for shard in unknown:
        if shard.offset and shard.owner is not None and shard.owner < replicas and not lists[shard.owner]:
            lists[shard.owner].append(shard)
        else:
            others.append(shard)
    for shard in sorted(others, key=lambda shard: shard.offset == 0):
        min(lists, key=len).append(shard)
    # Those whose end is known come second, so that a shard that was begun is read on.
    for number, shard in enumerate(shard for shard in place.rest if shard.end is not None):
        lists[number % replicas].insert(1, shard)
    return tuple(map(tuple, lists))


def rest_of(shards: Sequence[Shard], path: Path, count: int, rank: int) -> tuple[Shard, ...]:
    """Return what is left of the list of a rank after `count` records of its path, which has so many.

    Ends that the path contains are known then.
    """
    left = []
    found = {(stretch.number, stretch.index): stretch for stretch in path}
    for shard in shards:
        stretch = found.get((shard.number, shard.index))
        if stretch is None:
            left.append(shard)
            continue
        end = stretch.offset + stretch.count if stretch.ends else shard.end
        taken = min(count, stretch.count)
        count -= taken
        offset = stretch.offset + taken
        if not (stretch.ends and offset == end):
            owner = rank if offset or shard.offset else None
            left.append(Shard(shard.number, shard.index, offset, end, owner))
    assert count == 0, "a path has enough records"
    return tuple(left)


def available(path: Path) -> int:
    """Return the number of records of a path."""
    return sum(stretch.count for stretch in path)


def advance(
    stream: Stream, place: StreamPlace, lists: Lists, paths: Sequence[Path], *, before: int, consumed: int
) -> StreamPlace:
    """Return the place after some steps, of whose records each replica has read an equal share."""
    if not any(lists):
        return place  # The steps before have ended the pass.
    rest = tuple(itertools.chain(*_rest_of_each(lists, paths, consumed - before)))
    if rest:
        return replace(place, rest=rest, fingerprint=None, saved=None)
    if consumed == place.begin:
        raise stream.no_records(place.number, place.length)
    length = consumed - place.begin if place.length is None else place.length
    return StreamPlace(place.number + 1, consumed, stream.shards(place.number + 1), length)


def _rest_of_each(lists: Lists, paths: Sequence[Path], count: int) -> Lists:
    pairs = enumerate(zip(lists, paths, strict=True))
    return tuple(rest_of(shards, path, count // len(lists), rank) for rank, (shards, path) in pairs)


class StreamFeed:
    """Loads a replica's micro-batches, and knows what is left of the stream, at each step boundary.

    Its iterations yield the requests of the DataLoader.
    """

    def __init__(self, consumed: int, number: int = 0, group: ReplicaGroup | None = None) -> None:
        self.stream: Stream | None = None
        """What is read. None before the first `open`."""
        self.exchanges = 0
        """How often the replicas had to exchange what follows."""
        self._group = group
        """None if the stream is read as a whole."""
        self._options: dict[str, Any] = {}
        self._reader: StreamReader | None = None
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        """The micro-batches that follow those which were delivered."""
        self._number = number
        """Of the pass in which the replicas have last exchanged what follows."""
        self._place: StreamPlace | None = None
        """Where `_paths`, or `_batches`, begin. None before the first `open`."""
        self._since = consumed
        """Samples of all replicas before it."""
        self._lists: Lists = ()
        self._paths: list[Path] = []
        """Of each list, if there are several."""
        self._steps = 0
        """Steps that the paths are enough for."""
        self._plan, self._rank = BatchPlan(1, 1, 1), 0
        self._places: list[tuple[int, int, Any]] = []
        """The last step boundary, and what follows the micro-batches since then: the samples that all
        replicas have got before it, the records of the list, and the place there, or the path."""

    def open(self, stream: Stream, options: dict[str, Any]) -> None:
        """Use a stream from the next micro-batch on; the one that is open already is read on."""
        before = self.stream
        last = max(shard.index for shard in self._place.rest) if self._place is not None else 0
        if last >= max(stream.count, 1):
            raise DatasetError(
                f"dataloader() got shards={stream.count}, but shard {last} is not read completely yet: use "
                "the same shards as before"
            )
        if before is None or not stream.reads_as(before):
            self._reader = None
            self.close()
        elif stream.transform != before.transform or options != self._options:
            self.close()
        if self._reader is not None:
            self._reader.stream = stream
        self.stream, self._options = stream, options
        if self._place is None:
            self._place = StreamPlace(self._number, self._since, stream.shards(self._number))

    # -- places -------------------------------------------------------------------------------------------

    def place_at(self, consumed: int) -> StreamPlace:
        """Return what is left where all replicas together have got `consumed` samples, at a step boundary."""
        place = self._reached(consumed)
        if len(self._lists) != 1 or place is self._place:
            return place
        # The reader says which shard is the first one that is left.
        assert self.stream is not None, "its list is read"
        assert self._place is not None
        is_same_pass = place.number == self._place.number
        shards = self._lists[0] if is_same_pass else self.stream.shards(place.number)
        later = itertools.dropwhile(lambda each: each.index != place.rest[0].index, shards)
        return replace(place, rest=(*place.rest, *itertools.islice(later, 1, None)))

    def _reached(self, consumed: int) -> StreamPlace:
        assert self._place is not None, "a stream was opened, or a place restored"
        if len(self._lists) > 1 and self.stream is not None:
            paths, before = self._paths, self._since
            return advance(self.stream, self._place, self._lists, paths, before=before, consumed=consumed)
        found = (place for reached, _, place in reversed(self._places) if reached <= consumed)
        return next(found, self._place)

    def restore(self, state: dict[str, Any], consumed: int) -> None:
        """Continue at the place of a saved state."""
        self._place, self._since = StreamPlace.from_state(state), consumed
        self._lists, self._places, self._batches = (), [(consumed, 0, self._place)], None

    def length_at(self, consumed: int) -> int | None:
        """Return the records of the first pass; None while it has not ended."""
        if len(self._lists) > 1 and any(
            len(path) < len(shards) for path, shards in zip(self._paths, self._lists, strict=True)
        ):
            return None  # The next exchange comes before the end of the pass.
        return self._reached(consumed).length

    def finished_step(self, consumed: int) -> None:
        """Record that training is at a step boundary, and never returns to one before."""
        while len(self._places) > 1 and self._places[1][0] <= consumed:
            self._places.pop(0)
        if len(self._lists) > 1:
            self.exchanges += consumed - self._since >= self._steps * self._plan.global_bsz
        elif self._is_dealt:
            self.exchanges += self._reached(consumed).number != self._number

    # -- micro-batches ------------------------------------------------------------------------------------

    @property
    def _is_dealt(self) -> bool:
        """Whether several replicas read the shards."""
        return self.stream is not None and self.stream.count > 0 and self._plan.replicas > 1

    def micro_batches(self, consumed: int, plan: BatchPlan, rank: int) -> Iterator[Any]:
        """Load this replica's micro-batches until `exchanges` has changed. A collective call for shards."""
        stream, place = self.stream, self.place_at(consumed)
        assert stream is not None
        if (self._plan, self._rank) != (plan, rank) or (self._places and self._places[-1][0] != consumed):
            self._batches = None  # Others follow.
        self._plan, self._rank = plan, rank
        if not self._is_dealt:
            if self._batches is None:
                self._batches = self._begin(place, deal(place, 1), consumed)
            return self._batches
        is_shared = len(self._lists) == 1
        path = None if self._batches is None else () if is_shared else self._places[-1][2]
        paths = self._exchange(path)
        if self._batches is not None and paths is not None and is_shared:
            if len(deal(place, plan.replicas)) == 1:
                self._number = place.number
                return self._batches
        elif self._batches is not None and paths is not None:
            lists = _rest_of_each(self._lists, self._paths, consumed - self._since)
            # With the ends that were found since.
            place = advance(stream, place, lists, paths, before=consumed, consumed=consumed)
            if self._is_enough(paths):
                self._use(place, lists, paths, consumed)
                return self._batches
        # Some members may know the ends of more shards, if others were lost while they exchanged them.
        assert self._group is not None
        place = StreamPlace.from_state(self._group.broadcast(place.state_dict()))
        while True:
            lists = deal(place, plan.replicas)
            batches = self._begin(place, lists, consumed)
            if len(lists) > 1:
                paths = self._exchange(self._places[-1][2])
                assert paths is not None
                if not self._is_enough(paths):
                    place = advance(stream, place, lists, paths, before=consumed, consumed=consumed)
                    continue
                self._use(place, lists, paths, consumed)
            self._number, self._batches = place.number, batches
            return batches

    def _use(self, place: StreamPlace, lists: Lists, paths: list[Path], consumed: int) -> None:
        self._place, self._since, self._lists, self._paths = place, consumed, lists, paths
        # One record more is needed to find that the pass has ended.
        self._steps = max(1, min((available(path) - 1) // self._share for path in paths))

    @property
    def _share(self) -> int:
        """The records of a list of one replica in a step."""
        return self._plan.local_bsz * self._plan.accumulation

    def _is_enough(self, paths: list[Path]) -> bool:
        return all(available(path) >= self._share for path in paths)

    def _exchange(self, path: Path | None) -> list[Path] | None:
        """Return the paths of all replicas; None if one has none."""
        assert self._group is not None
        rows = self._group.gather(None if path is None else [list(astuple(stretch)) for stretch in path])
        return None if None in rows else [tuple(Stretch(*each) for each in row) for row in rows]

    def _begin(self, place: StreamPlace, lists: Lists, consumed: int) -> Iterator[Any]:
        """Begin with a list, and return its micro-batches; of a list of its own, first read its path."""
        self._use(place, lists, [() for _ in lists], consumed)
        self._batches, self._places = None, [(consumed, 0, place)]
        if self._loader is None:
            self._loader = self._make_loader()
        loaded = iter(self._loader)
        if len(lists) > 1:
            nothing, found = next(loaded)
            if found is None:
                raise nothing
            self._places = [(consumed, *found)]
        return self._delivered(loaded, consumed, self._plan.replicas * self._plan.local_bsz)

    def _make_loader(self) -> DataLoader[Any]:
        assert self.stream is not None
        workers = self._options.get("num_workers", 0)
        # A copy of a reader that has open files would share their positions with other processes.
        reader = StreamReader(self.stream) if workers or self._reader is None else self._reader
        self._reader = None if workers else reader
        own = {
            "collate_fn": partial(_collate, self._options.get("collate_fn") or default_collate),
            "persistent_workers": workers > 0,
        }
        return DataLoader(
            reader,
            batch_sampler=self,  # type: ignore[arg-type]
            generator=torch.Generator().manual_seed(self.stream.seed + self._since),
            **{**self._options, **own},
        )

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests for the micro-batches that follow `_place`, without end."""
        assert self._place is not None
        assert self.stream is not None
        plan, size, is_shared = self._plan, self._plan.local_bsz, len(self._lists) == 1
        sharers, share = (plan.replicas, self._rank) if is_shared and self.stream.is_exact else (1, 0)
        start = Start(self._place, self._since, self._lists[0 if is_shared else self._rank], is_shared)
        step, ahead = sharers * size, 1 if is_shared else STEPS_AHEAD * self._share + 1
        readers = max(1, self._options.get("num_workers", 0))  # The first request of each has `start`.
        first = self._since + self._rank * size
        if not is_shared:
            yield Request(0, 0, 0, 0, start, ahead, first)
            readers -= 1
        for number in itertools.count():
            position = number * step
            yield Request(
                first=position + share * size,
                count=size,
                end=position + step,
                keep_from=self._places[0][1] - plan.accumulation * step,
                start=start if number < readers else None,
                ahead=ahead,
                place=first + number * plan.replicas * size,
            )

    def _delivered(self, loaded: Iterator[Any], consumed: int, step: int) -> Iterator[Any]:
        try:
            for batch, found in loaded:
                if found is None:
                    raise batch
                consumed += step
                self._places.append((consumed, *found))
                yield batch
        except Exception:
            self._batches = None
            raise

    def close(self) -> None:
        """End worker processes, with the last reference to their DataLoader. May be called again."""
        self._batches = self._loader = None


def _collate(function: Callable[[list[Any]], Any], loaded: tuple[Any, Any]) -> tuple[Any, Any]:
    """Collate samples, and leave what comes with them as it is."""
    samples, found = loaded
    return samples if found is None or not samples else function(samples), found
