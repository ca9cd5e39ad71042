"""The micro-batches of a replica of a stream, and what of the stream is left after each step.

A DataLoader and its worker processes get requests, where to read to and which records to keep: so several
worker processes take turns, and go on when the replicas change. All replicas read the same list of shards and
take their share of each micro-batch: of a stream that is read as a whole, which is one shard, and where fewer
shards than replicas are left whose end is unknown.

Otherwise each replica reads a list of shards of its own, one after the other, so that reading costs 1/K. How
long a shard is turns out when it ends. So each replica reads ahead, and they exchange what they have found: a
path, the records that follow and the shards that end there. As long as each path has enough records for a
step, what is left of each shard is a function of the paths and the number of steps, also for the shards of a
replica that is lost. When a path is too short, the shards that are left are dealt again.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.comparison import fingerprint
from adascale_worker.batches.order import (
    Generators,
    Lengths,
    OrderFunction,
    is_stream,
    mix,
    pass_seed,
    permute,
    seed_generators,
)
from adascale_worker.errors import DatasetError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.torch_private.modules import hidden_worker_info

SAVE_INTERVAL = 1024
"""Records after which the state of a data set is saved. A reader that begins later reads them again."""

_SAME_RECORDS = (
    "it has to yield the same records in the same order in each process, and after a restart. Seed what is "
    "shuffled, by the number that set_epoch(number) gets"
)


_SAME_STREAM = (
    f"{_SAME_RECORDS}. In place of a shuffle buffer of the data set, whose contents are not a part of its "
    "state, pass shuffle_buffer= to trainer.dataloader. For a stream that cannot be repeated, pass "
    "exactly_once=False"
)


@dataclass(frozen=True)
class Shard:
    """What is left of a shard in a pass."""

    number: int  # of the pass
    index: int
    offset: int = 0  # records of it that were trained
    end: int | None = None  # its number of records; None if it is unknown
    owner: int | None = None  # the rank that has begun to read it; None if none has

    @property
    def place(self) -> tuple[int, int, int]:
        """Where reading it begins."""
        return self.number, self.index, self.offset


@dataclass(frozen=True)
class Stretch:
    """Consecutive records of a shard."""

    number: int  # of the pass
    index: int  # of the shard
    offset: int  # records of the shard before them
    count: int
    ends: bool  # whether the shard ends after them


Path = tuple[Stretch, ...]
"""What follows in the list of a replica, as far as it has read ahead."""


@dataclass(frozen=True)
class Stream:
    """An iterable data set and how it is read."""

    dataset: Any = field(compare=False)
    count: int = 0  # of its shards; 0 if it is read as a whole, as one shard
    is_function: bool = False  # whether the data set is a function that returns the records of a shard
    transform: Callable[[Any], Any] | None = None  # applied to the replica's own records
    shuffle_buffer: int = 0  # records of a block that is shuffled; 0 keeps the order of the data set
    # Each replica reads the same records, and trains its share. Otherwise it trains all that it reads.
    is_exact: bool = True
    shuffles_shards: bool = True  # whether each pass has another order of them
    seed: int = 0

    @classmethod
    def of(
        cls,
        dataset: Any,
        shards: int | None,
        order: OrderFunction | None,
        lengths: Lengths | None,
        **how: Any,
    ) -> Stream | None:
        """Return the stream that arguments of `dataloader` describe; None if it has items by index.

        Its shards are those of a function, if `shards` is given, or of a data set with `num_shards` and
        `shard()`, as those of Hugging Face.
        """
        stream = cls(dataset, **how)
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
                    f"dataloader() got {', '.join(names)}, which is for streams, but the data set (type "
                    f"{kind}) has items by index: leave it out, and make samples in __getitem__"
                )
            return None
        if order is not None or lengths is not None:
            raise DatasetError(
                f"dataloader() got {'lengths=' if order is None else 'order='}, which needs items by index, "
                f"but the data set (type {kind}) is a stream: leave it out, or shuffle by "
                "shuffle_buffer=10_000"
            )
        if type(stream.shuffle_buffer) is not int or stream.shuffle_buffer < 0:
            raise DatasetError(
                f"dataloader() got shuffle_buffer={stream.shuffle_buffer!r}: it must be an integer of at "
                "least 0, the number of records that are shuffled together"
            )
        if shards is not None:
            return replace(stream, count=shards, is_function=True)
        count = getattr(dataset, "num_shards", None)
        if type(count) is int and count > 1 and callable(getattr(dataset, "shard", None)) and stream.is_exact:
            return replace(stream, count=count)
        if isinstance(dataset, Iterator):
            raise DatasetError(
                f"dataloader() got an iterator (type {kind}), which can be read only once, and replicas that "
                "join have to read it too: pass an object whose __iter__ begins a pass each time, such as an "
                "IterableDataset, or a torchdata Loader in place of its node"
            )
        return stream

    def reads_as(self, other: Stream) -> bool:
        """Whether the records of another stream are the same."""
        if replace(self, transform=None) != replace(other, transform=None):
            return False
        # A method of an object is another object each time.
        return self.dataset is other.dataset or (self.is_function and bool(self.dataset == other.dataset))

    def shards(self, number: int) -> tuple[Shard, ...]:
        """Return the shards of a pass in their order."""
        indices = numpy.arange(max(self.count, 1))
        if self.shuffles_shards and self.count:
            indices = permute(indices, self.count, pass_seed(self.seed, number))
        return tuple(Shard(number, index) for index in indices.tolist())

    def records(self, shard: Shard) -> Any:
        """Return the records of a shard in a pass."""
        records = self.dataset
        if self.is_function:
            records = records(shard.index)
        elif self.count:
            records = records.shard(num_shards=self.count, index=shard.index)
        if callable(getattr(records, "set_epoch", None)):
            records.set_epoch(shard.number)
        return records

    def no_records(self, number: int, length: int | None) -> DatasetError:
        """Return the error for a pass without records; `length` is that of the first one."""
        kind = type(self.dataset).__name__
        if length is None:
            return DatasetError(
                f"the stream (type {kind}) has 0 records: check the path of the data, and what filters it"
            )
        return DatasetError(
            f"pass {number} of the stream (type {kind}, passes are counted from 0) has 0 records, and the "
            f"first one had {length}: iter(dataset) has to begin a new pass each time, such as by __iter__ "
            "with yield"
        )


@dataclass(frozen=True)
class StreamPlace:
    """What is left of a pass."""

    number: int
    begin: int  # records of all passes before it
    rest: tuple[Shard, ...]  # the shards that have not ended
    length: int | None = None  # records of the first pass; None while it has not ended
    # Of a stream that is read as a whole:
    fingerprint: int | None = None  # of the next record; None if it is unknown or the first of its pass
    saved: tuple[int, Any] | None = None  # the last state of the data set in this pass, and records before it

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain values."""
        return {
            **vars(self),
            "rest": [list(astuple(each)) for each in self.rest],
            "saved": None if self.saved is None else list(self.saved),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StreamPlace:
        """Return the place that `state_dict` describes."""
        saved = None if state["saved"] is None else tuple(state["saved"])
        return cls(**{**state, "rest": tuple(Shard(*each) for each in state["rest"]), "saved": saved})


class Start(NamedTuple):
    """Where a reader begins."""

    place: StreamPlace
    consumed: int  # records of all replicas before it
    shards: tuple[Shard, ...]  # the list to read
    # All replicas read this list, and then all further passes. Else it has an end.
    is_shared: bool


@dataclass(frozen=True)
class Request:
    """What to load a micro-batch from."""

    first: int  # position of the first record, counted from `start`
    count: int  # fewer records are returned if they end
    end: int  # position after the micro-batches of all replicas
    keep_from: int  # position of the first record that may be requested again
    start: Start | None  # where to begin if the reader is elsewhere; None if it is not
    ahead: int  # records after `end` that are read too, if there are so many
    place: int  # in the samples of all replicas: random numbers depend on it


class _Begun(NamedTuple):
    shard: Shard
    position: int  # of its first record
    begin: int  # records of all passes before its pass


class StreamReader(Dataset[Any]):
    """Reads records forward, in this process or a worker process, and keeps those that may be requested."""

    # A stream that is read as a whole is one shard. A reader that begins inside it loads the last state of
    # the data set before this position, if it has states, reads forward from there, and compares the
    # fingerprint of the next record with the one from before. A data set may draw from the generators of
    # Python, NumPy and torch: they are seeded for it at the beginning of each shard and where its state is
    # saved, and have states of their own outside it.

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._block = max(1, stream.shuffle_buffer)
        self._is_compared = stream.is_exact and not stream.count
        """Whether places have fingerprints and states."""
        self._interval = self._block * max(1, SAVE_INTERVAL // self._block)
        self._generators = Generators()
        self._start: Start | None = None
        self._coming: deque[Shard] = deque()
        """The shards of the list that follow those which were begun."""
        self._begun: list[_Begun] = []
        """Those that the window, or what follows it, is in."""
        self._iterator: Iterator[Any] | None = None
        """Of the last one that was begun. None if it has ended."""
        self._read = 0
        """Records of it that were read."""
        self._window: list[Any] = []
        self._base = 0
        """Position of the first record of the window."""
        self._saves: deque[tuple[int, int, Any]] = deque()
        """States of the data set, each with its pass and the number of records before it."""
        self._first: tuple[int, int] | None = None
        """Number and records of the first pass that has ended here."""

    def __getitems__(self, request: Request) -> tuple[Any, Any]:
        """Return samples, and the place after the micro-batches of all replicas that they are a share of."""
        stream = self.stream
        if get_worker_info() is not None:
            # Other numbers than those of a replica, whose training draws from the same seed and position.
            seed_generators(stream.seed, request.place, rank=-1)
        try:
            records, found = self._take(request)
        except DatasetError as error:
            # A DataLoader would add a traceback.
            return DatasetError(str(error)), None
        if len(records) < request.count:
            # It was requested ahead, and the records that follow are others.
            records = []
        transform = stream.transform
        return records if transform is None else list(map(transform, records)), (request.end, found)

    def _take(self, request: Request) -> tuple[list[Any], StreamPlace | Path]:
        with hidden_worker_info(), self._generators.used() if self.stream.is_exact else nullcontext():
            try:
                if request.start is not None:
                    self._begin_at(request.start)
                self._drop_before(min(request.keep_from, request.first))
                self._read_until(request.end, request.ahead)
            except BaseException:
                self._start = None
                raise
        assert self._start is not None
        offset, end = request.first - self._base, request.end
        found = self._place_at(end) if self._start.is_shared else self._path(end, end + request.ahead)
        return self._window[offset : offset + request.count], found

    @property
    def _next(self) -> int:
        """Position of the next record that is read."""
        return self._base + len(self._window)

    # -- another list -------------------------------------------------------------------------------------

    def _begin_at(self, start: Start) -> None:
        is_elsewhere = not self._continues(start)
        self._start = start
        place = start.place
        if is_elsewhere:
            first, *following = start.shards
            # Without `is_exact`, a replica reads passes of its own from their beginning.
            self._coming = deque([first if self.stream.is_exact else replace(first, offset=0), *following])
            self._iterator, self._first = None, None
            self._begun, self._window, self._base = [], [], 0
            self._saves.clear()
            self._begin_shard(place.saved if self.stream.is_exact else None)
        if self._next > 0 or not self.stream.is_exact or place.fingerprint is None:
            return
        self._read_until(0, 1)
        if place.fingerprint != self._fingerprint_at(0):
            how = (
                "when it is read again" if place.saved is None else "after load_state_dict() of the data set"
            )
            raise DatasetError(
                f"record {place.rest[0].offset} of pass {place.number} of the stream (both counted from 0) "
                f"is another one {how} than before: {_SAME_STREAM}"
            )

    def _continues(self, start: Start) -> bool:
        """Use what was read of the last list, if the next one begins inside it; return whether it does."""
        first, place = start.shards[0], start.place
        same = [number for number, each in enumerate(self._begun) if each.shard.place[:2] == first.place[:2]]
        if self._start is None or not same:
            return False
        later = self._begun[same[0] + 1 :]
        begun = self._begun[same[0]]
        position = begun.position + first.offset - begun.shard.offset
        is_ahead = not later and self._iterator is not None and position > self._next
        if is_ahead and (
            not self.stream.is_exact or (place.saved is not None and place.saved[0] > self._read)
        ):
            return False
        if not (self._base <= position <= (later[0].position if later else self._next) or is_ahead):
            return False
        coming = deque(start.shards[1:])
        found = [_Begun(first, 0, place.begin)]
        for each in later:
            if not coming and start.is_shared:
                coming.extend(self.stream.shards(found[-1].shard.number + 1))
            if not coming or coming[0].place != each.shard.place:
                return False
            shard = coming.popleft()
            begin = place.begin if shard.number == place.number else each.begin
            found.append(_Begun(shard, each.position - position, begin))
        if self._iterator is None and not coming and start.is_shared:
            # The pass has ended in a list of this replica's own.
            last = found[-1]
            length = start.consumed + self._next - position - last.begin
            self._first = self._first or (last.shard.number, length)
            coming.extend(self.stream.shards(last.shard.number + 1))
        self._begun, self._coming = found, coming
        del self._window[: position - self._base]
        self._base = 0
        return True

    # -- reading ------------------------------------------------------------------------------------------

    def _read_until(self, end: int, ahead: int) -> None:
        """Read the records before a position, and some more; of a list without end, not of the next pass."""
        assert self._start is not None
        while self._next < end + ahead:
            if self._iterator is None and (self._next >= end if self._start.is_shared else not self._coming):
                break
            self._read_block()

    def _read_block(self) -> None:
        """Read a block of the present shard, or begin the next one."""
        if self._iterator is None:
            self._begin_shard()
        assert self._iterator is not None
        shard = self._begun[-1].shard
        if self._read and self._read % self._interval == 0:
            self._save(shard.number, self._iterator)
        block = list(itertools.islice(self._iterator, self._block))
        if len(block) < self._block:
            self._iterator = None
        if len(block) > 1:
            places = permute(numpy.arange(len(block)), len(block), mix(self._shard_seed + self._read))
            block = [block[place] for place in places]
        self._window += block[max(shard.offset - self._read, 0) :]
        self._read += len(block)
        if self._iterator is None:
            self._end_shard(shard)

    def _begin_shard(self, saved: tuple[int, Any] | None = None) -> None:
        assert self._start is not None
        shard = self._coming.popleft()
        before = self._begun[-1] if self._begun else None
        if before is None or before.shard.number == shard.number:
            begin = self._start.place.begin if before is None else before.begin
            if not self.stream.is_exact and before is None:
                begin = self._start.consumed
        else:
            begin = self._start.consumed + self._next
        self._begun.append(_Begun(shard, self._next, begin))
        self._read = 0
        self._seed()
        records = self.stream.records(shard)
        if saved is None:
            self._iterator = iter(records)
            return
        self._read, state = saved
        self._saves.append((shard.number, *saved))
        if _has_states(records):
            records.load_state_dict(copy.deepcopy(state))
        iterator: Any = iter(records)
        if not _has_states(records):
            iterator.load_state_dict(copy.deepcopy(state))
        self._iterator = iterator
        self._seed()

    def _end_shard(self, shard: Shard) -> None:
        assert self._start is not None
        number, read = shard.number, self._read
        known = read if shard.end is None else shard.end
        if read != known or read < shard.offset:
            what, same = f"shard {shard.index} of the stream", _SAME_RECORDS
            if not self.stream.count:
                what, same = "the stream", _SAME_STREAM
            raise DatasetError(
                f"{what} has ended after {read} records in pass {number} (counted from 0), but it had "
                f"{max(shard.offset, known)} before: {same}"
            )
        if self._coming or not self._start.is_shared:
            return
        length = self._start.consumed + self._next - self._begun[-1].begin
        if length == 0:
            raise self.stream.no_records(number, self._start.place.length or (self._first or (0, None))[1])
        self._first = self._first or (number, length)
        self._coming.extend(self.stream.shards(number + 1))

    def _save(self, number: int, iterator: Any) -> None:
        """Save the state of the data set before its next record, if it has one."""
        if not self._is_compared:
            return
        if self._saves and self._saves[-1][:2] == (number, self._read):
            return
        self._seed()
        source: Any = self.stream.dataset if _has_states(self.stream.dataset) else iterator
        if _has_states(source):
            self._saves.append((number, self._read, copy.deepcopy(source.state_dict())))

    @property
    def _shard_seed(self) -> int:
        shard = self._begun[-1].shard
        return mix(pass_seed(self.stream.seed, shard.number) + shard.index)

    def _seed(self) -> None:
        if self.stream.is_exact:
            self._generators.seed(mix(self._shard_seed + self._read))

    def _drop_before(self, position: int) -> None:
        """Delete records that are not requested again."""
        count = min(position - self._base, len(self._window))
        if count > 0:
            del self._window[:count]
            self._base += count
        while len(self._begun) > 1 and self._begun[1].position <= self._base:
            self._begun.pop(0)
        shard, first, _ = self._begun[0]
        base = shard.number, shard.offset + self._base - first
        while len(self._saves) > 1 and self._saves[1][:2] <= base:
            self._saves.popleft()

    # -- places -------------------------------------------------------------------------------------------

    def _place_at(self, position: int) -> StreamPlace:
        """Return the place at a position whose record, or the end of a shard, was read.

        It has the first shard that is left only: there may be thousands, and there is a place for each
        micro-batch.
        """
        assert self._start is not None
        place = self._start.place
        last = max(number for number, each in enumerate(self._begun) if each.position <= position)
        shard, first, begin = self._begun[last]
        if position < self._next or self._iterator is not None:
            left = replace(shard, offset=shard.offset + position - first)
        elif last + 1 < len(self._begun):
            left = self._begun[last + 1].shard
        else:
            left = self._coming[0]
        number, offset = left.number, left.offset
        length = place.length
        if length is None and self._first is not None and number > self._first[0]:
            length = self._first[1]
        states = [each[1:] for each in self._saves if each[0] == number and each[1] <= offset]
        return StreamPlace(
            number,
            begin if number == shard.number else self._start.consumed + position,
            (left,),
            length,
            self._fingerprint_at(position) if self._is_compared and offset else None,
            states[-1] if states else None,
        )

    def _fingerprint_at(self, position: int) -> int | None:
        """Return the fingerprint of the record at a position; None if the pass ends there."""
        return fingerprint(self._window[position - self._base]) if position < self._next else None

    def _path(self, start: int, end: int) -> Path:
        """Return the stretches between two positions, also that of a shard which ends at the first."""
        path = []
        ends = [*(each.position for each in self._begun[1:]), self._next]
        for number, ((shard, begin, _), stop) in enumerate(zip(self._begun, ends, strict=True), 1):
            low, high = max(start, begin), min(end, stop)
            is_ended = number < len(ends) or self._iterator is None
            if low <= high:
                offset = shard.offset + low - begin
                path.append(Stretch(shard.number, shard.index, offset, high - low, is_ended and high == stop))
        return tuple(path)


def _has_states(source: object) -> bool:
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


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
